"""`dp`: exact over one level of segments, by label setting on the retention graph.

The recursion is the classic one over the place where the last segment starts; see Beaumont, Eyraud-Dubois, Herrmann,
Joly and Shilova, "Optimal checkpointing for heterogeneous chains", ACM TOMS 50 (2024). Memory is not rounded.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ..baselines import greedy, sqrt, uniform
from ..errors import BudgetTooSmallError
from ..problem import Problem, Segment
from ..simulate import simulate
from ..solution import Solution, Status, limit_in_force, make_solution
from ..tables import tables_of
from .labels import LabelSearch
from .least_peak import least_peak_plan
from .retention_graph import PINNED_NOTE, retention_graph


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0, save_sets: bool = True) -> Solution:
    """Find the one-level plan that adds least time and fits the budget.

    The plan space: disjoint candidates, each with no save set or one of those that `save_options` lists. The answer is
    optimal in it, unless tensors had to be pinned (see `RetentionGraph`): then it is feasible, and its note says so.

    Args:
        problem: The problem.
        time_limit_s: Seconds after which the best plan known is returned, with its bound; `DEFAULT_LIMIT_S` unless
            given. Making the graph is not interrupted.
        gap: Share of its own added time that the plan may be away from the optimum.
        save_sets: Whether segments may keep some operators' outputs.

    Raises:
        BudgetTooSmallError: If no plan of the space fits, with the plan of the least peak.
    """
    started = time.perf_counter_ns()
    limit_s = limit_in_force(time_limit_s)
    deadline = time.perf_counter() + limit_s
    tables = tables_of(problem)
    graph = retention_graph(problem, tables, save_sets=save_sets)
    note = ""
    if graph.pinned:
        note = PINNED_NOTE.format(count=graph.pinned.bit_count())
    path, search = None, LabelSearch(graph, tables)
    if problem.floor_bytes <= problem.budget_bytes:
        path = search.cheapest(tables.room_bytes(problem, problem.budget_bytes), gap=gap, deadline=deadline)
    if path is None:
        segments = least_peak_plan(problem, search, graph.segments, deadline=deadline)
        solution = make_solution(problem, segments, solver="dp", started_ns=started, note=note)
        if solution.peak_bytes <= problem.budget_bytes:  # Pinning overstates a plan in the graph, not in its price.
            return solution
        raise BudgetTooSmallError(problem, solution)
    status = Status.OPTIMAL if path.bound_ns == path.added_ns else Status.FEASIBLE
    bound = path.bound_ns
    if graph.pinned:
        status, bound = Status.FEASIBLE, 0
    segments = graph.segments(path.edges)
    if not path.finished:
        status = Status.TIME_LIMIT
        note = f"{note}; " * bool(note) + f"stopped at the time limit of {limit_s:g} s"
        segments = _cheapest(problem, segments)
    return make_solution(
        problem,
        segments,
        solver="dp",
        started_ns=started,
        status=status,
        lower_bound_ns=bound,
        note=note,
    )


def _cheapest(problem: Problem, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return the cheapest of a plan that fits and the heuristics' plans."""
    plans = [segments]
    for heuristic in (sqrt, greedy, uniform):
        with suppress(BudgetTooSmallError):
            plans.append(heuristic(problem).segments)
    return min(plans, key=lambda plan: simulate(problem, plan, trace=False).added_ns)
