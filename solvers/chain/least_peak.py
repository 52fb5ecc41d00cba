"""The plan of the least peak of a retention graph: the one answer where no plan fits the budget."""

from __future__ import annotations

from collections.abc import Callable

from ..problem import Problem, Segment
from ..simulate import simulate
from ..tables import tables_of
from .labels import LabelSearch

_NO_LIMIT = 2**60
Naming = Callable[[list[int]], tuple[Segment, ...]]


def least_peak_plan(
    problem: Problem, search: LabelSearch, named: Naming, known: tuple[Segment, ...] | None = None
) -> tuple[Segment, ...]:
    """Return the plan that fits the least budget any path fits, by bisection; it does not depend on the budget.

    Args:
        problem: The problem.
        search: Its graph.
        named: Gives the segments of a path.
        known: A plan to start from; any without one.
    """
    tables = tables_of(problem)

    def room_of(plan: tuple[Segment, ...]) -> int:
        return tables.room_bytes(problem, simulate(problem, plan, trace=False).peak_bytes)

    if known is None:
        path = search.smallest(_NO_LIMIT)
        assert path is not None
        known = named(path)
    low, best, high = -1, known, room_of(known)
    while low < high - 1:
        room = (low + high) // 2
        path = search.smallest(room)
        if path is None:
            low = room
            continue
        best = named(path)
        high = min(room, room_of(best))
    return best
