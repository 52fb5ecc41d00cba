"""The nested dynamic programme against the exhaustive oracle over trees."""

from dataclasses import replace

import numpy as np
import pytest
from remat.solvers import BudgetTooSmallError, Status
from remat.solvers.chain import dp, dp_nested
from remat.solvers.chain.save_options import save_options

from .instances import random_chain, random_graph, with_budget, with_negative_extras
from .oracle import nested_oracle


def _agrees(rng, problem, depth):
    oracle = nested_oracle(problem, save_options(problem), depth)
    peaks = [peak for peak, _ in oracle.priced]
    problem = with_budget(rng, problem, min(peaks), sorted(peaks)[len(peaks) // 4])
    expected = oracle.least_added(problem.budget_bytes)
    if expected is None:
        with pytest.raises(BudgetTooSmallError) as caught:
            dp_nested.solve(problem)
        assert caught.value.least_peak_bytes == oracle.least_peak()
        return 0
    solution = dp_nested.solve(problem)
    assert solution.added_ns == expected
    assert solution.lower_bound_ns == expected
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes <= problem.budget_bytes
    return any(segment.children for segment in solution.segments)


def test_on_five_hundred_chains_it_equals_the_oracle_over_trees():
    rng = np.random.default_rng(30)
    assert sum(_agrees(rng, random_chain(rng, int(rng.integers(2, 6))), 5) for _ in range(500)) > 50


def test_on_graphs_with_skips_and_save_sets_it_equals_the_oracle_over_trees():
    rng = np.random.default_rng(31)
    assert sum(_agrees(rng, random_graph(rng, int(rng.integers(3, 5)), every=True), 4) for _ in range(250)) > 2


def test_it_is_never_worse_than_one_level_however_coarse_its_units(monkeypatch):
    monkeypatch.setattr(dp_nested, "UNITS", 8)
    rng = np.random.default_rng(32)
    better = 0
    for _ in range(150):
        problem = random_chain(rng, 8)
        with pytest.raises(BudgetTooSmallError) as caught:
            dp.solve(replace(problem, budget_bytes=0, fixed_bytes=1))
        problem = replace(problem, fixed_bytes=1, budget_bytes=caught.value.least_peak_bytes + int(rng.integers(0, 9)))
        flat, nested = dp.solve(problem), dp_nested.solve(problem)
        assert nested.added_ns <= flat.added_ns
        assert nested.peak_bytes <= problem.budget_bytes
        better += nested.added_ns < flat.added_ns
        with pytest.raises(BudgetTooSmallError) as caught:
            dp_nested.solve(replace(problem, budget_bytes=0))
        least = caught.value.least_peak_bytes
        assert dp_nested.solve(replace(problem, budget_bytes=least)).peak_bytes <= least
    assert better > 0


def test_with_negative_extras_it_is_safe_and_never_worse_than_one_level():
    rng = np.random.default_rng(33)
    solved = 0
    for _ in range(100):
        problem = with_negative_extras(rng, random_graph(rng, 5, every=True))
        oracle = nested_oracle(problem, {}, 1)
        peaks = [peak for peak, _ in oracle.priced]
        problem = with_budget(rng, problem, min(peaks), max(peaks))
        try:
            flat = dp.solve(problem)
        except BudgetTooSmallError:
            continue
        nested = dp_nested.solve(problem)
        assert nested.peak_bytes <= problem.budget_bytes
        assert nested.added_ns <= flat.added_ns
        solved += 1
    assert solved > 50
