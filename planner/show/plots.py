"""Pictures of profiles, plans and comparisons. Each function returns a Figure; nothing is shown or saved here.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; hatches and markers repeat what they say,
for print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...profiler.records import Profile
from ..budget import format_bytes
from ..compare import Comparison
from .timeline import Timeline, memory_by_module

BLACK, GREY = "#000000", "#999999"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

_LAYERS = (
    ("parameters", ("parameter",), BLUE, ""),
    ("optimizer state", ("optimizer",), PURPLE, ""),
    ("buffers and batch", ("buffer", "batch"), GREY, ""),
    ("gradients", ("gradient",), GREEN, ""),
    ("activations kept for backward", ("activation",), ORANGE, ""),
    ("recomputed activations", ("recomputed",), VERMILION, "////"),
    ("temporaries", ("temporary",), SKY, ""),
    ("gathered parameters and collectives", ("unsharded", "communication"), YELLOW, "...."),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
_COLOURS = (ORANGE, BLUE, GREEN, VERMILION, PURPLE, SKY, BLACK, GREY)


def memory_over_time(
    unplanned: Timeline, planned: Timeline | None = None, *, budget_bytes: int | None = None, title: str = ""
) -> Figure:
    """Draw the memory of a step by category: unplanned above, planned below, on the same axes.

    Args:
        unplanned: The step without a plan.
        planned: The step with one.
        budget_bytes: Drawn as a line.
        title: Above everything.
    """
    steps = [("without checkpoints", unplanned)] + ([("with the plan", planned)] if planned is not None else [])
    figure = Figure(figsize=(9.5, 1.1 + 3.3 * len(steps)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(steps), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    top = max(budget_bytes or 0, *(timeline.peak_bytes for _, timeline in steps))
    unit, name = byte_unit(top)
    used = [layer for layer in _LAYERS if any(_layer(timeline, layer[1]).any() for _, timeline in steps)]
    for axis, (label, timeline) in zip(axes, steps, strict=True):
        _stack(axis, timeline, used, unit)
        _say_peak(axis, label, timeline, unit)
        axis.set_ylabel(f"memory alive [{name}]")
        if budget_bytes is not None:
            axis.axhline(budget_bytes / unit, color=BLACK, linestyle="--", linewidth=1.2)
            _note(axis, f"budget {format_bytes(budget_bytes)}", 0, budget_bytes / unit, at_left=True)
    axes[0].set_ylim(0, 1.2 * top / unit)
    axes[0].set_xlim(0, max(len(timeline.total()) for _, timeline in steps))
    axes[-1].set_xlabel("operators executed, in order [count]")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title or "Memory over one training step", fontsize=12)
    return figure


def peak_against_overhead(comparison: Comparison, *, title: str = "") -> Figure:
    """Draw every plan of a comparison: peak against added time, each solver's frontier, and the best proven bound.

    Args:
        comparison: What `compare` returned.
        title: Above everything.
    """
    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    axis = figure.subplots()
    unit, name = byte_unit(comparison.unplanned_peak_bytes)
    measured = False
    for index, solver in enumerate(comparison.solvers):
        rows = comparison.feasible().query("solver == @solver")
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        size = 11 - 2 * min(index, 3)
        frontier = comparison.frontier(solver)
        for data, style in ((rows, {"linestyle": "none"}), (frontier, {"linestyle": "-", "linewidth": 1.0})):
            x = data["predicted_peak_bytes"].to_numpy(dtype=float) / unit
            y = 100 * data["predicted_overhead"].to_numpy(dtype=float)
            points: dict[str, Any] = {"marker": marker, "markersize": size, "markerfacecolor": "none"}
            axis.plot(x, y, color=colour, **style, **(points if style["linestyle"] == "none" else {}))
        label = solver if len(rows) else f"{solver}: no plan fits"
        axis.plot([], [], color=colour, marker=marker, markersize=size, markerfacecolor="none", label=label)
        measured = _measured(axis, rows, unit, colour, marker) or measured
    if measured:
        axis.plot([], [], color=BLACK, marker="o", markersize=5, linestyle="none", label="filled: measured")
    _bounds(axis, comparison, unit)
    for number, budget in enumerate(comparison.budgets_bytes):
        label = "budgets" if number == 0 else None
        axis.axvline(budget / unit, color=GREY, linestyle="--", linewidth=1.0, zorder=1, label=label)
    axis.plot(
        comparison.unplanned_peak_bytes / unit,
        0,
        marker="*",
        markersize=13,
        color=BLACK,
        linestyle="none",
        label="no checkpoints",
    )
    axis.set_xlabel(f"peak memory of the step [{name}]")
    axis.set_ylabel("added time [% of the step without checkpoints]")
    axis.margins(0.06)
    lowest, highest = axis.get_ylim()
    highest = max(highest, 1.0)
    axis.set_ylim(min(lowest, -0.03 * highest), highest)
    axis.grid(axis="y", color=GREY, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    axis.set_title(title or "Peak memory against added time (lower left is better)", fontsize=11)
    return figure


def module_memory(profile: Profile, *, rows: int = 20, title: str = "") -> Figure:
    """Draw where the memory is: parameters, gradients and saved activations of each module, as bars.

    Args:
        profile: The recorded step.
        rows: Most bars.
        title: Above everything.
    """
    table = memory_by_module(profile, rows)
    figure = Figure(figsize=(8.5, 1.4 + 0.28 * len(table)), layout="constrained")
    axis = figure.subplots()
    unit, name = byte_unit(int(table[["parameters", "gradients", "saved"]].to_numpy().sum(axis=1).max(initial=1)))
    left = np.zeros(len(table))
    for column, label, colour, hatch in (
        ("parameters", "parameters", BLUE, ""),
        ("gradients", "gradients", GREEN, "...."),
        ("saved", "activations saved for backward", ORANGE, "////"),
    ):
        width = table[column].to_numpy(dtype=float) / unit
        axis.barh(table["module"], width, left=left, color=colour, hatch=hatch, edgecolor="white", label=label)
        left += width
    for position, total in enumerate(left):
        axis.annotate(f" {format_bytes(total * unit)}", (total, position), va="center", fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.12, y=0.02)
    axis.set_xlim(left=0)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(f"memory [{name}]")
    axis.set_ylabel("module, in order of execution")
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    figure.suptitle(title or f"Where the memory of {profile.model} is", fontsize=11)
    return figure


def byte_unit(largest: int) -> tuple[int, str]:
    """Return the unit for an axis up to some bytes: its size and its name."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= size:
            return size, name
    return 1, "B"


def _layer(timeline: Timeline, kinds: Sequence[str]) -> np.ndarray:
    return np.sum([timeline.live[kind] for kind in kinds], axis=0)


def _stack(axis: Axes, timeline: Timeline, layers: Sequence[tuple[str, Sequence[str], str, str]], unit: int) -> None:
    moments = np.arange(len(timeline.total()) + 1)
    below = np.zeros(len(moments))
    for label, kinds, colour, hatch in layers:
        values = _layer(timeline, kinds) / unit
        above = below + np.append(values, values[-1:])
        axis.fill_between(
            moments,
            below,
            above,
            step="post",
            facecolor=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=label,
        )
        below = above
    axis.step(moments, below, where="post", color=BLACK, linewidth=0.6)
    starts = [("forward", 0), ("backward", timeline.loss_stop)]
    if len(moments) - 1 > timeline.backward_stop:
        starts.append(("optimizer's step", timeline.backward_stop))
    for label, start in starts:
        axis.axvline(start, color=BLACK, linewidth=0.8, linestyle=":")
        at_end = label.startswith("optimizer")
        axis.annotate(
            label,
            (start, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if at_end else 3, -3),
            textcoords="offset points",
            va="top",
            ha="right" if at_end else "left",
            fontsize=8,
        )


def _say_peak(axis: Axes, label: str, timeline: Timeline, unit: int) -> None:
    """Mark the peak, and say above the axes where it is and what it is made of."""
    at, height = timeline.peak_at() + 0.5, timeline.peak_bytes / unit
    axis.plot(at, height, marker="v", color=BLACK, markersize=6)
    _note(axis, "peak", at, height)
    words = textwrap.fill(f"peak in the {timeline.peak_words}", 130, break_long_words=False, break_on_hyphens=False)
    axis.set_title(f"{label}: peak {format_bytes(timeline.peak_bytes)}\n{words}", loc="left", fontsize=9)


def _note(axis: Axes, text: str, x: float, y: float, *, at_left: bool = False) -> None:
    """Write a few words above a point, readable whatever is drawn there; `at_left` begins them there."""
    axis.annotate(
        text,
        (x, y),
        xytext=(4 if at_left else 0, 4),
        textcoords="offset points",
        ha="left" if at_left else "center",
        va="bottom",
        fontsize=8,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )


def _measured(axis: Axes, rows: Any, unit: int, colour: str, marker: str) -> bool:
    """Draw what was measured, filled; say whether anything was."""
    measured = rows.dropna(subset=["measured_peak_bytes", "measured_overhead"])
    x, y = measured["measured_peak_bytes"].to_numpy(dtype=float) / unit, 100 * measured["measured_overhead"]
    axis.plot(x, y, color=colour, marker=marker, markersize=5, linestyle="none")
    return len(measured) > 0


def _bounds(axis: Axes, comparison: Comparison, unit: int) -> None:
    """Draw, at each budget, the added time that a solver proved to be needed."""
    bounds = comparison.lower_bounds()
    if bounds:
        axis.plot(
            [budget / unit for budget in bounds],
            [100 * bound for bound in bounds.values()],
            color=BLACK,
            linestyle="none",
            marker="_",
            markersize=14,
            markeredgewidth=2,
            label="proven lower bound, at its budget",
        )
