"""The picture of a plan alone, without the profile it was made from: its peak, and what happens to each call."""

from __future__ import annotations

from collections import Counter

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..budget import format_bytes
from ..plan import Call, Plan
from .memory import byte_unit
from .palette import INK, MEMORY, treatment_of
from .picture import Picture
from .strip import draw_strip, label_modules, legend_of


def plan_outline(plan: Plan, *, title: str = "") -> Figure:
    """Draw a plan's peak beside the unplanned one, above what it does to each call of the forward.

    Every call is as wide as the others: a plan knows no times and bytes of calls. `plan_strip` draws those, from a
    profile.

    Args:
        plan: The plan.
        title: Above everything.
    """
    table = plan_by_call(plan)
    figure = Picture(figsize=(11, 3.6), layout="constrained")
    peaks, strip = figure.subplots(2, 1, height_ratios=(1, 1))
    _draw_peaks(peaks, plan)
    draw_strip(strip, table)
    label_modules(strip, table)
    strip.set_xlabel("calls of modules, in order of execution")
    legend_of(figure, table)
    figure.suptitle(title or repr(plan).strip("<>"), fontsize=11)
    return figure


def plan_by_call(plan: Plan) -> pd.DataFrame:
    """Return what a plan does to each call of a module that calls no other: `module`, `treatment`, `segment`.

    `treatment` is a name in `palette.TREATMENTS`, `segment` the top-level segment's number, -1 outside. The calls are
    those of the plan's fingerprint, or those that segments name where it has none.

    Args:
        plan: The plan.
    """
    calls = _calls(plan)
    stops = [_stop(calls, position) for position in range(len(calls))]
    replays, numbers, keeps = [0] * len(calls), [-1] * len(calls), [False] * len(calls)
    positions = {call: position for position, call in enumerate(calls)}
    for number, top in enumerate(plan.segments):
        for segment in top.walk():
            places = [positions[member] for member in segment.members if member in positions]
            # As `plan_by_stage`: what lies between members is replayed with them.
            for inside in range(places[0], stops[places[-1]]) if places else ():
                replays[inside], numbers[inside] = replays[inside] + 1, number
                keeps[inside] = keeps[inside] or bool(segment.save)
    rows = [
        {
            "module": calls[position].module,
            "treatment": treatment_of(replays=replays[position], keeps=keeps[position]),
            "segment": numbers[position],
        }
        for position, stop in enumerate(stops)
        if stop == position + 1
    ]
    return pd.DataFrame(rows, columns=["module", "treatment", "segment"])


def _calls(plan: Plan) -> list[Call]:
    if plan.fingerprint is None or not plan.fingerprint.calls:
        return [member for top in plan.segments for member in top.members]
    counts: Counter[str] = Counter()
    calls: list[Call] = []
    for path in plan.fingerprint.calls:
        calls.append(Call(module=path, index=counts[path]))
        counts[path] += 1
    return calls


def _stop(calls: list[Call], position: int) -> int:
    """Return one past the last call that a call makes."""
    around = f"{calls[position].module}." if calls[position].module else ""
    stop = position + 1
    while stop < len(calls) and calls[stop].module.startswith(around):
        stop += 1
    return stop


def _draw_peaks(axis: Axes, plan: Plan) -> None:
    kept, recomputed = MEMORY["activations kept for backward"], MEMORY["recomputed activations"]
    peaks = (
        ("without checkpoints", plan.unplanned_peak_bytes, kept.colour),
        ("with the plan", plan.predicted_peak_bytes, recomputed.colour),
    )
    known = [(step, count, colour) for step, count, colour in peaks if count is not None]
    unit, name = byte_unit(max((count for _, count, _ in known), default=1))
    for step, count, colour in known:
        bars = axis.barh(step, count / unit, color=colour, height=0.6)
        (words,) = axis.bar_label(bars, [format_bytes(count)], padding=5, fontsize=8)
        words.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"})
    if plan.budget_bytes is not None:
        axis.axvline(plan.budget_bytes / unit, color=INK, linestyle="--", linewidth=1.2)
        axis.annotate(
            f" budget {format_bytes(plan.budget_bytes)}", (plan.budget_bytes / unit, 0.5), va="center", fontsize=8
        )
    axis.margins(x=0.15)
    axis.set_xlim(left=0)
    axis.invert_yaxis()
    each = "each rank's peak" if plan.ranks > 1 else "peak"
    axis.set_xlabel(f"{each} memory of the step [{name}]")
    axis.tick_params(axis="y", labelsize=8)
