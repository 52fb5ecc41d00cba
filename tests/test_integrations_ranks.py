"""Several ranks that plan at their first batch: one of them plans, all train under the same plan."""

import copy
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from remat.integrations.first_batch import FirstPlan
from remat.integrations.first_call import FirstCall
from remat.integrations.ranks import from_rank_0, least
from remat.planner import PlanError, apply
from torch import nn

RANKS = 2


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    )


def train(model, rank):
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        torch.manual_seed(1000 * step + rank)
        wrapped(torch.randn(64 + rank, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def run(rank, port, folder, answers):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        model = build()
        expected = train(copy.deepcopy(model), rank)
        plans = []
        settings = FirstPlan.of("80%", {"solver": "dp", "repeats": 0, "loss": lambda out: out.square().mean()})

        def act(batch):
            plans.append(settings.make(model, batch, folder=folder))
            apply(model, plans[0])

        FirstCall(model, act)
        equal = all(torch.equal(a, b) for a, b in zip(expected, train(model, rank), strict=True))
        failed = ""
        try:
            from_rank_0(lambda: 1 / 0)
        except (PlanError, ZeroDivisionError) as error:
            failed = str(error)
        answers.put((rank, equal, plans[0].to_json(), least(10 - rank), failed))
    finally:
        dist.destroy_process_group()


def test_ranks_train_under_the_plan_of_rank_0_as_without(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (port, str(tmp_path), answers), nprocs=RANKS)
    found = sorted(answers.get() for _ in range(RANKS))
    assert [answer[1] for answer in found] == [True, True]
    assert found[0][2] == found[1][2]
    assert '"segments"' in found[0][2]
    assert [answer[3] for answer in found] == [9, 9]
    assert len(list(tmp_path.iterdir())) == 1
    assert found[0][4] == "division by zero"
    assert "rank 0 could not make the plan" in found[1][4]
    assert "ZeroDivisionError" in found[1][4]


def test_a_batch_norm_over_ranks_is_refused(monkeypatch):
    monkeypatch.setattr("remat.integrations.first_batch.several", lambda: True)
    with pytest.raises(PlanError, match=r"'0' is a SyncBatchNorm.*plan before training"):
        FirstPlan.of("80%", {}).make(nn.Sequential(nn.SyncBatchNorm(4)), torch.randn(8, 4))
