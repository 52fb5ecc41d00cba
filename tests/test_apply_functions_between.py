"""A custom autograd function between the children of a block is planned around, whether or not a real step is tried."""

import copy

import pytest
import torch
from remat.planner import InfeasibleBudgetError, apply, plan
from torch import nn

from .apply_models import assert_same, train_step


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * x.cos() * (y + 1)


class Wavy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return Sine.apply(self.second(torch.tanh(Sine.apply(self.first(x)))))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("solver", ["dp", "dp_nested"])
def test_a_custom_function_between_members_is_planned_around(check, solver):
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Wavy() for _ in range(3)]).train(), torch.randn(64, 16, requires_grad=True)
    try:
        found = plan(model, x, "70%", solver=solver, loss=lambda output: output.square().mean(), check=check)
    except InfeasibleBudgetError as error:
        found = error.plan
    assert found.segments
    plain = train_step(copy.deepcopy(model), x)
    with apply(model, found):
        assert_same(train_step(model, x), plain)
