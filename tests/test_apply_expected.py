"""Passes without gradients do not shift the names of calls; a step that is not the one planned for is told once."""

import warnings

import pytest
import torch
from remat.planner import apply
from remat.planner.circumstances import Circumstances
from remat.planner.fingerprint import Fingerprint
from remat.planner.plan import BatchTensor, Plan
from torch import nn

from .apply_models import assert_same, counting, segment, train_step


class Recycling(nn.Module):
    """Runs its trunk some times without gradients before it runs it with them; some blocks may be left out."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        self.before, self.dropped = 0, ()

    def trunk(self, x, dropped=()):
        for number, block in enumerate(self.blocks):
            if number not in dropped:
                x = x + block(x)
        return x

    def forward(self, x):
        with torch.no_grad():
            y = x
            for _ in range(self.before):
                y = self.trunk(y)
        return self.trunk(x + 0.1 * y, self.dropped)


def planned(model, segments, **circumstances):
    """Return a plan as `plan` makes it, with figures that hold for a batch of 4."""
    batch = (BatchTensor(name="0", shape=(4, 16), dtype="torch.float32", device="cpu"),)
    return Plan(
        segments=tuple(segments),
        fingerprint=Fingerprint.of(model),
        batch=batch,
        circumstances=Circumstances(**circumstances),
    )


PLANS = {
    "calls": [segment("blocks.0"), segment("blocks.2")],
    "a run": [segment("blocks.0", "blocks.1", "blocks.2", crosses_operators=True)],
    "nested": [segment("blocks.0", "blocks.1", children=(segment("blocks.1"),), crosses_operators=True)],
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_passes_without_gradients_do_not_shift_what_is_checkpointed(name, before):
    torch.manual_seed(0)
    model, x = Recycling().train(), torch.randn(4, 16, requires_grad=True)
    model.before = before
    plain = train_step(model, x)
    inside = {"linear": model.blocks[0][0]}
    with counting(inside) as calls, apply(model, planned(model, PLANS[name])), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train_step(model, x), plain)
        assert calls["linear"] == before + 2


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dropped", [(0,), (2,), (1, 2), (0, 1, 2, 3)])
def test_dropped_layers_stay_exact_and_are_told_once_for_an_applied_plan(name, dropped):
    torch.manual_seed(0)
    model, x = Recycling().train(), torch.randn(4, 16, requires_grad=True)
    model.dropped = dropped
    plain = train_step(model, x)
    missed = any(int(call.module[-1]) in dropped for part in PLANS[name] for call in part.members)
    with apply(model, planned(model, PLANS[name])), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_same(train_step(model, x), plain)
    assert len(caught) == missed
    assert not missed or "made other calls than were planned" in str(caught[0].message)
    assert not missed or "blocks." in str(caught[0].message)


def test_a_segment_that_does_not_end_as_planned_is_told():
    class Backwards(Recycling):
        def forward(self, x):
            for number in (0, 2, 1):
                x = self.blocks[number](x)
            return x

    model, x = Backwards().train(), torch.randn(4, 16, requires_grad=True)
    plain = train_step(model, x)
    segments = [segment("blocks.0", "blocks.1"), segment("blocks.2")]
    told = pytest.warns(UserWarning, match=r"of segment blocks\.0 \.\. blocks\.1 \(2 calls\) not all calls came")
    with apply(model, planned(model, segments)), told:
        assert_same(train_step(model, x), plain)


@pytest.mark.parametrize("made_with", [{}, {"cpu": "bfloat16"}, {"cpu": "float16"}])
def test_another_precision_than_planned_is_told_once(made_with):
    model, x = Recycling().train(), torch.randn(4, 16)
    with (
        apply(model, planned(model, PLANS["calls"], autocast=made_with)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(x)
        assert len(caught) == (made_with != {"cpu": "bfloat16"})
        model(x)
    assert len(caught) == 1
    assert "autocast" in str(caught[0].message)


class Cast(nn.Module):
    """Enters autocast itself, or leaves it, around blocks."""

    def __init__(self, *, enabled):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.enabled = enabled

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](x.float()))


@pytest.mark.parametrize("plan", ["calls", "a run"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_part_that_sets_its_own_precision_is_told_of_nothing(plan, inside):
    model = Cast(enabled=inside).train()
    around = {} if inside else {"cpu": "bfloat16"}
    with apply(model, planned(model, PLANS[plan], autocast=around)), warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            model(torch.randn(4, 16))


def test_a_larger_batch_than_planned_is_told_once_and_a_smaller_one_not():
    model = Recycling().train()
    with apply(model, planned(model, PLANS["calls"])), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(2, 16))
        assert not caught
        for _ in range(2):
            model(torch.randn(8, 16))
    assert [("shape [8, 16]" in str(warning.message)) for warning in caught] == [True]


def test_evaluation_under_a_plan_is_told_of_nothing():
    model = Recycling()
    with apply(model, planned(model, PLANS["calls"])), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(torch.randn(8, 16))
        with torch.no_grad():
            model.train()(torch.randn(8, 16))


def test_steps_that_begin_with_gradients_are_logged_once(caplog):
    model, x = Recycling().train(), torch.randn(4, 16)
    apply(model, planned(model, PLANS["calls"]))
    for told in (0, 0, 1, 1):
        model(x).sum().backward()
        assert len(caplog.records) == told
    assert "begin with gradients of an earlier backward" in caplog.text
    assert "accumulation=True" in caplog.text


@pytest.mark.parametrize("way", ["accumulation", "freed"])
def test_gradients_that_were_planned_or_are_freed_are_not_told(way, caplog):
    model, x = Recycling().train(), torch.randn(4, 16)
    model.blocks[0].requires_grad_(False)
    apply(model, planned(model, PLANS["calls"], accumulation=way == "accumulation"))
    for _ in range(4):
        model(x).sum().backward()
        if way == "freed":
            model.zero_grad()
    assert not caplog.records
