"""Two processes: a plan made on one rank and shared as a file gives the gradients of the unplanned distributed run."""

from __future__ import annotations

import copy
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from remat.planner import InfeasibleBudgetError, Plan, apply
from remat.planner.finding.planning import Planner
from torch import nn

RANKS = 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width=32, count=4):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(count)])
        self.head = nn.Linear(width, width)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(out):
    return out.square().mean()


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


def run(rank, port, kind, solver, path, answers):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
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
        answers.put((rank, equal, len(plan.segments), sum(float(g.abs().sum()) for g in got[-1].values())))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("solver", ["all", "dp"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_plan_from_one_rank_gives_the_gradients_of_the_unplanned_distributed_run(kind, solver, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (port, kind, solver, str(tmp_path / "plan.json"), answers), nprocs=RANKS)
    found = sorted(answers.get() for _ in range(RANKS))
    assert [rank for rank, *_ in found] == [0, 1]
    for _, equal, segments, size in found:
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
