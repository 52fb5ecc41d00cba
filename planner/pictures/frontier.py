"""The picture of a comparison: what each solver's plans add in time for the peak they reach."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .memory import byte_unit
from .palette import INK, PALE, SOLVERS, Look
from .picture import Picture

if TYPE_CHECKING:
    from ..compare import Comparison


def steps_of(comparison: Comparison, solver: str) -> pd.DataFrame:
    """Return the corners of a solver's steps: at each peak, in bytes, the added time that is enough from there on.

    One row a plan that none of the solver's others beats, by ascending peak, and a last one for the unplanned step,
    which adds nothing: columns `peak_bytes` and `added`, a share of the step.
    """
    frontier = comparison.frontier(solver)
    peaks = [*frontier["predicted_peak_bytes"].astype(int), comparison.unplanned_peak_bytes]
    added = [*frontier["predicted_overhead"], 0.0]
    return pd.DataFrame({"peak_bytes": peaks, "added": added})


def peak_against_overhead(comparison: Comparison, *, title: str = "") -> Figure:
    """Draw every plan of a comparison: peak against added time, each solver's steps, and the best proven bound.

    A step says what a budget costs: from one plan's peak up to the next one's, no plan of the solver's adds less.
    Plans that are the same point are drawn as rings around each other. Where a solver's steps end at the left, a bar
    marks the least peak it reached at all.

    Args:
        comparison: What `compare` returned.
        title: Above everything.
    """
    figure = Picture(figsize=(7.5, 5.2), layout="constrained")
    axis = figure.subplots()
    unit, name = byte_unit(comparison.unplanned_peak_bytes)
    measured, covered = False, Counter[tuple[int, float]]()
    for number, solver in reversed(list(enumerate(comparison.solvers))):
        look = SOLVERS[solver]
        rows = comparison.feasible().query("solver == @solver")
        _steps(axis, comparison, solver, look, unit, 14 + 6 * number)
        _rings(axis, rows, look, unit, covered)
        measured = _measured(axis, rows, look, unit) or measured
    for solver in comparison.solvers:
        look, fits = SOLVERS[solver], comparison.feasible().query("solver == @solver")
        label = solver if len(fits) else f"{solver}: no plan fits"
        axis.plot([], [], color=look.colour, marker=look.marker, markersize=7, markerfacecolor="none", label=label)
    if measured:
        axis.plot([], [], color=INK, marker="o", markersize=5, linestyle="none", label="filled: measured")
    axis.plot([], [], color=INK, marker="|", markersize=12, linestyle="none", label="least peak reached")
    _bounds(axis, comparison, unit)
    for number, budget in enumerate(comparison.budgets_bytes):
        label = "budgets" if number == 0 else None
        axis.axvline(budget / unit, color=PALE, linestyle="--", linewidth=1.0, zorder=1, label=label)
    top = comparison.unplanned_peak_bytes / unit
    axis.plot(
        top, 0, marker="*", markersize=13, color=INK, linestyle="none", label="no checkpoints", zorder=5, clip_on=False
    )
    axis.set_xlabel(f"peak memory of the step [{name}]")
    axis.set_ylabel("added time [% of the step without checkpoints]")
    axis.margins(0.06)
    lowest, highest = axis.get_ylim()
    highest = max(highest, 1.0)
    axis.set_ylim(min(lowest, -0.03 * highest), highest)
    axis.grid(axis="y", color=PALE, alpha=0.5)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    axis.set_title(title or "Peak memory against added time (lower left is better)", fontsize=11)
    return figure


def _steps(axis: Axes, comparison: Comparison, solver: str, look: Look, unit: int, size: int) -> None:
    """Draw a solver's steps, and the least peak it reached at their left."""
    steps = steps_of(comparison, solver)
    peaks, added = steps["peak_bytes"].to_numpy(dtype=float) / unit, 100 * steps["added"].to_numpy(dtype=float)
    if len(steps) > 1:
        axis.step(peaks, added, where="post", color=look.colour, linewidth=1.2)
    least = comparison.least.get(solver)
    if least is not None and least.segments:
        at, height = (least.predicted_peak_bytes or 0) / unit, 100 * (least.predicted_overhead or 0.0)
        axis.plot(at, height, color=look.colour, marker="|", markersize=size, markeredgewidth=2, linestyle="none")


def _rings(axis: Axes, rows: pd.DataFrame, look: Look, unit: int, covered: Counter[tuple[int, float]]) -> None:
    """Draw plans as open markers, each larger than those already at the same place."""
    points = [(int(row["predicted_peak_bytes"]), float(row["predicted_overhead"])) for row in rows.to_dict("records")]
    for point in dict.fromkeys(points):
        # What lies nearer than a thousandth of a per cent is one place to the eye.
        place = point[0], round(point[1], 5)
        covered[place] += 1
        axis.plot(
            point[0] / unit,
            100 * point[1],
            color=look.colour,
            marker=look.marker,
            markersize=2 + 4 * covered[place],
            markerfacecolor="none",
            markeredgewidth=1.4,
        )


def _measured(axis: Axes, rows: pd.DataFrame, look: Look, unit: int) -> bool:
    """Draw what was measured, filled; say whether anything was."""
    measured = rows.dropna(subset=["measured_peak_bytes", "measured_overhead"])
    x, y = measured["measured_peak_bytes"].to_numpy(dtype=float) / unit, 100 * measured["measured_overhead"]
    axis.plot(x, y, color=look.colour, marker=look.marker, markersize=5, linestyle="none")
    return len(measured) > 0


def _bounds(axis: Axes, comparison: Comparison, unit: int) -> None:
    """Draw, at each budget, the added time that a solver proved to be needed."""
    bounds = comparison.lower_bounds()
    if bounds:
        x, y = np.array(list(bounds)) / unit, 100 * np.array(list(bounds.values()))
        axis.plot(
            x,
            y,
            color=INK,
            linestyle="none",
            marker="_",
            markersize=14,
            markeredgewidth=2,
            label="proven lower bound, at its budget",
        )
