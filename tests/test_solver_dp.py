"""The one-level dynamic programme against the exhaustive oracle; on chains, test_solver_ilp.py does it."""

from dataclasses import replace

import numpy as np
import pytest
from remat.solvers import BudgetTooSmallError, Status
from remat.solvers.chain import retention_graph
from remat.solvers.chain.dp import solve
from remat.solvers.chain.save_options import save_options

from .instances import random_graph, with_budget, with_negative_extras
from .oracle import flat_oracle


def agrees(problem, oracle, **options):
    expected = oracle.least_added(problem.budget_bytes)
    if expected is None:
        with pytest.raises(BudgetTooSmallError) as caught:
            solve(problem, **options)
        assert caught.value.least_peak_bytes == oracle.least_peak()
        assert caught.value.solution.peak_bytes == oracle.least_peak()
        return False
    solution = solve(problem, **options)
    assert solution.added_ns == expected
    assert solution.lower_bound_ns == expected
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes <= problem.budget_bytes
    return True


def test_on_five_hundred_graphs_with_skips_and_save_sets_it_equals_the_oracle():
    rng = np.random.default_rng(11)
    solved = 0
    for _ in range(500):
        problem = random_graph(rng, int(rng.integers(2, 6)))
        if rng.random() < 0.4:
            problem = with_negative_extras(rng, problem)
        oracle = flat_oracle(problem, save_options(problem))
        peaks = [peak for peak, _ in oracle.priced]
        solved += agrees(with_budget(rng, problem, min(peaks), max(peaks)), oracle)
    assert solved > 350


def test_the_least_peak_of_an_infeasible_budget_is_itself_feasible():
    rng = np.random.default_rng(12)
    for _ in range(40):
        problem = random_graph(rng, 8, every=True)
        with pytest.raises(BudgetTooSmallError) as caught:
            solve(replace(problem, budget_bytes=0, fixed_bytes=1))
        least = caught.value.least_peak_bytes
        assert solve(replace(problem, budget_bytes=least, fixed_bytes=1)).peak_bytes == least
        with pytest.raises(BudgetTooSmallError):
            solve(replace(problem, budget_bytes=least - 1, fixed_bytes=1))


def _solve_at_least_peak_if_need_be(problem):
    try:
        return solve(problem)
    except BudgetTooSmallError as error:
        return solve(replace(problem, budget_bytes=error.least_peak_bytes))


def test_where_too_many_tensors_travel_the_plan_is_safe_and_said_to_be_approximate(monkeypatch):
    monkeypatch.setattr(retention_graph, "MOST_NODES_AT_A_BOUNDARY", 1)
    rng = np.random.default_rng(13)
    approximate = 0
    for _ in range(80):
        problem = random_graph(rng, 5)
        oracle = flat_oracle(problem, save_options(problem))
        peaks = [peak for peak, _ in oracle.priced]
        problem = with_budget(rng, problem, min(peaks), max(peaks))
        solution = _solve_at_least_peak_if_need_be(problem)
        problem = replace(problem, budget_bytes=max(problem.budget_bytes, solution.peak_bytes))
        assert solution.peak_bytes <= problem.budget_bytes
        assert solution.added_ns >= oracle.least_added(problem.budget_bytes)
        assert solution.lower_bound_ns <= oracle.least_added(problem.budget_bytes)
        if solution.status is Status.FEASIBLE:
            approximate += 1
            assert "counted as held from their producer on" in solution.note
    assert approximate > 5
