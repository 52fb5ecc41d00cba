"""The pictures show what they say: right numbers, units on every axis, and the peaks of the dry runs."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from matplotlib.figure import Figure
from remat.planner.plan import Call, Plan, PlannedSegment, SavedOperator
from remat.planner.show.plots import memory_over_time, module_memory, peak_against_overhead
from remat.planner.show.strip import plan_strip
from remat.planner.show.timeline import TREATMENTS, group_paths, memory_by_module, plan_by_stage, step_timeline

from .small_step import small_comparison


@pytest.fixture(scope="module")
def timelines():
    comparison = small_comparison()
    return step_timeline(comparison.planner), step_timeline(comparison.planner, comparison.best("60%"))


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
    for kind in ("parameter", "optimizer", "gradient", "activation"):
        assert np.array_equal(unplanned.live[kind][:step], by_kind[kind])


def test_the_planned_timeline_peaks_where_the_plan_promises(timelines):
    _, planned = timelines
    assert planned.peak_bytes == small_comparison().best("60%").predicted_peak_bytes


def test_only_the_planned_step_recomputes_and_only_in_backward(timelines):
    unplanned, planned = timelines
    assert not unplanned.live["recomputed"].any()
    assert planned.live["recomputed"].any()
    assert not planned.live["recomputed"][: planned.loss_stop].any()
    assert planned.live["activation"].max() < unplanned.live["activation"].max()


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
    assert below.get_xlabel().endswith("[count]")
    words = texts(figure)
    assert "budget" in words
    assert "peak in the" in words
    assert "without checkpoints: peak" in words
    assert "with the plan: peak" in words
    assert all("peak in the" in axis.get_title(loc="left") for axis in (above, below))  # beside the curve, not on it
    assert rendered(figure).startswith(b"\x89PNG")


def test_the_frontier_shows_every_plan_and_its_units():
    comparison = small_comparison()
    figure = peak_against_overhead(comparison)
    axis = figure.axes[0]
    assert "[MiB]" in axis.get_xlabel()
    assert "[%" in axis.get_ylabel()
    drawn = {(round(x, 6), round(y, 6)) for line in axis.lines for x, y in zip(*line.get_data(), strict=True)}
    for row in comparison.feasible().to_dict("records"):
        point = (row["predicted_peak_bytes"] / 2**20, 100 * row["predicted_overhead"])
        assert (round(point[0], 6), round(point[1], 6)) in drawn
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"sqrt", "dp", "no checkpoints", "budgets"} <= set(labels)


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
    saved = sum(s.nbytes for s in profile.storages if s.kind == "activation" and s.saved_by)
    assert table["saved"].sum() == saved
    assert rendered(module_memory(profile)).startswith(b"\x89PNG")


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
