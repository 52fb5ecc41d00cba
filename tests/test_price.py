"""A plan that was edited by hand is priced without a search, as a plan that was found is; two plans are compared."""

import json
from dataclasses import replace

import pytest
import torch
from remat.planner import Plan, PlanError, PlanMismatchError, Planner, diff, plan, price, verify
from remat.planner.segments import Call, PlannedSegment, SavedOperator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.small_step import build

MODEL, BATCH, LOSS = build()
PLANNER = Planner.of(MODEL, BATCH, loss=LOSS, repeats=0)


def planned(budget="60%", solver="dp") -> Plan:
    return PLANNER.plan(budget, solver=solver, check=False)


def edited(plan: Plan, *entries) -> Plan:
    content = json.loads(plan.to_json())
    content["segments"] = list(entries)
    return Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("solver", ["dp", "ilp", "dp_nested"])
def test_a_plan_that_was_found_is_priced_as_it_was(solver):
    plan = planned(solver=solver)
    priced = price(MODEL, BATCH, plan, planner=PLANNER)
    assert priced.segments == plan.segments
    assert priced.predicted_peak_bytes == plan.predicted_peak_bytes
    assert priced.predicted_overhead == plan.predicted_overhead
    assert (priced.solver, priced.status, priced.gap) == ("edited", "priced", None)


def test_an_edited_plan_has_its_own_peak_which_the_allocator_confirms():
    plan = edited(planned(), "0: up, act", "1-2", "3.act")
    priced = price(MODEL, BATCH, plan, planner=PLANNER)
    assert [str(segment) for segment in priced.segments] == ["0.up .. 0.act (2 calls)", "1", "2", "3.act"]
    found = verify(MODEL, BATCH, priced, loss=LOSS, repeats=0)
    assert found.exact
    assert not found.missing_loss
    assert f"made with loss={priced.circumstances.loss}, and none" in str(verify(MODEL, BATCH, priced, repeats=0))
    assert found.measured_peak_bytes == pytest.approx(priced.predicted_peak_bytes, rel=0.01)
    fewer = price(MODEL, BATCH, edited(plan, "1-2"), planner=PLANNER)
    assert fewer.predicted_peak_bytes > priced.predicted_peak_bytes
    assert 0 < fewer.predicted_overhead < priced.predicted_overhead


def test_a_call_too_small_for_a_stage_of_its_own_is_priced_all_the_same():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), *(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)))
    batch = torch.randn(512, 8)
    planner = Planner.of(model, batch, repeats=0)
    assert "0.1" not in [stage.name for stage in planner.profile.stages]
    priced = price(model, batch, edited(planner.plan("100%", solver="none"), "0.1"), planner=planner)
    assert [str(segment) for segment in priced.segments] == ["0.1"]


def test_pricing_fills_in_what_goes_with_a_segment_by_its_place():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU()), nn.Linear(64, 4)))
    batch = torch.randn(64, 16)
    plan = Plan(segments=(PlannedSegment(members=(Call(module="0"),)),))
    (segment,) = price(model, batch, plan, repeats=0).segments
    assert segment.restored_buffers == ("0.1.num_batches_tracked", "0.1.running_mean", "0.1.running_var")


def test_circumstances_are_those_of_the_plan():
    plan = Planner.of(MODEL, BATCH, loss=LOSS, repeats=0, optimizer="adamw", accumulation=True, holds_output=False)
    found = plan.plan("80%", solver="dp", check=False)
    priced = price(MODEL, BATCH, found, loss=LOSS, repeats=0)
    assert priced.circumstances == found.circumstances
    assert priced.predicted_peak_bytes == found.predicted_peak_bytes


def meta():
    with torch.device("meta"):
        return build()


@pytest.fixture(scope="module")
def of_ranks() -> Plan:
    """Return a plan for a card and ranks that are not here, read from a file."""
    model, batch, loss = meta()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how = {"units": model, "ranks": 2, "mp_policy": policy, "reshard_after_forward": False}
    with torch.autocast("cpu", torch.bfloat16):
        found = plan(model, batch, "90%", solver="dp", loss=loss, device="h100-80gb", **how)
    return Plan.from_json(found.to_json())


def test_a_plan_for_a_card_and_ranks_is_priced_for_them_again(of_ranks):
    model, batch, loss = meta()
    priced = price(model, batch, of_ranks, loss=loss)
    assert priced.circumstances == of_ranks.circumstances
    assert priced.predicted_peak_bytes == of_ranks.predicted_peak_bytes
    assert priced.predicted_overhead == of_ranks.predicted_overhead
    assert not torch.is_autocast_enabled("cpu")
    shown = str(of_ranks).partition("\n")[0]
    assert shown.endswith(
        "for h100-80gb, bfloat16 autocast on cuda, optimizer not counted, output held, computing in bfloat16, "
        "reducing in float32, "
        "reshard_after_forward=False"
    )


def test_what_is_given_counts_before_what_a_plan_says(of_ranks):
    model, batch, loss = meta()
    priced = price(model, batch, of_ranks, loss=loss, device="a100-80gb", mp_policy=None)
    changed = diff(of_ranks, priced).fields
    assert changed["circumstances.card"] == ("h100-80gb", "a100-80gb")
    assert changed["circumstances.mp_policy"][1] is None
    assert priced.predicted_overhead != of_ranks.predicted_overhead


def test_a_function_that_a_plan_was_made_with_is_asked_for_by_name(of_ranks):
    model, batch, loss = meta()
    with pytest.raises(PlanError, match=r"made with loss=squares, a function.* give it again, or loss=None"):
        price(model, batch, of_ranks)
    sharded = replace(of_ranks, circumstances=replace(of_ranks.circumstances, parallelize="shard"))
    with pytest.raises(PlanError, match="made with parallelize=shard"):
        price(model, batch, sharded, loss=loss)


def in_full(*members, save=()) -> PlannedSegment:
    calls = tuple(Call(module=module) for module in members)
    return PlannedSegment(members=calls, save=tuple(SavedOperator(operator=name, index=n) for name, n in save))


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ((in_full("7"),), "7: the step makes no call of 7"),
        ((in_full("0"), in_full("0.act")), "0 and 0.act overlap"),
        ((in_full("1", save=[("aten.gelu.default", 1)]),), r"is to keep aten.gelu.default#1, and runs 1 of them"),
        (
            (in_full("1", save=[("aten.mm.default", 0)]),),
            r"to keep aten.mm.default, which it never runs; it runs aten.addmm.default \(2\), aten.gelu.default \(1\)",
        ),
        ((in_full("1", save=[("aten.t.default", 0)]),), "the output of aten.t.default#0 cannot be kept"),
        ((replace(in_full("0"), children=(in_full("1.act"),)),), "1.act is not a part of 0"),
    ],
)
def test_what_cannot_be_a_plan_is_told_by_name(segments, words):
    with pytest.raises(PlanError, match=words):
        price(MODEL, BATCH, Plan(segments=segments), planner=PLANNER)


def test_a_segment_that_cannot_be_replayed_is_told_with_the_reason():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.linear = 0, nn.Linear(32, 32)

        def forward(self, x):
            self.count += 1
            return self.linear(x)

    model = nn.Sequential(Counting(), nn.Linear(32, 1))
    with pytest.raises(PlanError, match=r"0: it cannot be replayed exactly: 0 .*count"):
        price(model, torch.randn(8, 32), Plan(segments=(in_full("0"),)), repeats=0)


def test_a_plan_for_another_model_is_not_priced():
    with pytest.raises(PlanMismatchError):
        price(build(blocks=2)[0], BATCH, planned())


def test_plans_differ_in_segments_by_pattern_promises_and_circumstances():
    one = edited(planned(), "0-1", "3: up, act")
    other = replace(
        edited(planned(), "0", "2-3: act"),
        budget_bytes=2**20,
        predicted_overhead=0.25,
        notes=("a new note",),
        circumstances=replace(one.circumstances, optimizer="adamw"),
    )
    found = diff(one, other)
    assert found.only_first == ("1", "3: up, act")
    assert found.only_second == ("2-3: act",)
    assert found.fields["circumstances.optimizer"] == ("", "adamw")
    assert found.fields["notes"][1] == ["a new note"]
    assert "budget_bytes: " in str(found)
    a_byte = replace(one, unplanned_peak_bytes=one.unplanned_peak_bytes + 1)
    peak = one.unplanned_peak_bytes
    assert str(diff(one, a_byte)) == f"unplanned_peak_bytes: {peak:,} bytes -> {peak + 1:,} bytes"
    keeping = {"calls": "*: act", "keeps": ["aten.gelu.default"], "to_its_end": True}
    assert diff(edited(one, keeping), one).only_first == ("*: act (keeps aten.gelu.default; replays to its end)",)
    assert "-> 1.0 MiB" in str(found)
    assert "-> 25.0 %" in str(found)
    assert not diff(one, one)
    assert str(diff(one, one)) == "no difference"


def test_plans_of_two_models_say_in_what_the_models_differ():
    model, batch, loss = build(blocks=2)
    other = Planner.of(model, batch, loss=loss, repeats=0).plan("90%", solver="none", check=False)
    assert "missing modules" in diff(planned(), other).fields["model"][1]
