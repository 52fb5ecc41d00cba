"""From a recorded step to a solver's problem and back: what is offered, what it costs, and what it is called."""

import pytest
import torch
from remat.planner import plan
from remat.planner.bridge.problem import Bridge
from remat.profiler import profile
from remat.profiler.host import HostCosts
from remat.solvers import SOLVERS, BudgetTooSmallError, Segment, simulate
from torch import nn

HOST = HostCosts(1000, 10)


class Shift(nn.Module):
    """Save nothing for backward."""

    def forward(self, x):
        return x + 1.0


def mean_square(output):
    return output.square().mean()


def bridge_of(model, batch, **options):
    return Bridge(profile(model, batch, loss=mean_square, repeats=0), HOST, **options)


def costly():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU())


SAVING_NOTHING = {
    "after costly calls": lambda: nn.Sequential(costly(), costly(), Shift(), Shift(), costly(), Shift()),
    "before any": lambda: nn.Sequential(Shift(), nn.Identity(), costly(), costly(), costly()),
    "inside a block": lambda: nn.Sequential(*[nn.Sequential(costly(), Shift(), nn.Flatten(), Shift())] * 3),
    "no costly call at all": lambda: nn.Sequential(Shift(), Shift(), nn.Linear(64, 64), Shift()),
}


@pytest.mark.parametrize("where", SAVING_NOTHING)
def test_calls_that_save_nothing_cost_no_replay_wherever_they_stand(where):
    bridge = bridge_of(SAVING_NOTHING[where](), torch.randn(32, 64))
    saving = {holder for tensor in bridge.tensors for holder in tensor.holders}
    problem = bridge.problem(bridge.profile.peak_bytes())
    for candidate in problem.candidates:
        spent = sum(stage.forward_ns for stage in problem.stages[candidate.start : candidate.stop])
        assert HOST.region_ns <= candidate.replay_ns <= HOST.region_ns + spent
        if not saving & set(range(candidate.start, candidate.stop)):
            assert candidate.replay_ns == HOST.region_ns
            assert candidate.operators == ()
            assert simulate(problem, (Segment(start=candidate.start, stop=candidate.stop),)).added_ns == 0
    assert any(candidate.replay_ns > HOST.region_ns for candidate in problem.candidates)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_plans_a_convolutional_net_that_ends_in_pooling_and_flatten(solver):
    layers = [layer for _ in range(4) for layer in (nn.LazyConv2d(8, 3, padding=1), nn.GELU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Identity(), nn.LazyLinear(10))
    batch = torch.randn(4, 3, 16, 16)
    model(batch)
    bridge = bridge_of(model, batch)
    for share in (100, 70, 40):
        problem = bridge.problem(share * bridge.profile.peak_bytes() // 100)
        try:
            peak, fits = SOLVERS[solver](problem).peak_bytes, True
        except BudgetTooSmallError as error:
            peak, fits = error.least_peak_bytes, False
        assert (peak <= problem.budget_bytes) is fits


def test_a_step_with_calls_that_save_nothing_is_planned():
    p = plan(SAVING_NOTHING["after costly calls"](), torch.randn(512, 64), "80%", solver="dp", loss=mean_square)
    assert p.segments
    assert p.predicted_peak_bytes <= p.budget_bytes
