"""`dp` with the blocks of each kind treated alike: one pattern for all of them, or two and the block where they change.

Patterns of a kind are enumerated on the retention graph (`alike_patterns`), and the plan is a path over whole blocks
(`alike_labels`). What lies outside of blocks is chosen with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations

from ..alike_space import alike_problem
from ..errors import BudgetTooSmallError
from ..problem import Problem, Segment
from ..simulate import simulate
from ..solution import Solution, Status, limit_in_force, make_solution
from ..tables import Tables, tables_of
from .alike_labels import AlikeSearch
from .alike_patterns import MOST_PATTERNS, patterns_of
from .least_peak import least_room
from .level_edges import SaveOptions
from .retention_graph import PINNED_NOTE, graph_of
from .save_options import save_options

_FEW = 40
"""Patterns of each kind in the first search, which is short and whose plan bounds the second one."""
_MOST_STATES = 20_000
"""What labels of kinds that take turns may remember: about so many combinations are told apart."""


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Find the one-level plan that treats blocks alike, adds least time and fits the budget.

    The plan space: that of `dp`, where a segment lies within one block or outside of all, the blocks of a kind have
    corresponding segments, and these may change at one block of each kind. The answer is optimal in it, unless
    patterns had to be left out or tensors pinned: its note says so.

    Args:
        problem: The problem, with its kinds.
        time_limit_s: Seconds after which the best plan known is returned; `DEFAULT_LIMIT_S` unless given. Listing the
            patterns, and a first search in few of them, are not interrupted.
        gap: Plays no part: the search is exact.

    Raises:
        BudgetTooSmallError: If no such plan fits, with the one of the least peak.
    """
    del gap
    started = time.perf_counter_ns()
    limit_s = limit_in_force(time_limit_s)
    deadline = time.perf_counter() + limit_s
    space = _space(alike_problem(problem))
    room = space.tables.room_bytes(problem, problem.budget_bytes)
    status, found, note = Status.FEASIBLE, None, space.note
    if problem.floor_bytes <= problem.budget_bytes:
        found = space.few.cheapest(room)
        added_ns = None if found is None else simulate(problem, found, trace=False).added_ns
        try:
            better = space.search.cheapest(room, most_ns=added_ns, deadline=deadline)
            found = found if better is None else better
            status = Status.FEASIBLE if note else Status.OPTIMAL
        except TimeoutError:
            status = Status.TIME_LIMIT
            note = f"{note}; " * bool(note) + f"stopped at the time limit of {limit_s:g} s"
    if found is not None:
        return make_solution(problem, found, solver="dp", started_ns=started, status=status, note=note)
    found = _least_peak(space.problem, space.search, deadline)
    solution = make_solution(problem, found, solver="dp", started_ns=started, note=note)
    if solution.peak_bytes <= problem.budget_bytes:  # Pinning overstates a plan in the graph, not in its price.
        return solution
    raise BudgetTooSmallError(problem, solution)


@dataclass(frozen=True, slots=True)
class _Space:
    """Hold what does not depend on the budget, and is kept with the tables."""

    problem: Problem
    tables: Tables
    few: AlikeSearch
    search: AlikeSearch
    note: str


def _space(problem: Problem) -> _Space:
    tables = tables_of(problem)
    known = tables.graphs.get(("alike", problem.kinds))
    if known is None:
        graph = graph_of(tables, _corresponding(problem, save_options(problem)))
        patterns = [patterns_of(graph, kind) for kind in problem.kinds]
        most = _most_patterns(problem)
        weighed = [own.thinned(most) for own in patterns]
        notes = [PINNED_NOTE.format(count=graph.pinned.bit_count())] if graph.pinned else []
        if not all(own.exact for own in weighed):
            listed = ", ".join(str(len(own.parts)) for own in weighed)
            notes.append(f"of all patterns that a block may have, {listed} were weighed; cheaper plans may exist")
        few = AlikeSearch(problem, graph, [own.thinned(_FEW) for own in patterns])
        search = AlikeSearch(problem, graph, weighed)
        known = tables.graphs["alike", problem.kinds] = _Space(problem, tables, few, search, "; ".join(notes))
    assert isinstance(known, _Space)
    return known


def _least_peak(problem: Problem, search: AlikeSearch, deadline: float) -> tuple[Segment, ...]:
    """Return the cheapest plan of the least peak; past the deadline a dearer one."""
    best, room = least_room(problem, search.smallest)
    try:
        cheapest = search.cheapest(room, deadline=deadline)
    except TimeoutError:
        return best
    return best if cheapest is None else min(best, cheapest, key=lambda plan: simulate(problem, plan).added_ns)


def _most_patterns(problem: Problem) -> int:
    """Return how many patterns of each kind to weigh: fewer where several kinds take turns."""
    spans = [(kind.bounds[0][0], kind.bounds[-1][-1]) for kind in problem.kinds]
    together = max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=1)
    return MOST_PATTERNS if together < 2 else max(2, int(_MOST_STATES ** (1 / together) / 2))


def _corresponding(problem: Problem, options: SaveOptions) -> SaveOptions:
    """Offer each block the save sets that any block of its kind is offered."""
    found = dict(options)
    for kind in problem.kinds:
        indices = [{operator: index for index, operator in enumerate(own)} for own in kind.operators]
        for first, last in combinations(range(len(kind.bounds[0])), 2):
            places = [(bounds[first], bounds[last]) for bounds in kind.bounds]
            sets = {
                tuple(sorted(index[operator] for operator in keep))
                for place, index in zip(places, indices, strict=True)
                for keep in options.get(place, ())
            }
            for place, own in zip(places, kind.operators, strict=True):
                if sets:
                    found[place] = tuple(tuple(sorted(own[index] for index in keep)) for keep in sorted(sets))
    return found
