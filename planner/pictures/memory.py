"""Pictures of where the memory is: over the time of a step, and by module. They return a Figure and show nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...profiler.records import Profile
from ..budget import format_bytes
from .palette import INK, MEMORY
from .picture import Picture
from .stages import MODULE_COLUMNS, memory_by_module
from .timeline import Timeline

AXES = {"time": "time [ms]", "operators": "operators executed, in order [count]"}
"""What memory can be drawn over, with the words on the axis."""


def memory_over_time(
    unplanned: Timeline,
    planned: Timeline | None = None,
    *,
    budget_bytes: int | None = None,
    by: str = "time",
    title: str = "",
) -> Figure:
    """Draw the memory of a step by what it is used for: unplanned above, planned below, on the same axes.

    Args:
        unplanned: The step without a plan.
        planned: The step with one.
        budget_bytes: Drawn as a line.
        by: What to draw it over: "time" or "operators".
        title: Above everything.
    """
    steps = [unplanned] if planned is None else [unplanned, planned]
    figure = Picture(figsize=(9.5, 1.1 + 3.3 * len(steps)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(steps), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    top = max(budget_bytes or 0, *(timeline.peak_bytes for timeline in steps))
    unit, name = byte_unit(top)
    used = [use for use in MEMORY if any(timeline.live[use].any() for timeline in steps)]
    for axis, timeline in zip(axes, steps, strict=True):
        _stack(axis, timeline, used, unit, by)
        _name_phases(axis, timeline, by)
        _say_peak(axis, timeline, unit, by)
        axis.set_ylabel(f"memory alive [{name}]")
        if budget_bytes is not None:
            axis.axhline(budget_bytes / unit, color=INK, linestyle="--", linewidth=1.2)
            _note(axis, f"budget {format_bytes(budget_bytes)}", 0, budget_bytes / unit, at_left=True)
    axes[0].set_ylim(0, 1.2 * top / unit)
    axes[0].set_xlim(0, max(timeline.moments(by)[-1] for timeline in steps))
    axes[-1].set_xlabel(AXES[by])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title or "Memory over one training step", fontsize=12)
    return figure


def module_memory(profile: Profile, *, rows: int = 20, title: str = "") -> Figure:
    """Draw where the memory is: parameters, gradients, optimizer state and kept activations of each module, as bars.

    Args:
        profile: The recorded step.
        rows: Most bars.
        title: Above everything.
    """
    table = memory_by_module(profile, rows)
    figure = Picture(figsize=(8.5, 1.4 + 0.28 * len(table)), layout="constrained")
    axis = figure.subplots()
    unit, name = byte_unit(int(table[list(MODULE_COLUMNS)].sum(axis=1).max()) if len(table) else 1)
    left = np.zeros(len(table))
    for column, use in MODULE_COLUMNS.items():
        width = table[column].to_numpy(dtype=float) / unit
        if width.any():
            look = MEMORY[use]
            axis.barh(table["module"], width, left=left, color=look.colour, edgecolor="white", label=use)
        left += width
    for position, total in enumerate(left):
        axis.annotate(f" {format_bytes(total * unit)}", (total, position), va="center", fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.12, y=0.02)
    axis.set_xlim(left=0)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel(f"memory [{name}]")
    axis.set_ylabel("module, in order of execution")
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    figure.suptitle(title or f"Where the memory of {profile.model} is", fontsize=11)
    return figure


def byte_unit(largest: int) -> tuple[int, str]:
    """Return the unit for an axis up to some bytes: its size and its name."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= size:
            return size, name
    return 1, "B"


def _stack(axis: Axes, timeline: Timeline, uses: Sequence[str], unit: int, by: str) -> None:
    layers = [np.append(timeline.live[use], timeline.live[use][-1:]) / unit for use in uses]
    looks = [MEMORY[use] for use in uses]
    drawn = axis.stackplot(
        timeline.moments(by), *layers, step="post", labels=uses, colors=[look.colour for look in looks], linewidth=0
    )
    for area, look in zip(drawn, looks, strict=True):
        area.set(hatch=look.hatch, edgecolor=look.second)
    axis.step(timeline.moments(by), np.sum(layers, axis=0), where="post", color=INK, linewidth=0.6)


def _name_phases(axis: Axes, timeline: Timeline, by: str) -> None:
    for label, start in timeline.phases():
        at, at_end = timeline.moments(by)[start], start >= timeline.backward_stop
        axis.axvline(at, color=INK, linewidth=0.8, linestyle=":")
        axis.annotate(
            label,
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if at_end else 3, -3),
            textcoords="offset points",
            va="top",
            ha="right" if at_end else "left",
            fontsize=8,
        )


def _say_peak(axis: Axes, timeline: Timeline, unit: int, by: str) -> None:
    """Mark the peak, and say above the axes where it is and what it is made of."""
    at, height = timeline.moments(by)[timeline.peak_at() :][:2].mean(), timeline.peak_bytes / unit
    axis.plot(at, height, marker="v", color=INK, markersize=6)
    _note(axis, "peak", at, height)
    where = f"peak in the {timeline.peak_words}" if timeline.peak_words else ""
    words = textwrap.fill(where, 130, break_long_words=False, break_on_hyphens=False)
    axis.set_title(
        f"{timeline.name}: peak {format_bytes(timeline.peak_bytes)}\n{words}".strip(), loc="left", fontsize=9
    )


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
