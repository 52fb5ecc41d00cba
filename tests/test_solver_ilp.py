"""The integer programme against the exhaustive oracle."""

import numpy as np
import pytest
from remat.solvers import BudgetTooSmallError, Status, dp, ilp

from .instances import random_chain, random_graph, with_budget
from .oracle import flat_oracle, operator_oracle


def _agrees(problem, oracle, **options):
    expected = oracle.least_added(problem.budget_bytes)
    if expected is None:
        with pytest.raises(BudgetTooSmallError) as caught:
            ilp.solve(problem, **options)
        assert caught.value.least_peak_bytes == oracle.least_peak()
        return False
    solution = ilp.solve(problem, **options)
    assert solution.added_ns == expected
    assert solution.lower_bound_ns == expected
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes <= problem.budget_bytes
    assert expected <= dp.solve(problem).added_ns
    return True


def _budgeted(rng, problem, oracle):
    peaks = [peak for peak, _ in oracle.priced]
    return with_budget(rng, problem, min(peaks), max(peaks))


def test_on_chains_it_equals_the_oracle():
    rng = np.random.default_rng(20)
    solved = 0
    for _ in range(150):
        problem = random_chain(rng, int(rng.integers(2, 7)))
        oracle = flat_oracle(problem, {})
        solved += _agrees(_budgeted(rng, problem, oracle), oracle)
    assert solved > 100


def test_on_five_hundred_graphs_with_skips_and_operators_it_equals_the_oracle():
    rng = np.random.default_rng(21)
    solved = 0
    for _ in range(500):
        problem = random_graph(rng, int(rng.integers(2, 5)))
        if sum(2 ** len(candidate.operators) for candidate in problem.candidates) > 400:
            continue
        oracle = operator_oracle(problem)
        solved += _agrees(_budgeted(rng, problem, oracle), oracle)
    assert solved > 100
