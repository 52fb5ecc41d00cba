"""A custom autograd function between the children of a block is planned around, whether or not a real step is tried."""

import copy

import pytest
import torch
from remat.planner import InfeasibleBudgetError, apply, plan
from remat.planner.applier.apply import apply_segments
from remat.planner.finding import dry_runs
from remat.profiler import profile
from torch import nn

from .apply_models import assert_same, train_step
from .random_nets import Sine


class Reversed(torch.autograd.Function):
    """Returns a view of what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Wavy(nn.Module):
    def __init__(self, function=Sine):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(16, 16), nn.Linear(16, 16), function

    def forward(self, x):
        return self.function.apply(self.second(torch.tanh(self.function.apply(self.first(x)))))


class Waves(nn.Module):
    """Functions between the blocks as well."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList([Wavy(Sine if k % 2 else Reversed) for k in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = Sine.apply(block(x))
        return x


def square(output):
    return output.square().mean()


@pytest.mark.parametrize("function", [Sine, Reversed])
def test_the_recorder_notes_what_a_custom_function_ran(function):
    recorded = profile(Wavy(function).train(), torch.randn(4, 16), loss=square, repeats=0)
    noted = [operator.operator for operator in recorded.operators if operator.in_function]
    assert noted == ["aten.sin.default" if function is Sine else "aten.view.default"] * 2


@pytest.mark.parametrize("check", [True, False])
def test_custom_functions_between_members_are_planned_around_at_once(check, monkeypatch):
    run = []

    def counted(model, segments, **options):
        run.append(segments)
        return apply_segments(model, segments, **options)

    monkeypatch.setattr(dry_runs, "apply_segments", counted)
    torch.manual_seed(0)
    model, x = Waves(depth=16).train(), torch.randn(64, 16, requires_grad=True)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(model, x, "1B", solver="dp", loss=square, check=check, repeats=0)
    found = caught.value.plan
    assert len(found.segments) >= 8
    assert 1 <= len(run) <= 6
    plain = train_step(copy.deepcopy(model), x)
    with apply(model, found):
        assert_same(train_step(model, x), plain)
