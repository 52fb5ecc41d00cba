"""`ilp`: exact over one level of segments with save sets chosen operator by operator, by an integer programme.

The programme is in `ilp_model`; HiGHS solves it through PuLP, CBC where HiGHS is not to be had. The dynamic
programme's answer is its start and its safety net, and where divisible save sets bound it closely enough
(`save_set_bound`), the programme is not solved at all.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import pulp  # pyright: ignore[reportMissingTypeStubs] - it has annotations, but no py.typed

from ..alike_space import alike_problem, pattern_changes
from ..chain import alike, dp
from ..chain.save_set_bound import save_set_bound
from ..errors import BudgetTooSmallError
from ..problem import Problem, Segment
from ..simulate import simulate
from ..solution import Solution, Status, limit_in_force, make_solution
from ..tables import tables_of
from .backends import Answer, run_cbc, run_highs
from .ilp_model import IlpModel, ModelBuilder

_MOST_ATTEMPTS = 3
BOUNDING_SHARE = 0.3
"""Share of the time limit after which the bound of divisible save sets is taken as it is then."""


@dataclass(slots=True)
class _Run:
    """Collect what the attempts at one problem leave behind."""

    segments: tuple[Segment, ...] | None = None
    bound_ns: int = 0
    proven: bool = False
    timed_out: bool = False


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    save_sets: bool = True,
    backend: str = "highs",
) -> Solution:
    """Find the one-level plan that adds least time and fits the budget, its save sets chosen jointly.

    The plan space: disjoint candidates, each with any subset of its operators as its save set. It contains the one
    of `dp`, and the answer is never worse than that of `dp`.

    Args:
        problem: The problem.
        time_limit_s: Seconds for everything, `DEFAULT_LIMIT_S` unless given; when they are over, the best plan known
            is returned with its bound.
        gap: Share of its own added time that the plan may be away from the optimum.
        save_sets: Whether segments may keep some operators' outputs.
        backend: "highs" or "cbc". CBC reports no bound when it is stopped early.

    Raises:
        BudgetTooSmallError: If no plan fits. Save sets only add memory, so `dp` decides that, with its least peak.
        ValueError: If there is no such backend.
    """
    if backend not in ("highs", "cbc"):
        raise ValueError(f"backend must be 'highs' or 'cbc', got {backend!r}")
    started = time.perf_counter_ns()
    limit_s = limit_in_force(time_limit_s)
    deadline = time.perf_counter() + limit_s
    notes: list[str] = []
    try:
        first = dp.solve(problem, time_limit_s=limit_s, save_sets=save_sets)
    except BudgetTooSmallError as error:
        wall = time.perf_counter_ns() - started
        raise BudgetTooSmallError(problem, replace(error.solution, solver="ilp", wall_ns=wall)) from None
    if first.added_ns == 0:
        return make_solution(problem, first.segments, solver="ilp", started_ns=started, status=Status.OPTIMAL)
    known_bound = 0
    if save_sets and problem.operators:
        until = time.perf_counter() + BOUNDING_SHARE * limit_s
        known_bound = save_set_bound(problem, first.added_ns, deadline=min(deadline, until))
    if known_bound >= first.added_ns * (1 - gap):
        status = Status.OPTIMAL if known_bound == first.added_ns else Status.FEASIBLE
        return make_solution(
            problem, first.segments, solver="ilp", started_ns=started, status=status, lower_bound_ns=known_bound
        )
    run = _solve_programme(problem, first.segments, gap, deadline, notes, save_sets=save_sets, backend=backend)
    return _answer(problem, first.segments, run, known_bound, gap, limit_s, started, notes)


def solve_alike(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Find the one-level plan that treats the blocks of each kind alike, adds least time and fits the budget.

    The plan space: that of `chain.alike`, with any subset of operators as a save set. The answer is never worse.

    Args:
        problem: The problem, with its kinds.
        time_limit_s: As for `solve`.
        gap: As for `solve`.

    Raises:
        BudgetTooSmallError: If no plan fits, with the one of the least peak.
    """
    started = time.perf_counter_ns()
    limit_s = limit_in_force(time_limit_s)
    deadline = time.perf_counter() + limit_s
    try:
        first = alike.solve(problem, time_limit_s=limit_s)
    except BudgetTooSmallError as error:
        wall = time.perf_counter_ns() - started
        raise BudgetTooSmallError(problem, replace(error.solution, solver="ilp", wall_ns=wall)) from None
    if first.added_ns == 0:
        return make_solution(problem, first.segments, solver="ilp", started_ns=started, status=Status.OPTIMAL)
    notes: list[str] = []
    restricted = alike_problem(problem)
    run = _solve_programme(restricted, first.segments, gap, deadline, notes, alike=True)
    return _answer(problem, first.segments, run, 0, gap, limit_s, started, notes)


def _answer(
    problem: Problem,
    start: tuple[Segment, ...],
    run: _Run,
    known_bound: int,
    gap: float,
    limit_s: float,
    started: int,
    notes: list[str],
) -> Solution:
    """Return the better of the plan that a programme was started from and the one it found."""
    best, added = start, simulate(problem, start, trace=False).added_ns
    if run.segments is not None and simulate(problem, run.segments, trace=False).added_ns < added:
        best, added = run.segments, simulate(problem, run.segments, trace=False).added_ns
    bound = min(max(run.bound_ns, known_bound), added)
    status = Status.FEASIBLE
    if (run.proven and gap == 0.0) or bound == added:
        status = Status.OPTIMAL
    elif run.timed_out:
        status = Status.TIME_LIMIT
        notes.append(f"stopped at the time limit of {limit_s:g} s")
    note = "; ".join(notes)
    return make_solution(
        problem, best, solver="ilp", started_ns=started, status=status, lower_bound_ns=bound, note=note
    )


def _solve_programme(
    problem: Problem,
    start: tuple[Segment, ...],
    gap: float,
    deadline: float,
    notes: list[str],
    *,
    save_sets: bool = True,
    backend: str = "highs",
    alike: bool = False,
) -> _Run:
    """Solve, read the binaries, price the plan; tighten and repeat if tolerances let it over the budget."""
    run = _Run()
    tables = tables_of(problem)
    room = tables.room_bytes(problem, problem.budget_bytes)
    for attempt in range(_MOST_ATTEMPTS):
        remaining = deadline - time.perf_counter()
        if remaining <= 0:
            run.timed_out = True
            break
        model = ModelBuilder(problem, tables, room, save_sets=save_sets, alike=alike).build()
        _set_start(model, problem, start)
        remaining = max(0.0, deadline - time.perf_counter())
        answer = _run_backend(model, backend, gap, remaining, notes)
        run.timed_out = answer.timed_out
        if attempt == 0 and math.isfinite(answer.bound):  # Infinite while the backend has proven nothing yet.
            # Only the untightened programme bounds the problem; tolerances never cut off a plan that fits.
            run.bound_ns = max(0, math.ceil(answer.bound * model.unit_ns * (1 - 1e-9) - 1e-3))
        if not answer.found:
            break
        segments = _read(model, problem)
        excess = simulate(problem, segments, trace=False).peak_bytes - problem.budget_bytes
        if excess <= 0:
            run.segments = segments
            run.proven = attempt == 0 and answer.proven
            break
        room -= 2 * excess
        notes.append(f"the programme's tolerances let {excess} bytes over the budget: solved again below it")
    return run


def _run_backend(model: IlpModel, backend: str, gap: float, time_limit_s: float, notes: list[str]) -> Answer:
    if backend == "highs":
        try:
            return run_highs(model.programme, gap=gap, time_limit_s=time_limit_s)
        except (pulp.PulpSolverError, ImportError) as error:
            notes.append(f"HiGHS could not be used ({error}): solved by CBC")
    return run_cbc(model.programme, gap=gap, time_limit_s=time_limit_s)


def _set_start(model: IlpModel, problem: Problem, segments: tuple[Segment, ...]) -> None:
    """Give every binary the value it has in a plan."""
    plain = {(item.start, item.stop) for item in segments if not item.keep}
    selective = {(item.start, item.stop) for item in segments if item.keep}
    operators = {index for item in segments for index in item.keep}
    covered = {stage for item in segments for stage in range(item.start, item.stop)}
    for place, variable in model.plain.items():
        variable.setInitialValue(float(place in plain))
    for place, variable in model.selective.items():
        variable.setInitialValue(float(place in selective))
    for index, variable in model.operators.items():
        variable.setInitialValue(float(index in operators))
    for stage, variable in enumerate(model.kept):
        variable.setInitialValue(float(stage not in covered))
    for kind, changes in zip(problem.kinds, model.changes, strict=False):
        changed = pattern_changes(kind, segments)
        for block, variable in enumerate(changes, start=1):
            variable.setInitialValue(float(block in changed))


def _read(model: IlpModel, problem: Problem) -> tuple[Segment, ...]:
    """Read the plan off the binaries, rounded."""
    operators = {index for index, variable in model.operators.items() if (variable.varValue or 0.0) > 0.5}
    segments: list[Segment] = []
    for candidate in problem.candidates:
        place = (candidate.start, candidate.stop)
        selective = model.selective.get(place)
        keep: tuple[int, ...] = ()
        if selective is not None and (selective.varValue or 0.0) > 0.5:
            keep = tuple(index for index in candidate.operators if index in operators)
        elif place not in model.plain or (model.plain[place].varValue or 0.0) <= 0.5:
            continue
        segments.append(Segment(start=place[0], stop=place[1], keep=keep))
    return tuple(sorted(segments, key=lambda item: item.start))
