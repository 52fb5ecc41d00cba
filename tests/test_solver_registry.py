"""What every solver promises, and the order of their costs."""

from dataclasses import replace

import numpy as np
import pytest
from remat.solvers import (
    SOLVERS,
    BudgetTooSmallError,
    Candidate,
    Problem,
    Segment,
    Solution,
    Stage,
    Status,
    Tensor,
    simulate,
    solution,
)
from remat.solvers.auto import _best

from benchmarks.solver_problems import unequal_chain

from .instances import random_chain, random_graph, with_budget


def _try(name, problem):
    try:
        return SOLVERS[name](problem)
    except BudgetTooSmallError:
        return None


def _random_problem(rng):
    make = random_chain if rng.random() < 0.5 else random_graph
    problem = make(rng, int(rng.integers(2, 9)))
    return with_budget(rng, problem, 30, simulate(problem, ()).peak_bytes)


@pytest.mark.parametrize("name", SOLVERS)
def test_no_plan_is_over_its_budget_and_every_price_is_the_simulators(name):
    rng = np.random.default_rng(40)
    solved = 0
    for _ in range(25):
        problem = _random_problem(rng)
        if rng.random() < 0.3:
            problem = replace(problem, budget_bytes=simulate(problem, ()).peak_bytes)
        solution = _try(name, problem)
        if solution is None:
            continue
        solved += 1
        price = simulate(problem, solution.segments)
        assert (solution.peak_bytes, solution.added_ns) == (price.peak_bytes, price.added_ns)
        assert solution.peak_bytes <= problem.budget_bytes
        assert 0 <= solution.lower_bound_ns <= solution.added_ns
        assert 0.0 <= solution.gap <= 1.0
        if solution.status is Status.OPTIMAL:
            assert solution.gap == 0.0
        assert solution.wall_ns > 0
    assert solved > 3


@pytest.mark.parametrize("name", SOLVERS)
def test_an_infeasible_budget_is_refused_with_a_peak_that_is_reachable(name):
    rng = np.random.default_rng(41)
    for _ in range(20):
        problem = replace(_random_problem(rng), fixed_bytes=7, budget_bytes=6)
        with pytest.raises(BudgetTooSmallError, match="least peak it reaches is") as caught:
            SOLVERS[name](problem)
        least = caught.value.least_peak_bytes
        assert least == caught.value.solution.peak_bytes
        assert SOLVERS[name](replace(problem, budget_bytes=least)).peak_bytes <= least


def test_costs_are_ordered_from_the_baselines_to_the_exact_solvers():
    rng = np.random.default_rng(42)
    compared = 0
    for _ in range(60):
        problem = _random_problem(rng)
        costs = {name: found.added_ns for name in SOLVERS if (found := _try(name, problem)) is not None}
        if "dp" not in costs:
            assert not costs.keys() & {"none", "all", "uniform", "sqrt", "greedy", "ilp"}
            continue
        compared += len(costs) > 4
        assert costs["ilp"] <= costs["dp"]
        assert costs["dp_nested"] <= costs["dp"]
        assert costs["auto"] == min(costs.values())
        assert all(costs["dp"] <= costs[name] for name in costs.keys() & {"none", "all", "uniform", "sqrt", "greedy"})
    assert compared > 10


def test_the_message_names_the_part_that_does_not_fit():
    stages = (Stage(name="a", forward_ns=1),)
    problem = Problem(stages=stages, tensors=(), candidates=(), fixed_bytes=50, floor_bytes=80, budget_bytes=60)
    with pytest.raises(BudgetTooSmallError, match="optimizer's step among them, take 80 bytes"):
        SOLVERS["dp"](problem)
    with pytest.raises(BudgetTooSmallError, match="alone take 50 bytes"):
        SOLVERS["dp"](replace(problem, floor_bytes=0, budget_bytes=40))


def _blocks(count, budget):
    stages = tuple(Stage(name=str(index), forward_ns=1) for index in range(count))
    tensors = [
        Tensor(nbytes=1, producer=index, holders=(index + 1,), consumers=(index + 1,), last_alive=index + 1)
        for index in range(-1, count - 1)
    ]
    tensors += [
        Tensor(nbytes=9, producer=index, holders=(index,), consumers=(), last_alive=index) for index in range(count)
    ]
    candidates = [
        Candidate(start=start, stop=stop, replay_ns=stop - start, block=stop == start + 1)
        for start in range(count)
        for stop in range(start + 1, count + 1)
    ]
    return Problem(stages=stages, tensors=tuple(tensors), candidates=tuple(candidates), budget_bytes=budget)


def test_the_baselines_checkpoint_what_their_names_say():
    whole = _blocks(9, 90)
    assert SOLVERS["none"](whole).segments == ()
    assert SOLVERS["all"](whole).segments == tuple(Segment(start=i, stop=i + 1) for i in range(9))
    assert SOLVERS["sqrt"](whole).segments == (Segment(start=0, stop=3), Segment(start=3, stop=6))
    assert SOLVERS["uniform"](whole).segments == ()
    tight = SOLVERS["uniform"](_blocks(9, 60))
    assert tight.segments == tuple(Segment(start=i, stop=i + 1) for i in range(0, 9, 2))
    assert SOLVERS["sqrt"](_blocks(9, 32)).note == ""
    assert "cheapest number that fits" in SOLVERS["sqrt"](_blocks(9, 25)).note


def test_greedy_searches_the_size_of_a_segment_under_the_budget():
    costs = [SOLVERS["greedy"](_blocks(16, budget)).added_ns for budget in (160, 120, 80, 50)]
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert costs[-1] > 0


def test_a_time_limit_of_nothing_still_gives_a_plan_that_fits():
    rng = np.random.default_rng(43)
    for name in ("dp", "dp_nested", "ilp", "auto"):
        for _ in range(10):
            problem = random_graph(rng, 8, every=True)
            with pytest.raises(BudgetTooSmallError) as caught:
                SOLVERS["dp"](replace(problem, fixed_bytes=1, budget_bytes=0))
            problem = replace(problem, fixed_bytes=1, budget_bytes=caught.value.least_peak_bytes + 10)
            solution = SOLVERS[name](problem, time_limit_s=0.0)
            assert solution.peak_bytes <= problem.budget_bytes
            if solution.status is Status.TIME_LIMIT:
                assert "time limit" in solution.note


@pytest.mark.parametrize("name", ["dp", "dp_nested", "ilp", "auto"])
def test_without_a_time_limit_the_default_one_is_in_force_and_told(name, monkeypatch):
    problem = unequal_chain(100, 37)
    problem = replace(problem, budget_bytes=simulate(problem, ()).peak_bytes * 6 // 10)
    best = SOLVERS["dp_nested" if name in ("dp_nested", "auto") else "dp"](problem)
    monkeypatch.setattr(solution, "DEFAULT_LIMIT_S", 0.0)
    found = SOLVERS[name](problem)
    assert found.status is Status.TIME_LIMIT
    assert "stopped at the time limit of 0 s" in found.note
    assert found.lower_bound_ns <= best.added_ns <= found.added_ns


def test_a_time_limit_of_nothing_is_never_worse_than_a_heuristic():
    rng = np.random.default_rng(53)
    solved = 0
    for _ in range(12):
        problem = random_graph(rng, 12, every=True)
        problem = replace(problem, budget_bytes=int(0.8 * simulate(problem, ()).peak_bytes))
        for heuristic in ("sqrt", "greedy", "uniform"):
            try:
                added = SOLVERS[heuristic](problem).added_ns
            except BudgetTooSmallError:
                continue
            solved += 1
            assert SOLVERS["dp"](problem, time_limit_s=0.0).added_ns <= added
            assert SOLVERS["ilp"](problem, time_limit_s=0.0).added_ns <= added
    assert solved > 12


def test_auto_says_of_the_plans_that_it_did_not_take_how_much_more_they_add():
    known = {"segments": (), "peak_bytes": 1, "status": Status.OPTIMAL, "lower_bound_ns": 0, "wall_ns": 1}
    times = {"dp": 1000, "ilp": 1001, "dp_nested": 1500}
    found = _best([Solution(solver=name, added_ns=added, **known) for name, added in times.items()], [], 0)
    assert found.note == (
        "the plan of ilp (optimal) adds the same; the plan of dp_nested (optimal) adds 1.5 times as much"
    )
