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
    """Return the cheapest plan that fits the least budget any path fits.

    It does not depend on the problem's budget, unless the deadline comes first: then it may be a dearer one.

    Args:
        problem: The problem.
        search: Its graph.
        named: Gives the segments of a path.
        known: A plan to start from; any without one.
        deadline: `time.perf_counter()` at which to look for no cheaper plan any more.
    """

    def smallest(room: int) -> tuple[Segment, ...] | None:
        path = search.smallest(room)
        return None if path is None else named(path)

    best, room = least_room(problem, smallest, known)
    path = search.cheapest(room, gap=0.0, deadline=deadline)
    return best if path is None else min(best, named(path.edges), key=lambda plan: _added_ns(problem, plan))


def least_room(
    problem: Problem, smallest: Callable[[int], tuple[Segment, ...] | None], known: tuple[Segment, ...] | None = None
) -> tuple[tuple[Segment, ...], int]:
    """Return a plan of the least room that any fits, and that room, found by bisection.

    Args:
        problem: The problem.
        smallest: Gives a plan that fits a room; None where none does.
        known: A plan to start from; any without one.
    """
    tables = tables_of(problem)

    def room_of(plan: tuple[Segment, ...]) -> int:
        return tables.room_bytes(problem, simulate(problem, plan, trace=False).peak_bytes)

    best = known if known is not None else smallest(_NO_LIMIT)
    assert best is not None
    low, high = -1, room_of(best)
    while low < high - 1:
        room = (low + high) // 2
        plan = smallest(room)
        if plan is None:
            low = room
            continue
        best = plan
        high = min(room, room_of(best))
    return best, high


def _added_ns(problem: Problem, plan: tuple[Segment, ...]) -> int:
    return simulate(problem, plan, trace=False).added_ns
