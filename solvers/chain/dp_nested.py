"""`dp_nested`: segments inside segments, on top of the one-level programme.

What nesting a segment's inside saves in memory and costs in time comes from `NestedTables`; each such trade is one
more edge of the retention graph, so the flat plans stay in the search and the top level is exact.
"""

from __future__ import annotations

import time

from ..errors import BudgetTooSmallError
from ..problem import Problem, Segment
from ..simulate import simulate
from ..solution import Solution, Status, limit_in_force, make_solution
from ..tables import tables_of
from . import dp
from .labels import LabelSearch
from .least_peak import least_peak_plan
from .nested_graph import MOST_TRADES, NestedGraph
from .nested_tables import INFINITE, TooManyStatesError
from .retention_graph import PINNED_NOTE

UNITS = 1024


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0, save_sets: bool = True) -> Solution:
    """Find the plan with segments nested to any depth that adds least time and fits the budget.

    The plan space: trees of candidates; what is neither nested nor has children may have one of the save sets that
    `save_options` lists. Room inside segments is counted in units of the budget's 1024th part or a little more. Rounded
    up, it gives a plan that is safe, and never worse than that of `dp`; rounded down, the bound. Where the unit is one
    byte the answer is optimal.

    Args:
        problem: The problem.
        time_limit_s: Seconds after which the best plan known, at worst that of `dp`, is returned; `DEFAULT_LIMIT_S`
            unless given.
        gap: Share of its own added time that the plan may be away from the optimum.
        save_sets: Whether segments may keep some operators' outputs.

    Raises:
        BudgetTooSmallError: If no plan fits, with the plan of the least peak.
    """
    started = time.perf_counter_ns()
    limit_s = limit_in_force(time_limit_s)
    deadline = time.perf_counter() + limit_s
    flat: Solution | BudgetTooSmallError
    try:
        flat = dp.solve(problem, time_limit_s=limit_s, gap=gap, save_sets=save_sets)
    except BudgetTooSmallError as error:
        flat = error
    if isinstance(flat, Solution) and flat.added_ns == 0:
        return make_solution(problem, flat.segments, solver="dp_nested", started_ns=started)
    try:
        return _solve_nested(problem, flat, gap, deadline, limit_s, save_sets, started)
    except TooManyStatesError:
        note = "too many tensors travel inside segments: nesting was not searched"
        status = Status.FEASIBLE
    except TimeoutError:
        note = f"stopped at the time limit of {limit_s:g} s before nesting was searched"
        status = Status.TIME_LIMIT
    known = flat if isinstance(flat, Solution) else flat.solution
    solution = make_solution(problem, known.segments, solver="dp_nested", started_ns=started, status=status, note=note)
    if isinstance(flat, BudgetTooSmallError):
        raise BudgetTooSmallError(problem, solution) from None
    return solution


def _solve_nested(
    problem: Problem,
    flat: Solution | BudgetTooSmallError,
    gap: float,
    deadline: float,
    limit_s: float,
    save_sets: bool,
    started: int,
) -> Solution:
    """Search flat and nested plans together.

    Raises:
        BudgetTooSmallError: If none fits.
        TooManyStatesError: If nesting cannot be searched.
        TimeoutError: If the deadline passes before it is.
    """
    tables = tables_of(problem)
    room = tables.room_bytes(problem, problem.budget_bytes)
    most = flat.added_ns if isinstance(flat, Solution) else INFINITE - 1
    nested, path = None, None
    if problem.floor_bytes <= problem.budget_bytes:
        nested = NestedGraph(problem, room, units=UNITS, save_sets=save_sets, deadline=deadline, most_ns=most)
        path = LabelSearch(nested.graph, tables).cheapest(room, gap=gap, deadline=deadline)
    if nested is None or path is None:
        assert isinstance(flat, BudgetTooSmallError)
        segments = _least_peak(problem, flat.solution, save_sets, deadline)
        solution = make_solution(problem, segments, solver="dp_nested", started_ns=started)
        if nested is None or solution.peak_bytes > problem.budget_bytes:
            raise BudgetTooSmallError(problem, solution)
    else:
        segments = nested.segments(path.edges)
    added = simulate(problem, segments, trace=False).added_ns
    if isinstance(flat, Solution) and flat.added_ns <= added:
        segments, added = flat.segments, flat.added_ns
    finished = path is None or path.finished
    note, bound = "", 0
    if nested.graph.pinned:
        note = PINNED_NOTE.format(count=nested.graph.pinned.bit_count())
    elif nested.exact and path is not None:
        bound = path.bound_ns
    else:
        note = _coarseness(nested)
        bound = _bound(problem, room, added, save_sets, gap, deadline)
        finished &= bound > 0
    status = Status.OPTIMAL if bound >= added else Status.FEASIBLE if finished else Status.TIME_LIMIT
    if not finished:
        note = "; ".join(filter(None, (note, f"stopped at the time limit of {limit_s:g} s")))
    return make_solution(
        problem, segments, solver="dp_nested", started_ns=started, status=status, lower_bound_ns=bound, note=note
    )


def _least_peak(problem: Problem, flat: Solution, save_sets: bool, deadline: float) -> tuple[Segment, ...]:
    tables = tables_of(problem)
    high = tables.room_bytes(problem, flat.peak_bytes)
    nested = NestedGraph(problem, high, units=UNITS, save_sets=save_sets, deadline=None)
    search = LabelSearch(nested.graph, tables)
    return least_peak_plan(problem, search, nested.segments, flat.segments, deadline=deadline)


def _coarseness(nested: NestedGraph) -> str:
    unit = nested.tables.unit
    if unit == 1:
        return f"{MOST_TRADES} ways to nest inside each segment are weighed"
    return f"room inside segments is counted in units of {unit} bytes"


def _bound(problem: Problem, room: int, added_ns: int, save_sets: bool, gap: float, deadline: float) -> int:
    """Return a time that no nested plan goes below, at most `added_ns`; 0 where the deadline passes first.

    Rounded up, tables of whole units say what can be done; rounded down, what cannot.
    """
    try:
        most = max(0, added_ns - 1)
        nested = NestedGraph(
            problem, room, units=UNITS, save_sets=save_sets, deadline=deadline, most_ns=most, bounding=True
        )
    except TimeoutError:
        return 0
    path = LabelSearch(nested.graph, tables_of(problem)).cheapest(room, gap=gap, deadline=deadline)
    return added_ns if path is None else min(added_ns, path.bound_ns)
