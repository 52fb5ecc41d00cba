"""Two processes: a plan made on one rank and shared as a file gives the gradients of the unplanned distributed run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from remat.planner import InfeasibleBudgetError, Plan, apply
from remat.planner.finding.planner import Planner
from torch import nn

from tests.ranks import RANKS, Block, mean_square, on_every_rank


class Net(nn.Module):
    def __init__(self, width=32, count=4):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width, dropout=0.1) for _ in range(count)])
        self.head = nn.Linear(width, width)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Net().train()


def batch_of(rank):
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(100 + rank))


def least_plan(model, solver):
    planner = Planner.of(model, batch_of(0), loss=mean_square, repeats=0, units=model.blocks)
    try:
        return planner.plan(1, solver=solver)
    except InfeasibleBudgetError as error:
        return error.plan


def wrap(model, kind):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients(wrapped, model, rank):
    found = []
    for step in range(2):
        torch.manual_seed(1000 * step + rank)
        wrapped.zero_grad(set_to_none=True)
        mean_square(wrapped(batch_of(rank))).backward()
        found.append({name: local(parameter.grad).clone() for name, parameter in model.named_parameters()})
    return found


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(rank, kind, solver, path):
    model = build()
    if rank == 0:
        least_plan(model, solver).save(path)
    dist.barrier()
    plan = Plan.load(path)
    unplanned, planned = copy.deepcopy(model), model
    expected = gradients(wrap(unplanned, kind), unplanned, rank)
    apply(planned, plan)
    got = gradients(wrap(planned, kind), planned, rank)
    equal = all(
        torch.equal(theirs[name], ours[name]) for theirs, ours in zip(expected, got, strict=True) for name in theirs
    )
    return equal, len(plan.segments), sum(float(g.abs().sum()) for g in got[-1].values())


@pytest.mark.parametrize("solver", ["all", "dp"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_plan_from_one_rank_gives_the_gradients_of_the_unplanned_distributed_run(kind, solver, tmp_path):
    for equal, segments, size in on_every_rank(run, kind, solver, str(tmp_path / "plan.json")):
        assert equal
        assert segments
        assert size > 0


def test_segments_hold_units_whole_or_lie_within():
    model = build()
    planner = Planner.of(model, batch_of(0), loss=mean_square, repeats=0, units=model.blocks)
    free = Planner.of(model, batch_of(0), loss=mean_square, repeats=0)
    calls = [(call.start, call.stop) for call in planner.profile.calls if call.kind == "Block"]
    assert 0 < len(planner.bridge.candidates) < len(free.bridge.candidates)
    for candidate in planner.bridge.candidates:
        first, end = planner.bridge.span(candidate.start, candidate.stop)
        for start, stop in calls:
            assert stop <= first or end <= start or (first <= start and stop <= end) or (start <= first and end <= stop)


@pytest.mark.parametrize("wrong", [[nn.Linear(2, 2)], ["blocks.0"], [None]])
def test_units_of_another_model_are_refused(wrong):
    with pytest.raises(ValueError, match="units must be modules of the model"):
        Planner.of(build(), batch_of(0), loss=mean_square, repeats=0, units=wrong)
