"""The nested dynamic programme against the exhaustive oracle over trees."""

from dataclasses import replace

import numpy as np
import pytest
from remat.solvers import BudgetTooSmallError, Status
from remat.solvers.chain import dp, dp_nested, nested_graph
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


def test_with_negative_extras_it_is_proven_optimal_too():
    rng = np.random.default_rng(33)
    nested = sum(
        _agrees(rng, with_negative_extras(rng, random_chain(rng, int(rng.integers(2, 6)))), 5) for _ in range(100)
    )
    assert nested > 5


def test_however_coarse_its_units_its_bound_is_below_every_tree_and_often_proves_the_plan(monkeypatch):
    monkeypatch.setattr(dp_nested, "UNITS", 8)
    monkeypatch.setattr(nested_graph, "MOST_TRADES", 2)
    rng = np.random.default_rng(34)
    proven = coarse = 0
    for number in range(120):
        problem = random_chain(rng, 5) if number % 2 else random_graph(rng, 4, every=True)
        if rng.random() < 0.4:
            problem = with_negative_extras(rng, problem)
        oracle = nested_oracle(problem, save_options(problem), 4)
        peaks = sorted(peak for peak, _ in oracle.priced)
        problem = with_budget(rng, problem, peaks[0], peaks[len(peaks) // 4])
        try:
            solution = dp_nested.solve(problem)
        except BudgetTooSmallError:
            continue
        best = oracle.least_added(problem.budget_bytes)
        assert 0 < solution.lower_bound_ns <= best <= solution.added_ns or best == 0
        assert (solution.status is Status.OPTIMAL) == (solution.lower_bound_ns == solution.added_ns)
        coarse += "units of" in solution.note
        proven += "units of" in solution.note and solution.status is Status.OPTIMAL
    assert coarse > 40
    assert proven > 20
