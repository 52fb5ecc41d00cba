"""Plans made for torch.compile: only calls and loops that the compiler can take, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Planner, apply
from torch import nn


class Residual(nn.Module):
    """Its input is used again after the run inside it."""

    def __init__(self, width=32):
        super().__init__()
        self.feed, self.back = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU()), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.back(self.feed(x))


class Siblings(nn.Module):
    """Calls beside one another that share an input are no loop."""

    def __init__(self, width=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


def test_a_plan_without_crossing_operators_is_exact_under_torch_compile():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[nn.Sequential(Residual(), Siblings()) for _ in range(3)]), torch.randn(64, 32)
    planner = Planner.of(model, batch, repeats=0, cross_operators=False)

    def gradients(forward):
        model.zero_grad()
        forward(batch).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(model)
    for solver, budget in (("dp", "70%"), ("ilp", "85%"), ("dp", 1)):
        try:
            made = planner.plan(budget, solver=solver)
        except InfeasibleBudgetError as error:
            made = error.plan
        torch._dynamo.reset()
        assert made.segments
        with apply(model, made):
            found = gradients(torch.compile(model, backend="aot_eager"))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("pair", [("0.1.q", "0.1.k"), ("0.1.k", "0.1.v")])
def test_calls_that_share_an_input_are_no_run_for_the_compiler(pair):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Sequential(Residual(), Siblings())), torch.randn(64, 32)
    bridge = Planner.of(model, batch, repeats=0, cross_operators=False).bridge
    calls = bridge.profile.calls
    runs = [[calls[m].module for m in bridge.members(c.start, c.stop)] for c in bridge.candidates]
    assert not any(set(pair) <= set(run) for run in runs)
