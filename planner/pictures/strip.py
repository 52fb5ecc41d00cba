"""The picture of one plan: a strip over the model's stages, with each stage's bytes and time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...profiler.records import Profile
from ..budget import format_bytes
from ..plan import Plan
from .memory import byte_unit
from .palette import PALE, TREATMENTS
from .picture import Picture
from .stages import group_paths, plan_by_stage


def plan_strip(profile: Profile, plan: Plan, *, title: str = "") -> Figure:
    """Draw what a plan does to each stage, above the bytes each stage saves and the time its forward takes.

    Args:
        profile: The recorded step.
        plan: A plan for it.
        title: Above everything.
    """
    table = plan_by_stage(profile, plan)
    figure = Picture(figsize=(11, 5.6), layout="constrained")
    strip, saved, times = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2.2, 2.2))
    draw_strip(strip, table)
    saved_bytes = table["saved_bytes"].to_numpy(dtype=np.int64)
    unit, name = byte_unit(int(saved_bytes.max()))
    _bars(saved, table, saved_bytes / unit)
    saved.set_ylabel(f"saved for\nbackward [{name}]")
    milliseconds = table["forward_ns"].to_numpy(dtype=float) / 1e6
    _bars(times, table, milliseconds)
    times.set_ylabel("forward time [ms]")
    label_modules(times, table)
    times.set_xlabel("stages, in order of execution, by module")
    legend_of(figure, table)
    figure.suptitle(title or _title(plan), fontsize=11)
    return figure


def _title(plan: Plan) -> str:
    peak = format_bytes(plan.predicted_peak_bytes or 0)
    count = "1 segment" if len(plan.segments) == 1 else f"{len(plan.segments)} segments"
    return f"{plan.solver} plan of {count}: peak {peak}, {plan.predicted_overhead or 0:.1%} added time"


def legend_of(figure: Figure, table: pd.DataFrame) -> None:
    """Say below a figure what the treatments mean that are in a table."""
    figure.legend(
        handles=[
            Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=look.second, linewidth=0, label=name)
            for name, look in TREATMENTS.items()
            if name in set(table["treatment"])
        ],
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )


def draw_strip(axis: Axes, table: pd.DataFrame) -> None:
    """Draw a bar for each row of a table in the look of its `treatment`, and the bounds and numbers of segments."""
    for position, treatment in enumerate(table["treatment"]):
        look = TREATMENTS[str(treatment)]
        axis.bar(
            position, 1, width=1, align="edge", color=look.colour, hatch=look.hatch, edgecolor=look.second, linewidth=0
        )
    segments = table["segment"].to_numpy(dtype=np.int64)
    for position in range(len(segments) + 1):
        before = segments[position - 1] if position else -1
        after = segments[position] if position < len(segments) else -1
        if before != after:
            axis.axvline(position, color="black", linewidth=0.9)
    for number in sorted({int(segment) for segment in segments} - {-1}):
        places = np.flatnonzero(segments == number)
        middle = (places[0] + places[-1] + 1) / 2
        if places[-1] - places[0] + 1 < len(segments) / 90 * len(str(number + 1)):
            continue
        axis.annotate(str(number + 1), (middle, 1), ha="center", va="bottom", fontsize=7)
    axis.set_ylim(0, 1.35)
    axis.set_yticks([])
    axis.set_ylabel("plan\n(segments\nnumbered)", rotation=0, ha="right", va="center", fontsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _bars(axis: Axes, table: pd.DataFrame, heights: np.ndarray) -> None:
    for treatment, look in TREATMENTS.items():
        chosen = np.flatnonzero(table["treatment"].to_numpy() == treatment)
        bars = axis.bar(chosen, heights[chosen], width=1, align="edge", color=look.colour, hatch=look.hatch)
        for bar in bars:
            bar.set(edgecolor=look.second, linewidth=0.3)
    axis.grid(axis="y", color=PALE, alpha=0.5)
    axis.set_axisbelow(True)


def label_modules(axis: Axes, table: pd.DataFrame) -> None:
    """Label where each `module` of a table begins; of labels that would overlap, those of the longest runs stay."""
    groups = group_paths([str(module) for module in table["module"]], 32, runs=True)
    count = len(groups)
    starts = [position for position in range(count) if position == 0 or groups[position] != groups[position - 1]]
    lengths = np.diff([*starts, count])
    labelled: list[int] = []
    for run in sorted(range(len(starts)), key=lambda run: -int(lengths[run])):
        if all(abs(starts[run] - other) >= count / 64 for other in labelled):
            labelled.append(starts[run])
    labelled.sort()
    axis.set_xlim(0, count)
    names = [_tail(groups[position]) for position in labelled]
    axis.set_xticks(labelled, names, rotation=60, ha="right", fontsize=7)
    axis.tick_params(axis="x", length=2)
    for tick in axis.get_xticklabels():
        tick.set_rotation_mode("anchor")


def _tail(path: str, longest: int = 26) -> str:
    """Return a module path, or as many of its last parts as a label has room for."""
    parts = path.split(".")
    while len(parts) > 1 and len(".".join(parts)) > longest:
        parts = parts[1:]
    tail = ".".join(parts)
    return tail if tail == path else f"…{tail}"
