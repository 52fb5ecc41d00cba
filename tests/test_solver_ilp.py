"""The integer programme against the exhaustive oracle."""

import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from remat.solvers import BudgetTooSmallError, Status
from remat.solvers.chain import dp, save_set_bound
from remat.solvers.integer import ilp

from . import test_solver_dp
from .instances import random_chain, random_graph, with_budget, with_negative_extras
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


@pytest.fixture
def by_the_programme_alone(monkeypatch):
    """Have the programme solve what divisible save sets would prove before it."""
    monkeypatch.setattr(ilp, "save_set_bound", lambda problem, known_ns, deadline: 0)


@pytest.mark.parametrize("chains", [400, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("by_the_programme_alone")
def test_on_many_chains_it_and_dp_equal_the_oracle(chains):
    rng = np.random.default_rng(20)
    solved = 0
    for _ in range(chains):
        problem = random_chain(rng, int(rng.integers(1, 7)))
        if rng.random() < 0.4:
            problem = with_negative_extras(rng, problem)
        oracle = flat_oracle(problem, {})
        problem = _budgeted(rng, problem, oracle)
        solved += _agrees(problem, oracle)
        test_solver_dp.agrees(problem, oracle)
    assert solved > 0.75 * chains


@pytest.mark.usefixtures("by_the_programme_alone")
def test_on_five_hundred_graphs_with_skips_and_operators_it_equals_the_oracle():
    rng = np.random.default_rng(21)
    compared = solved = 0
    while compared < 500:
        problem = random_graph(rng, int(rng.integers(2, 5)))
        if rng.random() < 0.4:
            problem = with_negative_extras(rng, problem)
        if sum(2 ** len(candidate.operators) for candidate in problem.candidates) > 200:
            continue
        compared += 1
        oracle = operator_oracle(problem)
        solved += _agrees(_budgeted(rng, problem, oracle), oracle)
    assert solved > 300


@pytest.mark.parametrize("graphs", [60, pytest.param(250, marks=pytest.mark.slow)])
def test_divisible_save_sets_bound_every_choice_of_operators_and_often_prove_the_best(graphs, monkeypatch):
    rng = np.random.default_rng(22)
    compared = proven = 0
    while compared < graphs:
        monkeypatch.setattr(save_set_bound, "_STEPS", int(rng.choice([2, 10, 100])))
        monkeypatch.setattr(save_set_bound, "_MOST_SETS", int(rng.choice([4, 1024])))
        monkeypatch.setattr(save_set_bound, "_MOST_TRAVELLING", int(rng.choice([0, 1, 3])))
        problem = random_graph(rng, int(rng.integers(2, 5)))
        if rng.random() < 0.4:
            problem = with_negative_extras(rng, problem)
        if sum(2 ** len(candidate.operators) for candidate in problem.candidates) > 200:
            continue
        oracle = operator_oracle(problem)
        problem = _budgeted(rng, problem, oracle)
        best = oracle.least_added(problem.budget_bytes)
        if not best:
            continue
        compared += 1
        save_set_bound._best_sets.cache_clear()
        known = dp.solve(problem).added_ns
        bound = save_set_bound.save_set_bound(problem, known, deadline=time.perf_counter() + 60)
        assert bound <= best
        proven += bound == best
        assert ilp.solve(problem).added_ns == best
    assert proven > 0.4 * graphs


def _tight(seed, count=6):
    rng = np.random.default_rng(seed)
    problem = replace(random_graph(rng, count, every=True), fixed_bytes=1)
    with pytest.raises(BudgetTooSmallError) as caught:
        dp.solve(replace(problem, budget_bytes=0))
    return replace(problem, budget_bytes=caught.value.least_peak_bytes + 12)


@pytest.mark.usefixtures("by_the_programme_alone")
def test_cbc_finds_the_same_cost():
    for seed in range(6):
        problem = _tight(seed)
        by_cbc = ilp.solve(problem, backend="cbc")
        assert by_cbc.added_ns == ilp.solve(problem).added_ns
        assert by_cbc.status is Status.OPTIMAL


@pytest.mark.usefixtures("by_the_programme_alone")
def test_without_highs_cbc_is_used_and_the_note_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    problem = _tight(3)
    solution = ilp.solve(problem)
    assert "solved by CBC" in solution.note
    assert solution.peak_bytes <= problem.budget_bytes


def test_save_sets_never_cost_more_than_none():
    for seed in range(10):
        problem = _tight(seed)
        assert ilp.solve(problem).added_ns <= ilp.solve(problem, save_sets=False).added_ns


@pytest.mark.usefixtures("by_the_programme_alone")
def test_a_gap_is_honoured_and_the_bound_is_valid():
    for seed in range(10):
        problem = _tight(seed)
        best = ilp.solve(problem).added_ns
        loose = ilp.solve(problem, gap=0.2)
        assert loose.lower_bound_ns <= best <= loose.added_ns
        assert loose.gap <= 0.2 + 1e-9


@pytest.mark.usefixtures("by_the_programme_alone")
def test_nothing_is_printed(capfd):
    ilp.solve(_tight(3))
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("by_the_programme_alone")
def test_a_plan_that_tolerances_let_over_the_budget_is_never_returned(monkeypatch):
    """Room made larger than it is stands for a tolerance: the programme is solved again, or dp's plan returned."""
    original = ilp.ModelBuilder
    notes = []
    for seed in range(12):
        problem = _tight(seed)
        monkeypatch.setattr(ilp, "ModelBuilder", lambda p, t, room, **how: original(p, t, room + 6, **how))
        solution = ilp.solve(problem)
        assert solution.peak_bytes <= problem.budget_bytes
        assert solution.added_ns <= dp.solve(problem).added_ns
        notes.append(solution.note)
    assert any("solved again" in note for note in notes)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="'highs' or 'cbc', got 'glpk'"):
        ilp.solve(_tight(1), backend="glpk")
