"""Plans are files: they come back as they were written, or say in one line what is wrong with them."""

import copy
import json
import os
import pickle
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remat.planner.circumstances import Circumstances
from remat.planner.errors import PlanError, PlanFileError, PlanMismatchError
from remat.planner.fingerprint import Fingerprint
from remat.planner.patterns import matching
from remat.planner.plan import SCHEMA_VERSION, BatchTensor, Call, Plan, PlannedSegment, SavedOperator
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(depth)]
        )


PLAN = Plan(
    segments=(
        PlannedSegment(
            members=(Call(module="blocks.0"), Call(module="blocks.1")),
            save=(SavedOperator(operator="aten.addmm.default", index=1),),
            children=(PlannedSegment(members=(Call(module="blocks.0.0"),), early_stop=False),),
            restored_buffers=("blocks.0.1.running_mean",),
            crosses_operators=True,
        ),
        PlannedSegment(members=(Call(module="blocks.2", index=1),)),
    ),
    budget_bytes=2**30,
    predicted_peak_bytes=900 * 2**20,
    predicted_overhead=0.125,
    unplanned_peak_bytes=3 * 2**30,
    lower_bound_overhead=0.12,
    gap=0.04,
    solver="dp",
    status="optimal",
    circumstances=Circumstances(optimizer="adamw", autocast={"cpu": "bfloat16"}, headroom=0.05),
    bytes_from="measured",
    fingerprint=Fingerprint.of(Net(), calls=("", "blocks.0")),
    batch=(BatchTensor(name="input_ids", shape=(2, 8), dtype="torch.int64", device="cpu"),),
    versions={"torch": "2.13"},
    notes=("blocks.2 left out once",),
)


def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(str(path)).to_json() == path.read_text()
    assert json.loads(path.read_text())["schema_version"] == SCHEMA_VERSION


def test_a_file_from_before_plans_held_their_card_is_read():
    content = json.loads(PLAN.to_json())
    for name in ("card", "loss", "mp_policy", "reshard_after_forward", "parallelize"):
        del content["circumstances"][name]
    assert Plan.from_json(json.dumps(content)) == PLAN


names = st.text(max_size=12)
calls = st.builds(Call, module=names, index=st.integers(0, 9))
leaves = st.builds(
    PlannedSegment,
    members=st.lists(calls, min_size=1, max_size=3).map(tuple),
    save=st.lists(st.builds(SavedOperator, operator=names, index=st.integers(0, 9)), max_size=2).map(tuple),
    restored_buffers=st.lists(names, max_size=2).map(tuple),
    early_stop=st.booleans(),
)
segments = st.recursive(
    leaves,
    lambda inner: st.builds(
        PlannedSegment,
        members=st.lists(calls, min_size=1, max_size=2).map(tuple),
        children=st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(segments, max_size=4).map(tuple), st.none() | st.integers(0, 2**63), st.none() | st.floats(0, 9))
def test_any_plan_comes_back_from_json(chosen, budget, overhead):
    plan = Plan(segments=chosen, budget_bytes=budget, predicted_overhead=overhead)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_can_be_copied_and_sent_to_another_process():
    assert copy.deepcopy(PLAN) == PLAN
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


def _edited(change):
    content = json.loads(PLAN.to_json())
    change(content)
    return json.dumps(content)


BROKEN = {
    "empty": ("", "not JSON"),
    "truncated": (PLAN.to_json()[:200], "truncated"),
    "binary": ("\x00\x01", "not JSON"),
    "a list": ("[]", "no field 'segments'"),
    "another file": ('{"name": "config"}', "no field 'segments'"),
    "another schema": (_edited(lambda c: c.update(schema_version=99)), "schema_version is 99, this remat reads 3"),
    "no schema": (_edited(lambda c: c.pop("schema_version")), "schema_version is None"),
    "a word for a number": (_edited(lambda c: c.update(budget_bytes="8GiB")), "field budget_bytes.*'8GiB'"),
    "a negative number": (_edited(lambda c: c.update(budget_bytes=-1)), "field budget_bytes"),
    "a misspelt field": (_edited(lambda c: c.update(solvr="dp")), "unknown field solvr; did you mean 'solver'"),
    "a misspelt circumstance": (
        _edited(lambda c: c["circumstances"].update(optimzer="adamw")),
        r"unknown field circumstances\.optimzer; did you mean 'optimizer'",
    ),
    "a field of another tool": (_edited(lambda c: c.update(zebra=1)), "unknown field zebra; undo the edit or make"),
    "segments misspelt": (
        _edited(lambda c: c.update(segmnts=c.pop("segments"))),
        "unknown field 'segmnts', and no field 'segments'; did you mean 'segments'",
    ),
    "a misspelt segment field": (_edited(lambda c: c["segments"][0].update(childs=[])), "'childs' is none of them"),
    "a segment field nearly right": (
        _edited(lambda c: c["segments"][0].update(insde=[])),
        "'insde' is none of them; did you mean 'inside'",
    ),
    "a list for a line": (
        _edited(lambda c: c["segments"].append({"calls": ["blocks.0"]})),
        r"calls is text like 'blocks\.9', got a list",
    ),
    "no calls": (_edited(lambda c: c["segments"][0].pop("calls")), "field segments: a segment is a line, or a mapping"),
    "a number for a segment": (_edited(lambda c: c["segments"].append(3)), r"field segments\.2.*got 3"),
    "a segment in full without members": (
        _edited(lambda c: c["segments"].append({"members": []})),
        "segments.2.members",
    ),
    "an index that is none": (_edited(lambda c: c["segments"].append("blocks.2#x")), "comes the number of a call"),
    "a module that is not there": (_edited(lambda c: c["segments"].append("blocks.3")), "has no module 'blocks.3'"),
    "a pattern for nothing": (_edited(lambda c: c["segments"].append("block.*")), r"has a path like 'block\.\*'"),
    "numbers that run backwards": (_edited(lambda c: c["segments"].append("blocks.2-0")), "2-0 is no run of numbers"),
    "far too many numbers": (_edited(lambda c: c["segments"].append("blocks.0-99999999999")), "is no run of numbers"),
    "a run of unknown calls": (_edited(lambda c: c["segments"].append("blocks: 0 .. 2")), "name each, with a comma"),
    "a line for a list": (_edited(lambda c: c["segments"][0].update(keeps="addmm")), "'keeps' must be a list"),
    "numbers for names": (_edited(lambda c: c["segments"][0].update(keeps=[1])), "'keeps' must be a list of names"),
    "segments that are none": (_edited(lambda c: c.update(segments="blocks.0")), "field segments"),
    "a wrong source": (_edited(lambda c: c.update(bytes_from="guessed")), "field bytes_from"),
    "a wrong shape": (
        _edited(lambda c: c["fingerprint"]["parameters"].update({"blocks.0.0.weight": "torch.float32 4x4"})),
        r"field fingerprint\.parameters\.blocks\.0\.0\.weight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_in_one_line_what_is_wrong_and_what_to_do(tmp_path, name):
    text, message = BROKEN[name]
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanFileError, match=message) as caught:
        Plan.load(path)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    assert str(path) in line
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert isinstance(caught.value, PlanError)
    assert isinstance(caught.value, ValueError)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(PLAN.to_json()) - 1), st.characters(codec="utf-8"))
def test_a_file_with_any_one_character_changed_is_read_or_refused(position, character):
    text, problem = PLAN.to_json(), ""
    try:
        Plan.from_json(text[:position] + character + text[position + 1 :])
    except PlanFileError as error:
        problem = str(error)
    assert "\n" not in problem


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PlanFileError, match=r"nothing\.json: cannot read .*check the path"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(PlanFileError, match="cannot read"):
        Plan.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        Plan(segments=()).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_file_can_be_read_by_others_and_keeps_its_mode(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    PLAN.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_model_a_plan_was_made_for_passes_whatever_its_values():
    PLAN.check(Net())
    Plan(segments=()).check(nn.Linear(1, 1))


CHANGES = {
    "another class": (lambda: nn.Linear(4, 4), "class Linear instead of Net"),
    "another width": (
        lambda: Net(width=8),
        r"12 changed parameters: blocks\.0\.0\.weight is \[8, 8\] float32, planned \[4, 4\] float32, .* and 9 more",
    ),
    "fewer blocks": (lambda: Net(depth=2), r"4 missing parameters: blocks\.2\.0\.weight, .* and 1 more"),
    "more blocks": (lambda: Net(depth=4), r"4 extra parameters: blocks\.3\.0\.weight"),
    "another dtype": (lambda: Net().double(), r"is \[4, 4\] float64, planned \[4, 4\] float32"),
    "another module": (lambda: _with_identity(), r"1 changed modules: blocks\.0\.1 is Identity, planned BatchNorm1d"),
    "a compiled wrapper": (
        lambda: torch.compile(Net(), backend="eager"),
        r"inside this OptimizedModule: apply it to model\._orig_mod$",
    ),
    "a parallel wrapper": (lambda: nn.DataParallel(Net()), r"inside this DataParallel: apply it to model\.module$"),
}


def _with_identity():
    model = Net()
    model.blocks[0][1] = nn.Identity()
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_is_refused_with_what_differs(name):
    make, message = CHANGES[name]
    with pytest.raises(PlanMismatchError, match=message) as caught:
        PLAN.check(make())
    assert "\n" not in str(caught.value)


def test_the_text_of_a_plan_names_promises_and_segments():
    text = str(PLAN)
    for words in (
        *("2 segments", "peak 900.0 MiB", "budget 1.00 GiB", "added time 12.5 %", "solver dp optimal"),
        *("  blocks: 0, 1  (keeps the outputs of 1 operator", "\n    0.0  (replays to its end)", "  blocks.2#1"),
        "note: blocks.2 left out once",
    ):
        assert words in text
    assert PLAN.describe() == text
    assert "unknown" in str(Plan(segments=()))


def stack(depth=12):
    parts = ("", ".ln", ".attn", ".attn.drop", ".mlp", ".mlp.0")
    calls = ["", *(f"h.{n}{part}" for n in range(depth) for part in parts)]
    return Fingerprint(model_class="Stack", modules=dict.fromkeys(calls[1:], "Identity"), calls=tuple(calls))


def segment(*names, **said):
    return PlannedSegment(members=tuple(Call(module=name) for name in names), **said)


def planned(*segments):
    return Plan(segments=segments, fingerprint=stack())


def lines_of(plan):
    return json.loads(plan.to_json())["segments"]


RUN = [segment(f"h.{n}.ln", f"h.{n}.attn", f"h.{n}.mlp.0") for n in range(12)]


def test_alike_segments_are_one_line_and_come_back_in_the_order_of_the_forward():
    plan = planned(*RUN[:2], segment("h.2.attn"), RUN[2], *RUN[3:])
    assert lines_of(planned(*RUN)) == ["h.*: ln .. mlp.0"]
    assert lines_of(planned(*RUN[:3], RUN[7])) == ["h.0-2,7: ln .. mlp.0"]
    assert lines_of(planned(segment("h.0", "h.1", "h.2"), segment("h.3"))) == ["h: 0 .. 2", "h.3"]
    both = [part for n in range(4) for part in (segment(f"h.{n}.attn"), segment(f"h.{n}.mlp"))]
    assert lines_of(planned(*both)) == ["h.0-3: attn", "h.0-3: mlp"]
    for made in (planned(*RUN), planned(*RUN[:3], RUN[7]), planned(*both), plan):
        assert Plan.from_json(made.to_json()) == made
    assert "h.*: ln .. mlp.0  (12 segments)" in str(planned(*RUN))
    assert len(repr(planned(*RUN))) < 120
    assert "<b>plan: 12 segments" in planned(*RUN)._repr_html_()


def test_what_is_kept_nested_and_restored_is_written_from_the_place_on():
    said = [
        segment(
            f"h.{n}",
            save=(
                SavedOperator(operator="aten.mm.default", index=1),
                SavedOperator(operator="aten.bmm.default", index=0),
            ),
            children=(segment(f"h.{n}.ln", f"h.{n}.attn", children=(segment(f"h.{n}.attn.drop"),)),),
            restored_buffers=(f"h.{n}.ln.count", "seen"),
            early_stop=False,
            crosses_operators=True,
        )
        for n in range(2)
    ]
    assert lines_of(planned(*said)) == [
        {
            "calls": "h.0-1",
            "keeps": ["aten.mm.default#1", "aten.bmm.default"],
            "inside": [{"calls": "ln, attn", "inside": ["attn.drop"]}],
            "restores": ["ln.count", "/seen"],
            "to_its_end": True,
            "crosses_operators": True,
        }
    ]
    assert Plan.from_json(planned(*said).to_json()) == planned(*said)


EDITS = {
    "taken away": (lambda lines: lines[1:], [segment(f"h.{n}.mlp") for n in range(4)]),
    "added": (lambda lines: ["h.9", *lines[1:]], [*(segment(f"h.{n}.mlp") for n in range(4)), segment("h.9")]),
    "narrowed": (lambda lines: ["h.1-2: attn"], [segment("h.1.attn"), segment("h.2.attn")]),
    "widened": (lambda lines: ["h.*: attn"], [segment(f"h.{n}.attn") for n in range(12)]),
    "a list": (lambda lines: ["h.3: ln, attn"], [segment("h.3.ln", "h.3.attn")]),
    "a second call": (lambda lines: ["h.3#1"], [PlannedSegment(members=(Call(module="h.3", index=1),))]),
    "in full": (lambda lines: [{"members": [{"module": "h.3", "index": 0}]}, "h.4"], [segment("h.3"), segment("h.4")]),
    "the root": (lambda lines: ["(root)"], [segment("")]),
}


def test_two_lines_that_hold_the_same_block_are_refused_as_they_are_written():
    content = json.loads(planned(*RUN).to_json()) | {"segments": ["h.0-3", "h.2"]}
    with pytest.raises(PlanFileError, match=r"'h\.0-3' and 'h\.2' both hold h\.2: take one out, or narrow it"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_is_edited_by_hand(name):
    edit, expected = EDITS[name]
    content = json.loads(planned(*(segment(f"h.{n}.{part}") for n in range(4) for part in ("attn", "mlp"))).to_json())
    content["segments"] = edit(content["segments"])
    assert Plan.from_json(json.dumps(content)).segments == tuple(expected)


def test_the_file_opens_with_what_matters_and_ends_with_the_fingerprint():
    lines = planned(*RUN).to_json().splitlines()
    assert lines[2].startswith('  "summary": "plan: 12 segments')
    assert lines[4] == '    "h.*: ln .. mlp.0"'
    assert next(number for number, line in enumerate(lines) if '"fingerprint"' in line) == len(lines) - 8
    assert len(lines) < 40


@pytest.mark.parametrize(
    ("pattern", "path", "named"),
    [
        ("h.*", "h.3", True),
        ("h.*", "h.3.mlp.0", True),
        ("h.*", "h", False),
        ("h.0-3,7.mlp", "h.7.mlp", True),
        ("h.0-3,7.mlp", "h.5.mlp", False),
        ("h.*.att*", "h.5.attention", True),
        ("*.3", "h.3.mlp", True),
        ("h", "", False),
    ],
)
def test_patterns_name_modules_and_what_is_in_them(pattern, path, named):
    assert matching(pattern, path) is named
