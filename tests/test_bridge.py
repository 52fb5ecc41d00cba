"""From a recorded step to a solver's problem and back: what is offered, what it costs, and what it is called."""

from dataclasses import replace

import pytest
import torch
from remat.planner import plan
from remat.planner.bridge.bridge import Bridge
from remat.planner.bridge.hazards import Refusal, RefusedCalls
from remat.planner.bridge.host_costs import HostCosts, HostCostsByCache
from remat.profiler import profile
from remat.solvers import SOLVERS, BudgetTooSmallError, Candidate, Segment, simulate
from torch import nn

HOST = HostCosts(region_ns=1000, selective_ns=10)


class Shift(nn.Module):
    """Save nothing for backward."""

    def forward(self, x):
        return x + 1.0


def mean_square(output):
    return output.square().mean()


def bridge_of(model, batch, **options):
    return Bridge(profile(model, batch, loss=mean_square, repeats=0), HostCostsByCache(warm=HOST, cold=HOST), **options)


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
    for share in (100, 70, 40, 0):
        problem = bridge.problem(max(1, share * bridge.profile.peak_bytes() // 100))
        solution = solved(solver, problem)
        assert simulate(problem, solution.segments).peak_bytes == solution.peak_bytes
        if share == 100:
            assert solution.added_ns == 0 or solver in ("all", "sqrt", "greedy", "uniform")


def solved(solver, problem):
    """Return a solver's plan; that of the least peak where none fits."""
    try:
        return SOLVERS[solver](problem, time_limit_s=3.0)
    except BudgetTooSmallError as error:
        return error.solution


class Pair(nn.Module):
    """Make two calls side by side, with operators of its own after each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, pair):
        x, y = pair
        return torch.tanh(self.a(x)).exp(), torch.tanh(self.b(y * 2)).sin()


def test_a_segment_that_cuts_the_last_call_of_another_is_not_nested_in_it():
    """Named by the pieces of the call that is cut, the outer one would end before the call's own last operator."""
    model = nn.ModuleList([Pair(), Pair()])
    bridge = bridge_of(Chain(model), torch.randn(64, 16))
    calls = bridge.profile.calls
    first, last = (next(c for c in calls if c.module == name) for name in ("blocks.0.b", "blocks.1.a"))
    cutting = [c for c in bridge.candidates if bridge.span(c.start, c.stop) == (first.start, last.stop)]
    begin, end = (next(c for c in calls if c.module == name) for name in ("blocks.0", "blocks.1"))
    start, stop = bridge.bounds.index(begin.start), bridge.bounds.index(end.stop)
    assert len(cutting) == 1
    assert cutting[0].never_within == (stop,)
    problem = bridge.problem(1)
    if not any((c.start, c.stop) == (start, stop) for c in problem.candidates):
        both = Candidate(start=start, stop=stop, replay_ns=1)
        problem = replace(problem, candidates=(*problem.candidates, both))
    nested = Segment(start=start, stop=stop, children=(Segment(start=cutting[0].start, stop=cutting[0].stop),))
    with pytest.raises(ValueError, match="must not be nested in one that stops at"):
        simulate(problem, (nested,))


class Chain(nn.Module):
    """Run blocks one after another."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        pair = (x, x.sin())
        for block in self.blocks:
            pair = block(pair)
        return pair[0] + pair[1]


def test_refused_calls_are_a_value_that_makes_another_bridge():
    bridge = bridge_of(nn.Sequential(costly(), costly(), costly()), torch.randn(32, 64))
    refusal = Refusal("1", "draws lots")
    other = bridge.without(RefusedCalls(calls=frozenset({("1", 0)}), refusal=refusal))
    assert refusal in other.refusals()
    assert refusal not in bridge.refusals()
    call = next(c for c in bridge.profile.calls if c.module == "1")
    spans = [bridge.span(c.start, c.stop) for c in other.candidates]
    assert spans
    assert not any(first <= call.start and call.stop <= end for first, end in spans)
    assert len(other.candidates) < len(bridge.candidates)
    assert other.problem(1).tensors is bridge.problem(1).tensors


def test_a_step_with_calls_that_save_nothing_is_planned():
    p = plan(SAVING_NOTHING["after costly calls"](), torch.randn(512, 64), "80%", solver="dp", loss=mean_square)
    assert p.segments
    assert p.predicted_peak_bytes <= p.budget_bytes
