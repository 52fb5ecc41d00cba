"""Random nets: every plan of every solver applies and is exact, or the net is refused by name; nothing else comes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from remat.planner import InfeasibleBudgetError, PlanError, Planner, apply
from remat.planner.applier.apply import apply_segments
from remat.profiler import BatchError, DisturbedError
from remat.solvers import SOLVERS, BudgetTooSmallError

from .random_nets import BLOCKS, case, loss

QUICK = (3, 9, 34, 43)
SEEDS = [pytest.param(seed, marks=[] if seed in QUICK else [pytest.mark.slow]) for seed in range(60)]


def train(one, steps=2):
    """Return, by name, what some steps of a net compute and leave: losses, gradients, buffers, random states."""
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.05, momentum=0.9)
    found = {}
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        for tensor in one.batch.values():
            tensor.grad = None
        with one.precision():
            value = loss(one.call())
        value.backward()
        trained = {**dict(one.model.named_parameters()), **one.batch}
        found[f"{step} loss"] = value.detach()
        found |= {f"{step} gradient of {name}": t.grad.clone() for name, t in trained.items() if t.grad is not None}
        optimizer.step()
        found |= {f"{step} {name}": buffer.clone() for name, buffer in one.model.named_buffers()}
        found[f"{step} random state"] = torch.get_rng_state()
    return found


@functools.cache
def planner_of(seed):
    """Return the planner of a net and what its steps compute; None and why where it is refused by name."""
    one = case(seed)
    try:
        with one.precision():
            planner = Planner.of(one.model, one.batch, loss=loss, repeats=1)
    except (PlanError, BatchError, DisturbedError) as error:
        return None, str(error)
    return planner, train(case(seed))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=0, equal_nan=True), name


def solved(solver, problem):
    """Return a solver's segments; those of the least peak where no plan fits."""
    try:
        return SOLVERS[solver](problem, time_limit_s=1.0).segments
    except BudgetTooSmallError as error:
        return error.solution.segments


@pytest.fixture(autouse=True)
def _branches_that_differ_from_step_to_step_are_told():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a forward under the plan made other calls than were planned")
        warnings.filterwarnings("ignore", ".*its replay made other calls of")
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_of_every_solver_applies_and_is_exact(seed):
    planner, expected = planner_of(seed)
    if planner is None:
        assert "the model checkpoints itself" in expected
        return
    plans = {}
    for share in (0, 60):
        problem = planner.bridge.problem(max(1, share * planner.profile.peak_bytes() // 100))
        for solver in SOLVERS:
            segments = tuple(map(planner.bridge.planned, solved(solver, problem)))
            plans.setdefault(segments, (solver, share))
    for segments in plans:
        one = case(seed)
        with apply_segments(one.model, segments):
            assert_same(train(one), expected)


@pytest.mark.parametrize("check", [True, False], ids=["tried", "not tried"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_exact_and_fits_or_is_that_of_the_least_peak(seed, check):
    planner, expected = planner_of(seed)
    if planner is None:
        return
    one = case(seed)
    with one.precision():
        try:
            made, least = planner.plan(("50%", "70%", 1)[seed % 3], check=check, time_limit_s=2), None
        except InfeasibleBudgetError as error:
            made, least = error.plan, error.least_peak_bytes
    assert made.predicted_peak_bytes == least if least else made.predicted_peak_bytes <= made.budget_bytes
    apply(one.model, made)
    assert_same(train(one), expected)


def test_the_nets_hold_every_kind_of_block():
    kinds = {type(block) for seed in range(60) for block in case(seed).model.blocks}
    assert kinds >= set(BLOCKS)
