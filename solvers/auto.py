"""`auto`: the best plan that the exact solvers find in the time given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from .alike_space import alike_problem
from .chain import alike, dp, dp_nested
from .errors import BudgetTooSmallError
from .integer import ilp
from .problem import Problem
from .solution import Solution, Status, limit_in_force

MOST_CHOICES = 400_000


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Run `dp`, then `ilp` where operators may be kept, then `dp_nested`, and return the plan that adds least time.

    The solution's `solver` names the one that found it, the first of them when several are equal; its status and
    bound are about that solver's plan space. Its note says what the others found or why they were not run.

    Args:
        problem: The problem.
        time_limit_s: Seconds for all of them together; `DEFAULT_LIMIT_S` unless given.
        gap: Share of its own added time that each may be away from its optimum.

    Raises:
        BudgetTooSmallError: If no plan fits, with the nested plan of the least peak.
    """
    started = time.perf_counter_ns()
    deadline = time.perf_counter() + limit_in_force(time_limit_s)

    def left() -> float:
        return max(0.0, deadline - time.perf_counter())

    found: list[Solution] = []
    notes: list[str] = []
    try:
        found.append(dp.solve(problem, time_limit_s=left(), gap=gap))
    except BudgetTooSmallError as error:
        notes.append(f"dp needs {error.least_peak_bytes} bytes")
    if not found or found[0].added_ns:
        if found:
            _try_ilp(problem, found, notes, left(), gap)
        nested = dp_nested.solve(problem, time_limit_s=left(), gap=gap)
        found.append(nested)
    return _best(found, notes, started)


def solve_alike(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Run `dp`, then `ilp` where operators may be kept, both with blocks alike, and return the better plan.

    Segments inside segments are not searched so.

    Args:
        problem: The problem, with its kinds.
        time_limit_s: As for `solve`.
        gap: As for `solve`.

    Raises:
        BudgetTooSmallError: If no plan fits, with the one of the least peak.
    """
    started = time.perf_counter_ns()
    deadline = time.perf_counter() + limit_in_force(time_limit_s)
    found = [alike.solve(problem, time_limit_s=limit_in_force(time_limit_s), gap=gap)]
    notes: list[str] = []
    if found[0].added_ns:
        left = max(0.0, deadline - time.perf_counter())
        _try_ilp(alike_problem(problem), found, notes, left, gap, solve_ilp=ilp.solve_alike)
    return _best(found, notes, started)


def _best(found: list[Solution], notes: list[str], started: int) -> Solution:
    """Return the cheapest solution, and say what the others are."""
    best = min(found, key=lambda solution: solution.added_ns)
    others = [
        f"the plan of {item.solver} ({item.status}) adds {_times_as_much(item, best)}"
        for item in found
        if item is not best
    ]
    note = "; ".join([best.note] * bool(best.note) + others + notes)
    return replace(best, wall_ns=time.perf_counter_ns() - started, note=note)


def _times_as_much(item: Solution, best: Solution) -> str:
    times = f"{item.added_ns / max(1, best.added_ns):.3g}"
    return "the same" if times == "1" or not item.added_ns else f"{times} times as much"


def _try_ilp(
    problem: Problem,
    found: list[Solution],
    notes: list[str],
    limit_s: float,
    gap: float,
    solve_ilp: Callable[..., Solution] = ilp.solve,
) -> None:
    """Run the integer programme where it can improve on the dynamic one and is of a size that pays."""
    choices = sum(len(candidate.operators) for candidate in problem.candidates)
    if not choices and found[0].status is Status.OPTIMAL:
        notes.append("ilp was not run: without save sets dp is exact in its plan space")
    elif choices > MOST_CHOICES:
        notes.append(f"ilp was not run: {choices} places for operators in candidates, more than {MOST_CHOICES}")
    else:
        # Nested segments get what is left, so the programme takes two thirds at most.
        found.append(solve_ilp(problem, time_limit_s=limit_s * 2 / 3, gap=gap))
