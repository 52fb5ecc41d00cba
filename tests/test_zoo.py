"""Every model of the zoo, planned and verified for real: results bit for bit, and the promised peak."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from remat.planner import InfeasibleBudgetError, verify
from remat.planner.finding.planner import Planner

from .zoo import ZOO

RANDOM_STATE_BYTES = torch.get_rng_state().nbytes
"""What torch's checkpoint keeps for each segment; a small model's peak is not much more than a few of them."""
BUDGETS = {"85 %": "85%", "least": 1}
CASES = [("dp", "least", True), ("dp", "85 %", False), ("ilp", "85 %", False), ("ilp", "least", False)]
"""Solver, budget, and whether it is in every run: the plan of the least peak is the hardest to carry out."""


@functools.lru_cache(maxsize=1)
def planned(name):
    """Profile a model once for all its tests, which follow one another."""
    gc.collect()
    torch.manual_seed(0)
    model, batch, loss = ZOO[name]()
    return Planner.of(model, batch, loss=loss, repeats=1), model, batch, loss, {}


@pytest.mark.parametrize(
    ("name", "solver", "budget"),
    [
        pytest.param(name, solver, budget, marks=[pytest.mark.xdist_group(name), *([] if fast else [pytest.mark.slow])])
        for name in ZOO
        for solver, budget, fast in CASES
    ],
)
def test_a_planned_model_computes_the_same_and_keeps_its_promise(name, solver, budget):
    planner, model, batch, loss, seen = planned(name)
    try:
        plan = planner.plan(BUDGETS[budget], solver=solver, time_limit_s=1, gap=0.05, check=False)
    except InfeasibleBudgetError as error:
        plan = error.plan
    # The solvers often agree; a plan is run once.
    found = seen.get(plan.segments) or verify(model, batch, plan, loss=loss, steps=3, repeats=0)
    seen[plan.segments] = found
    assert found.repeatable
    assert found.exact, str(found)
    assert found.measured_peak_bytes <= plan.budget_bytes
    segments = sum(1 for segment in plan.segments for _ in segment.walk())
    slack = 0.01 * found.measured_peak_bytes + (segments + 1) * RANDOM_STATE_BYTES
    assert 0 <= plan.predicted_peak_bytes - found.measured_peak_bytes <= slack
    assert plan.predicted_peak_bytes <= planner.profile.peak_bytes()
