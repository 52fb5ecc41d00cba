"""A larger plan space is never worse, on recorded steps: more save sets, nesting, more candidates."""

from dataclasses import replace
from functools import cache

import pytest
from remat.planner import InfeasibleBudgetError, plan
from remat.planner.bridge.bridge import Bridge
from remat.planner.bridge.host_costs import HostCosts, HostCostsByCache
from remat.profiler import profile
from remat.solvers import SOLVERS, BudgetTooSmallError, Problem, Solution

from benchmarks.models import build

SHARES = (70, 50, 30)
"""Budgets in per cent of the unplanned peak, fixed bytes apart."""

DEAR = ("aten.convolution", "aten.addmm", "aten.mm", "aten.native_layer_norm", "aten.native_batch_norm")


@cache
def recorded(name: str) -> Problem:
    """Record a step by a dry run, its times estimated: the same problem on every machine.

    The estimate knows of bytes only, so that what computes much is made dearer. Gradients stay from batch to batch, or
    they would be most of what such small batches take.
    """
    model, batch, loss = build(name, scale=0.25)
    found = profile(model, batch, loss=loss, repeats=0, accumulation=True)
    assert found.times_from.is_estimate
    operators = tuple(
        replace(operator, forward_ns=operator.forward_ns * (20 if operator.operator.startswith(DEAR) else 1))
        for operator in found.operators
    )
    host = HostCosts(region_ns=250_000, selective_ns=15_000)
    bridge = Bridge(replace(found, operators=operators), HostCostsByCache(warm=host, cold=host))
    return bridge.problem(found.peak_bytes())


def without_save_sets(problem: Problem) -> Problem:
    return replace(problem, candidates=tuple(replace(c, operators=()) for c in problem.candidates))


def with_fewer_candidates(problem: Problem) -> Problem:
    """Leave blocks, and every third of the other candidates."""
    kept = tuple(c for number, c in enumerate(problem.candidates) if c.block or number % 3 == 0)
    return replace(problem, candidates=kept)


def solved(solver: str, problem: Problem, budget_bytes: int) -> Solution | BudgetTooSmallError:
    try:
        return SOLVERS[solver](replace(problem, budget_bytes=budget_bytes), gap=0.0)
    except BudgetTooSmallError as error:
        return error


@cache
def answers(name: str, narrowed: str, solver: str) -> dict[int, Solution | BudgetTooSmallError]:
    """Return what a solver finds at each budget; key 0 is the least peak."""
    problem = {"": lambda p: p, "save sets": without_save_sets, "candidates": with_fewer_candidates}[narrowed](
        recorded(name)
    )
    fixed, free = problem.fixed_bytes, problem.budget_bytes - problem.fixed_bytes
    return {share: solved(solver, problem, fixed + share * free // 100) for share in (*SHARES, 0)}


def assert_never_worse(larger: dict[int, Solution | BudgetTooSmallError], smaller: dict) -> int:
    """Compare two spaces at every budget; return how often the larger one is better."""
    better = 0
    assert larger[0].least_peak_bytes <= smaller[0].least_peak_bytes
    better += larger[0].least_peak_bytes < smaller[0].least_peak_bytes
    for share in SHARES:
        if isinstance(larger[share], BudgetTooSmallError):
            assert isinstance(smaller[share], BudgetTooSmallError)
        elif isinstance(smaller[share], BudgetTooSmallError):
            better += 1
        else:
            assert larger[share].added_ns <= smaller[share].added_ns
            better += larger[share].added_ns < smaller[share].added_ns
    return better


@pytest.mark.parametrize("name", ["M4", "M5"])
@pytest.mark.parametrize("solver", ["dp", "dp_nested"])
@pytest.mark.parametrize("narrowed", ["save sets", "candidates"])
def test_more_choice_is_never_worse(name, solver, narrowed):
    assert assert_never_worse(answers(name, "", solver), answers(name, narrowed, solver)) > 0


@pytest.mark.parametrize("name", ["M4", "M5"])
def test_nesting_is_never_worse_than_one_level(name):
    assert assert_never_worse(answers(name, "", "dp_nested"), answers(name, "", "dp")) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("M4", 70), ("M5", 50)])
def test_save_sets_by_operator_are_never_worse_than_a_few_and_auto_takes_the_best(name, share):
    few = {solver: answers(name, "", solver)[share].added_ns for solver in ("dp", "dp_nested")}
    problem = recorded(name)
    budget = problem.fixed_bytes + share * (problem.budget_bytes - problem.fixed_bytes) // 100
    any_set = solved("ilp", problem, budget).added_ns
    assert any_set <= few["dp"]
    assert any_set <= solved("ilp", without_save_sets(problem), budget).added_ns
    assert solved("auto", problem, budget).added_ns <= min(any_set, *few.values())


@pytest.mark.parametrize("name", ["M4", "M5"])
def test_the_public_call_reaches_the_least_peak_whether_or_not_it_may_use_save_sets(name):
    model, batch, loss = build(name, scale=0.25)
    peaks = []
    for save_sets in (True, False):
        with pytest.raises(InfeasibleBudgetError) as caught:
            plan(model, batch, "1B", loss=loss, accumulation=True, repeats=0, save_sets=save_sets, check=name == "M4")
        peaks.append(caught.value.least_peak_bytes)
    simulated = answers(name, "", "dp_nested")[0].least_peak_bytes
    fixed, whole = recorded(name).fixed_bytes, recorded(name).budget_bytes
    # Dry runs count a few random states and tensors too small for the model, which grow with the number of segments.
    assert max(peaks) - simulated < 0.01 * (whole - fixed)
    assert abs(peaks[0] - peaks[1]) < 0.002 * (whole - fixed)
