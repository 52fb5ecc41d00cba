"""The pictures show what they say: right numbers, units on every axis, and the peaks of the dry runs."""

from dataclasses import replace
from io import BytesIO
from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from remat.planner import PlanError, Planner, draw, verify
from remat.planner.budget import format_bytes
from remat.planner.pictures.frontier import peak_against_overhead, steps_of
from remat.planner.pictures.memory import memory_over_time, module_memory
from remat.planner.pictures.outline import plan_by_call
from remat.planner.pictures.palette import MEMORY, SOLVERS, TREATMENTS
from remat.planner.pictures.stages import MODULE_COLUMNS, group_paths, memory_by_module, plan_by_stage
from remat.planner.pictures.strip import plan_strip
from remat.planner.pictures.timeline import memory_parts
from remat.planner.plan import Call, Plan, PlannedSegment, SavedOperator
from remat.solvers import SOLVERS as REGISTERED
from torch import nn

from .small_step import Block, small_comparison


@pytest.fixture(scope="module")
def timelines():
    comparison = small_comparison()
    return comparison.planner.timeline(), comparison.planner.timeline(comparison.best("60%"))


def texts(figure: Figure) -> str:
    found = [text.get_text() for axis in figure.axes for text in axis.texts]
    found += [axis.get_title(loc="left") for axis in figure.axes]
    return "\n".join(found)


def rendered(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_categories_add_up_to_the_profile_and_its_peak(timelines):
    unplanned, _ = timelines
    profile = small_comparison().planner.profile
    step = len(profile.operators)
    assert np.array_equal(unplanned.total()[:step], profile.live_bytes())
    assert unplanned.peak_bytes == profile.peak_bytes() == unplanned.total().max()
    by_kind = profile.live_bytes_by_kind()
    uses = ("parameters", "parameter"), ("gradients", "gradient"), ("activations kept for backward", "activation")
    for use, kind in uses:
        assert np.array_equal(unplanned.live[use][:step], by_kind[kind])


def test_the_planned_timeline_peaks_where_the_plan_promises(timelines):
    _, planned = timelines
    assert planned.peak_bytes == small_comparison().best("60%").predicted_peak_bytes


def test_only_the_planned_step_recomputes_and_only_in_backward(timelines):
    unplanned, planned = timelines
    recomputed, kept = "recomputed activations", "activations kept for backward"
    assert not unplanned.live[recomputed].any()
    assert planned.live[recomputed].any()
    assert not planned.live[recomputed][: planned.loss_stop].any()
    assert planned.live[kept].max() < unplanned.live[kept].max()


def test_the_optimizers_step_comes_last_with_its_peak(timelines):
    unplanned, _ = timelines
    profile = small_comparison().planner.profile
    after = unplanned.total()[unplanned.backward_stop :]
    assert len(after) > 0
    assert (after == profile.parts.optimizer_step_peak).all()


def test_memory_over_time_shows_both_peaks_and_the_budget_on_the_same_axes(timelines):
    unplanned, planned = timelines
    figure = memory_over_time(unplanned, planned, budget_bytes=small_comparison().best("60%").budget_bytes)
    above, below = figure.axes
    assert above.get_ylim() == below.get_ylim()
    assert above.get_xlim() == below.get_xlim()
    assert above.get_ylabel() == below.get_ylabel() == "memory alive [MiB]"
    assert below.get_xlabel() == "time [ms]"
    by_operators = memory_over_time(unplanned, planned, by="operators")
    assert by_operators.axes[1].get_xlabel().endswith("[count]")
    assert by_operators.axes[1].get_xlim()[1] == len(planned.modules)
    words = texts(figure)
    assert "budget" in words
    assert "peak in the" in words
    assert "without checkpoints: peak" in words
    assert "with the plan: peak" in words
    assert "with the plan: peak" in texts(planned.plot())
    assert all("peak in the" in axis.get_title(loc="left") for axis in (above, below))  # beside the curve, not on it
    assert rendered(figure).startswith(b"\x89PNG")


def test_the_frontier_shows_every_plan_and_its_units():
    comparison = small_comparison()
    figure = peak_against_overhead(comparison)
    axis = figure.axes[0]
    assert "[MiB]" in axis.get_xlabel()
    assert [line.get_clip_on() for line in axis.lines if line.get_marker() == "*"] == [False]  # whole on the axis
    assert "[%" in axis.get_ylabel()
    drawn = {(round(x, 6), round(y, 6)) for line in axis.lines for x, y in zip(*line.get_data(), strict=True)}
    for row in comparison.feasible().to_dict("records"):
        point = (row["predicted_peak_bytes"] / 2**20, 100 * row["predicted_overhead"])
        assert (round(point[0], 6), round(point[1], 6)) in drawn
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"sqrt", "dp", "no checkpoints", "budgets"} <= set(labels)


def test_the_steps_of_a_solver_go_down_to_the_unplanned_step_and_its_least_peak_is_marked():
    comparison = small_comparison()
    for solver in comparison.solvers:
        steps = steps_of(comparison, solver)
        assert steps["peak_bytes"].is_monotonic_increasing
        assert steps["added"].is_monotonic_decreasing
        assert tuple(steps.iloc[-1]) == (comparison.unplanned_peak_bytes, 0.0)
    lines = peak_against_overhead(comparison).axes[0].lines
    marked = {float(line.get_xdata()[0]) for line in lines if line.get_marker() == "|" and len(line.get_xdata())}
    assert marked == {plan.predicted_peak_bytes / 2**20 for plan in comparison.least.values()}


def test_plans_at_the_same_point_are_rings_around_each_other():
    comparison = small_comparison()
    frame = comparison.frame.copy()
    columns = ["predicted_peak_bytes", "predicted_overhead"]
    frame.loc[frame["solver"] == "sqrt", columns] = frame.loc[frame["solver"] == "dp", columns].to_numpy()
    lines = peak_against_overhead(replace(comparison, frame=frame)).axes[0].lines
    sizes = {}
    for line in lines:
        if line.get_markerfacecolor() == "none" and len(line.get_xdata()):
            sizes.setdefault((line.get_xdata()[0], line.get_ydata()[0]), []).append(line.get_markersize())
    assert sizes
    assert all(sorted(rings) == [6, 10] for rings in sizes.values())


def test_the_frontier_names_solvers_without_a_plan():
    comparison = small_comparison()
    frame = comparison.frame.copy()
    frame.loc[frame["solver"] == "sqrt", "status"] = "infeasible"
    figure = peak_against_overhead(replace(comparison, frame=frame))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "sqrt: no plan fits" in labels
    assert "dp" in labels


def test_memory_by_module_counts_every_byte_once():
    profile = small_comparison().planner.profile
    table = memory_by_module(profile, 6)
    assert len(table) <= 6
    assert table["parameters"].sum() == profile.parts.parameters
    assert table["gradients"].sum() == profile.parts.gradients
    assert table["optimizer"].sum() == profile.parts.optimizer > 0
    assert list(table.columns) == ["module", *MODULE_COLUMNS]
    saved = sum(s.nbytes for s in profile.storages if s.kind == "activation" and s.saved_by)
    assert table["saved"].sum() == saved
    assert rendered(module_memory(profile)).startswith(b"\x89PNG")
    whole = memory_by_module(profile, 30)
    assert {"0 (its own)", "0.up", "0.down"} <= set(whole["module"])  # The container's addition is no part's.
    assert whole["saved"].sum() == saved


def test_the_strip_marks_what_the_plan_recomputes():
    profile = small_comparison().planner.profile
    nested = PlannedSegment(members=(Call(module="1.up"), Call(module="1.act")))
    plan = Plan(
        segments=(
            PlannedSegment(members=(Call(module="0.up"), Call(module="0.act")),
                           save=(SavedOperator(operator="aten.addmm.default", index=0),)),
            PlannedSegment(members=(Call(module="1"),), children=(nested,)),
        )
    )  # fmt: skip
    table = plan_by_stage(profile, plan).set_index("stage")["treatment"]
    assert table["0.up"] == "recomputed, some outputs kept"
    assert table["0.act"] == "recomputed"
    assert table["0.down"] == "kept"
    assert table["1.up"] == table["1.act"] == "recomputed more than once"
    assert table["1.down"] == "recomputed"
    assert table["2.up"] == "kept"
    figure = plan_strip(profile, plan)
    assert "[MiB]" in figure.axes[1].get_ylabel() or "[KiB]" in figure.axes[1].get_ylabel()
    assert "[ms]" in figure.axes[2].get_ylabel()
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(TREATMENTS)
    assert rendered(figure).startswith(b"\x89PNG")


def test_labels_of_deep_modules_are_cut_to_what_tells_them_apart():
    profile = small_comparison().planner.profile
    calls = tuple(replace(call, module=f"model.decoder.layers.{call.module}") for call in profile.calls)
    figure = plan_strip(replace(profile, calls=calls), Plan(segments=()))
    labels = {label.get_text() for label in figure.axes[2].get_xticklabels()}
    assert "model.decoder.layers.0.up" in labels
    calls = tuple(replace(call, module=f"the_whole_model.decoder.layers.{call.module}") for call in profile.calls)
    figure = plan_strip(replace(profile, calls=calls), Plan(segments=()))
    labels = {label.get_text() for label in figure.axes[2].get_xticklabels()}
    assert "…decoder.layers.0.up" in labels


def test_stages_and_their_bytes_add_up():
    comparison = small_comparison()
    profile = comparison.planner.profile
    table = plan_by_stage(profile, comparison.best("60%"))
    assert len(table) == len(profile.stages)
    assert table["forward_ns"].sum() == sum(o.forward_ns for o in profile.operators[: profile.loss_stop])
    assert table["segment"].max() == len(comparison.best("60%").segments) - 1


def test_paths_are_grouped_as_deep_as_there_is_room():
    paths = ["a.0.x", "a.0.y", "a.1.x", "", "b"]
    assert group_paths(paths, 5) == ["a.0.x", "a.0.y", "a.1.x", "(the model's own)", "b"]
    assert group_paths(paths, 4) == ["a.0", "a.0", "a.1", "(the model's own)", "b"]
    assert group_paths(["a.x", "b", "a.x"], 2, runs=True) == ["a", "b", "a"]


def test_the_axis_of_time_ends_where_the_plan_says_that_the_step_does(timelines):
    unplanned, planned = timelines
    comparison = small_comparison()
    plan, profile = comparison.best("60%"), comparison.planner.profile
    assert unplanned.ends_ns[unplanned.backward_stop - 1] == pytest.approx(profile.step_ns)
    assert unplanned.ends_ns[unplanned.loss_stop - 1] == pytest.approx(profile.forward_ns)
    assert planned.ends_ns[planned.backward_stop - 1] == pytest.approx(profile.step_ns * (1 + plan.predicted_overhead))
    for timeline in timelines:
        assert (np.diff(timeline.moments()) > 0).all()


def test_parts_of_the_peak_add_up_to_it():
    profile = small_comparison().planner.profile
    parts = memory_parts(profile)
    assert sum(nbytes for _, nbytes, _ in parts) == profile.peak_bytes()
    assert sum(share for _, _, share in parts) == pytest.approx(1)
    assert {name for name, _, _ in parts} <= set(MEMORY)


def test_what_the_peak_is_said_to_hold_adds_up_to_it_and_is_counted_as_the_table_counts_it():
    comparison = small_comparison()
    for plan in (None, comparison.best("60%")):
        timeline = comparison.planner.timeline(plan)
        words = timeline.peak_words.partition(": ")[2].split(", ")
        shares = {name: int(share[:-1]) for share, name in (entry.split(" ", 1) for entry in words)}
        assert sum(shares.values()) == pytest.approx(100, abs=len(shares) / 2)
        for use, _, share in timeline.parts():
            told = sum(nbytes for name, nbytes in shares.items() if name == use or name.startswith(f"{use} of"))
            assert told <= 100 * share + len(shares) / 2


class Recurrent(nn.Module):
    """What an LSTM's library allocates is seen by the allocator only."""

    def __init__(self):
        super().__init__()
        self.inner, self.blocks = nn.LSTM(32, 32, batch_first=True), nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        return self.blocks(self.inner(x)[0])


def test_what_only_the_allocator_saw_is_in_the_picture_as_it_is_in_the_plan():
    torch.manual_seed(0)
    model, batch = Recurrent(), torch.randn(16, 32, 32)
    planner = Planner.of(model, batch, repeats=1)
    plan = planner.plan("75%", solver="dp")
    timeline = planner.timeline(plan)
    assert timeline.live["allocated or reserved beside tensors"].all()
    assert timeline.peak_bytes == plan.predicted_peak_bytes
    assert timeline.peak_bytes == verify(model, batch, plan, repeats=0).measured_peak_bytes
    assert repr(timeline).endswith(f"peak {format_bytes(timeline.peak_bytes)}>")


# How readers see colours who lack one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1.
SIGHT = {
    "all cones": np.eye(3),
    "no red cones": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "no green cones": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, sight: str) -> np.ndarray:
    """Return a colour in CIELAB, where a distance of some two or three is the least that is seen."""
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(SIGHT[sight] @ linear, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_that_stand_side_by_side_are_told_apart_by_every_reader(sight: str):
    stages = {look.colour for name, look in TREATMENTS.items() if not name.endswith("kept") or name == "kept"}
    for colours in ([look.colour for look in MEMORY.values()], stages, [look.colour for look in SOLVERS.values()]):
        for one, other in combinations(colours, 2):
            assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 11, (one, other)


def test_a_colour_means_one_thing_in_all_pictures():
    memory = {look.colour: name for name, look in MEMORY.items()}
    assert len(memory) == len(MEMORY)
    shared = {memory[look.colour]: name for name, look in TREATMENTS.items() if look.colour in memory}
    assert shared["recomputed activations"] == "recomputed"
    assert TREATMENTS["kept"].colour == MEMORY["activations kept for backward"].colour
    assert not {look.colour for look in SOLVERS.values()} & {*memory, *(look.colour for look in TREATMENTS.values())}
    for kind in ("colour", "marker", "symbol"):
        assert len({getattr(look, kind) for look in SOLVERS.values()}) == len(SOLVERS)
    assert set(SOLVERS) == set(REGISTERED)


def test_values_show_themselves_in_short_in_notebooks_and_as_pictures():
    comparison = small_comparison()
    step, plan = comparison.planner.session.step, comparison.best("60%")
    found = verify(step.model, step.args, plan, loss=step.loss, repeats=1)
    profile = comparison.planner.profile
    for value in (profile, plan, comparison, found):
        assert len(repr(value)) < 200
        assert "<b>" in value._repr_html_()
        assert len(value.to_frame()) > 0
        assert rendered(value.plot(title="As asked")).startswith(b"\x89PNG")
    for value in (comparison.planner, comparison.planner.timeline()):
        assert rendered(draw(value, title="As asked")).startswith(b"\x89PNG")
    assert found.to_frame().loc["peak_bytes", "measured"] == found.measured_peak_bytes
    assert str(profile.parts.parameters) not in repr(profile)
    with pytest.raises(PlanError, match="there is no picture of a str"):
        draw("plan.json")


def test_a_plan_alone_shows_its_peaks_and_what_it_does_to_each_call():
    known = small_comparison().best("60%")
    nested = PlannedSegment(members=(Call(module="1.up"), Call(module="1.act")))
    kept = (SavedOperator(operator="aten.addmm.default", index=0),)
    segments = (
        PlannedSegment(members=(Call(module="0.up"), Call(module="0.act")), save=kept),
        PlannedSegment(members=(Call(module="1"),), children=(nested,)),
    )
    plan = replace(known, segments=segments)
    table = plan_by_call(plan).set_index("module")
    assert list(table.index) == [f"{block}.{part}" for block in range(4) for part in ("up", "act", "down")]
    assert set(table["treatment"][:2]) == {"recomputed, some outputs kept"}
    assert list(table["treatment"][2:6]) == ["kept", *["recomputed more than once"] * 2, "recomputed"]
    assert list(table["segment"]) == [0, 0, -1, 1, 1, 1, *[-1] * 6]
    peaks = texts(plan.plot())
    for count in (plan.unplanned_peak_bytes, plan.predicted_peak_bytes, plan.budget_bytes):
        assert format_bytes(count) in peaks
    frame = plan.to_frame()
    assert list(frame["depth"]) == [0, 0, 1]
    assert tuple(frame.loc[0, ["first", "last", "calls", "saved_operators"]]) == ("0.up", "0.act", 2, 1)
    across = PlannedSegment(members=(Call(module="0.up"), Call(module="0.down")), crosses_operators=True)
    table = plan_by_call(replace(known, segments=(across,)))
    assert list(table["segment"][:4]) == [0, 0, 0, -1]  # In one piece, with what lies between its members.
    by_hand = Plan(segments=segments[:1])
    assert list(plan_by_call(by_hand)["module"]) == ["0.up", "0.act"]
    assert rendered(by_hand.plot()).startswith(b"\x89PNG")


def test_the_planner_draws_a_plan_over_time_and_over_stages():
    comparison = small_comparison()
    plan = comparison.best("60%")
    assert len(comparison.planner.plot(plan).axes) == 2
    assert len(comparison.planner.strip(plan).axes) == 3
