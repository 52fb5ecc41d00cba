"""Several ranks that plan at their first batch: one of them plans, all train under the same plan."""

import copy

import pytest
import torch
from remat.integrations.first_batch import FirstPlan
from remat.integrations.first_call import FirstCall
from remat.integrations.ranks import from_rank_0, least
from remat.planner import PlanError, apply
from torch import nn

from tests.ranks import on_every_rank


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


def run(rank, folder):
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
    return equal, plans[0].to_json(), least(10 - rank), failed


def test_ranks_train_under_the_plan_of_rank_0_as_without(tmp_path):
    equal, plans, batches, failures = zip(*on_every_rank(run, str(tmp_path)), strict=True)
    assert equal == (True, True)
    assert plans[0] == plans[1]
    assert '"segments"' in plans[0]
    assert batches == (9, 9)
    assert len(list(tmp_path.iterdir())) == 1
    assert failures[0] == "division by zero"
    assert "rank 0 could not make the plan" in failures[1]
    assert "ZeroDivisionError" in failures[1]


def test_a_batch_norm_over_ranks_is_refused(monkeypatch):
    monkeypatch.setattr("remat.integrations.first_batch.several", lambda: True)
    with pytest.raises(PlanError, match=r"'0' is a SyncBatchNorm.*plan before training"):
        FirstPlan.of("80%", {}).make(nn.Sequential(nn.SyncBatchNorm(4)), torch.randn(8, 4))
