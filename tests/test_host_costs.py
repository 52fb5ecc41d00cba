"""What a segment costs the host: for itself, for what autograd saves in it, and more behind large operators."""

from dataclasses import replace

import pytest
import torch
from remat.planner import plan
from remat.planner.bridge.host_costs import SWEEP_BYTES, HostCosts, HostCostsByCache, HostTimes
from remat.planner.finding.host import host_costs
from remat.profiler import profile
from torch import nn

COSTS = HostCostsByCache(
    warm=HostCosts(region_ns=1000, saved_ns=100, selective_ns=10),
    cold=HostCosts(region_ns=3000, saved_ns=500, selective_ns=50),
)


def recorded(moved_bytes):
    """Record a linear layer, which saves its input and its weight, and a GELU, which saves its input."""
    found = profile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8, requires_grad=True), repeats=0)
    operators = tuple(replace(operator, moved_bytes=moved_bytes) for operator in found.operators)
    return replace(found, operators=operators)


@pytest.mark.parametrize(
    ("moved_bytes", "region_ns", "saved_ns", "selective_ns"),
    [
        (0, 1000, 100, 10),
        (SWEEP_BYTES // 2, 2000, 300, 30),
        (SWEEP_BYTES, 3000, 500, 50),
        (9 * SWEEP_BYTES, 3000, 500, 50),
    ],
)
def test_costs_grow_with_the_bytes_that_operators_move(moved_bytes, region_ns, saved_ns, selective_ns):
    found = recorded(moved_bytes)
    times, stop = HostTimes(found, COSTS), found.forward_stop
    saved = sum(sum(k < stop for k in storage.saved_by) for storage in found.storages)
    assert saved == 3
    assert times.replay_ns(0, stop) == region_ns + saved * saved_ns
    assert times.selective_ns(0, stop) == stop * selective_ns


def test_a_replay_that_runs_nothing_costs_its_segment_only():
    assert HostTimes(recorded(SWEEP_BYTES), COSTS).replay_ns(1, 1) == 1000


def test_beside_estimated_times_nothing_is_measured_so_that_plans_repeat(monkeypatch):
    monkeypatch.setattr("remat.planner.finding.planner.host_costs", lambda device: pytest.fail("measured"))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
    one, other = (plan(model, torch.ones(1024, 8), "80%", solver="dp", repeats=0, check=False) for _ in range(2))
    assert one == other
    assert one.predicted_overhead > 0


def test_a_device_is_measured_once_and_its_random_state_is_left():
    before = torch.get_rng_state()
    found = host_costs(torch.device("cpu"))
    assert found is host_costs(torch.device("cpu"))
    assert found.warm.region_ns > 0
    assert found.cold.saved_ns > 0
    assert torch.equal(before, torch.get_rng_state())
