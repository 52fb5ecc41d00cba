"""The cheapest plan of the least peak of a retention graph: the one answer where no plan fits the budget."""

from __future__ import annotations

from collections.abc import Callable

from ..problem import Problem, Segment
from ..simulate import simulate
from ..tables import tables_of
from .labels import LabelSearch

_NO_LIMIT = 2**60
Naming = Callable[[list[int]], tuple[Segment, ...]]


def least_peak_plan(
    problem: Problem,
    search: LabelSearch,
    named: Naming,
    known: tuple[Segment, ...] | None = None,
    *,
    deadline: float,
) -> tuple[Segment, ...]:
    """Return the cheapest plan that fits the least budget any path fits, found by bisection.

    It does not depend on the problem's budget, unless the deadline comes first: then it may be a dearer one.

    Args:
        problem: The problem.
        search: Its graph.
        named: Gives the segments of a path.
        known: A plan to start from; any without one.
        deadline: `time.perf_counter()` at which to look for no cheaper plan any more.
    """
    tables = tables_of(problem)

    def room_of(plan: tuple[Segment, ...]) -> int:
        return tables.room_bytes(problem, simulate(problem, plan, trace=False).peak_bytes)

    def added_by(plan: tuple[Segment, ...]) -> int:
        return simulate(problem, plan, trace=False).added_ns

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
    path = search.cheapest(high, gap=0.0, deadline=deadline)
    return best if path is None else min(best, named(path.edges), key=added_by)
