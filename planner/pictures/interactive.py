"""The same pictures for a page that one can zoom and point at: plotly figures, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ...profiler.records import Profile
from ..budget import format_bytes
from ..plan import Plan
from .frontier import steps_of
from .memory import AXES, byte_unit
from .palette import MEMORY, PALE, SOLVERS, TREATMENTS, Look
from .stages import MODULE_COLUMNS, memory_by_module, plan_by_stage
from .timeline import Timeline

if TYPE_CHECKING:
    from ..compare import Comparison

MOMENTS = 3000
"""Most moments drawn of a timeline; of neighbours that share a place, the one with the most memory is drawn."""
_SHAPES = {"////": "/", "....": ".", "xxxx": "x", "\\\\\\\\": "\\"}


def memory_over_time(steps: Sequence[tuple[str, Timeline]], budget_bytes: int) -> go.Figure:
    """Return the memory of steps by what it is used for, one below the other on the same axes, over time or operators.

    Args:
        steps: Each step's name and timeline.
        budget_bytes: Drawn as a line.
    """
    unit, name = byte_unit(max(budget_bytes, *(timeline.peak_bytes for _, timeline in steps)))
    titles = [f"{label}: peak {format_bytes(timeline.peak_bytes)}" for label, timeline in steps]
    figure: Any = make_subplots(len(steps), 1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=titles)
    used = [use for use in MEMORY if any(timeline.live[use].any() for _, timeline in steps)]
    axes: dict[str, list[list[float]]] = {by: [] for by in AXES}
    for row, (_, timeline) in enumerate(steps, 1):
        chosen = _chosen(timeline)
        for by, drawn in axes.items():
            drawn.append(timeline.moments(by)[chosen].round(4).tolist())
        _add_total(figure, row, timeline, chosen, unit)
        for use in used:
            _add_use(figure, row, timeline, chosen, unit, use)
        figure.add_hline(budget_bytes / unit, line={"dash": "dash", "width": 1.5}, row=row, col=1)
        figure.update_yaxes(title_text=f"alive [{name}]", row=row, col=1)
    figure.update_xaxes(title_text="time [ms]", row=len(steps), col=1)
    figure.update_xaxes(showticklabels=True)
    figure.update_yaxes(matches="y")
    # The page offers these as what the axis may count: by name, a list of places for each step.
    figure.update_layout(hovermode="x unified", height=280 * len(steps) + 60, meta={"axes": axes, "titles": AXES})
    return figure


def _add_total(figure: Any, row: int, timeline: Timeline, chosen: np.ndarray, unit: int) -> None:
    total = np.append(timeline.total(), timeline.total()[-1:])[chosen]
    where = [*timeline.to_frame()[["phase", "module"]].agg(" of ".join, axis=1), "the end"]
    figure.add_scatter(
        x=timeline.moments()[chosen],
        y=total / unit,
        customdata=np.stack([np.array(where)[chosen], [format_bytes(nbytes) for nbytes in total]], axis=-1),
        hovertemplate="<b>%{customdata[0]}</b>: %{customdata[1]}<extra></extra>",
        line={"width": 1, "shape": "hv"},
        showlegend=False,
        meta="ink",
        row=row,
        col=1,
    )


def _add_use(figure: Any, row: int, timeline: Timeline, chosen: np.ndarray, unit: int, use: str) -> None:
    values = np.append(timeline.live[use], timeline.live[use][-1:])[chosen]
    figure.add_scatter(
        x=timeline.moments()[chosen],
        y=values / unit,
        customdata=[format_bytes(nbytes) for nbytes in values],
        hovertemplate="%{customdata}<extra>" + use + "</extra>",
        name=use,
        legendgroup=use,
        showlegend=row == 1,
        stackgroup=str(row),
        line={"width": 0, "shape": "hv", "color": MEMORY[use].colour},
        fillcolor=MEMORY[use].colour,
        fillpattern=_pattern(MEMORY[use]),
        row=row,
        col=1,
    )


def _chosen(timeline: Timeline) -> np.ndarray:
    """Return the moments to draw: all, or the highest of each run of neighbours, the phases' begins and the end."""
    count = len(timeline.modules)
    if count <= MOMENTS:
        return np.arange(count + 1)
    runs = np.array_split(np.arange(count), MOMENTS)
    total = timeline.total()
    highest = [int(run[total[run].argmax()]) for run in runs]
    return np.unique([*highest, *(start for _, start in timeline.phases()), count])


def plan_strip(profile: Profile, plan: Plan) -> go.Figure:
    """Return what a plan does to each stage, above the bytes it saves and the time its forward takes."""
    table = plan_by_stage(profile, plan)
    unit, name = byte_unit(int(table["saved_bytes"].to_numpy().max()))
    figure: Any = make_subplots(3, 1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.16, 0.42, 0.42])
    place = np.arange(len(table)) + 0.5
    _add_stages(figure, table, place, unit)
    for number in sorted({int(number) for number in table["segment"]} - {-1}):
        inside = np.flatnonzero(table["segment"] == number)
        edges = {"x0": int(inside[0]), "x1": int(inside[-1]) + 1, "line": {"width": 1}}
        figure.add_shape(type="rect", y0=0, y1=1, row=1, col=1, **edges)
    names = [str(module) for module in table["module"]]
    step = max(1, len(names) // 16)
    figure.update_xaxes(
        tickvals=place[::step], ticktext=[_short(name) for name in names[::step]], tickangle=-60, row=3, col=1
    )
    figure.update_yaxes(visible=False, row=1, col=1)
    figure.update_yaxes(title_text=f"saved [{name}]", row=2, col=1)
    figure.update_yaxes(title_text="forward [ms]", row=3, col=1)
    figure.update_layout(barmode="overlay", bargap=0, height=620)
    return figure


def _add_stages(figure: Any, table: pd.DataFrame, place: np.ndarray, unit: int) -> None:
    segments = [f"segment {number + 1}" if number >= 0 else "no segment" for number in table["segment"]]
    words = np.stack(
        [
            table["stage"],
            segments,
            [format_bytes(b) for b in table["saved_bytes"]],
            (table["forward_ns"] / 1e6).round(3),
        ],
        axis=-1,
    )
    heights = np.ones(len(table)), table["saved_bytes"] / unit, table["forward_ns"] / 1e6
    for treatment, look in TREATMENTS.items():
        chosen = np.flatnonzero(table["treatment"] == treatment)
        for row, height in enumerate(heights, 1):
            if len(chosen):
                figure.add_bar(
                    x=place[chosen],
                    y=np.asarray(height)[chosen],
                    customdata=words[chosen],
                    hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<br>saves %{customdata[2]}, forward "
                    "%{customdata[3]} ms<extra>" + treatment + "</extra>",
                    name=treatment,
                    legendgroup=treatment,
                    showlegend=row == 1,
                    width=1,
                    marker={"color": look.colour, "pattern": _pattern(look), "line": {"width": 0}},
                    row=row,
                    col=1,
                )


def _short(path: str, longest: int = 18) -> str:
    parts = path.split(".")
    while len(parts) > 1 and len(".".join(parts)) > longest:
        parts = parts[1:]
    return ".".join(parts)


def peak_against_overhead(comparison: Comparison) -> go.Figure:
    """Return every plan of a comparison: peak against added time, each solver's steps and its least peak."""
    unit, name = byte_unit(comparison.unplanned_peak_bytes)
    figure: Any = go.Figure()
    for number, solver in enumerate(comparison.solvers):
        _add_solver(figure, comparison, solver, number, unit, name)
    for budget in comparison.budgets_bytes:
        figure.add_vline(budget / unit, line={"dash": "dash", "width": 1, "color": PALE})
    bounds = comparison.lower_bounds()
    if bounds:
        marker = {"symbol": "line-ew-open", "size": 16, "line": {"width": 3}}
        heights = [100 * bound for bound in bounds.values()]
        label = "proven lower bound, at its budget"
        figure.add_scatter(
            x=[b / unit for b in bounds], y=heights, mode="markers", marker=marker, name=label, meta="ink"
        )
    star = {"symbol": "star", "size": 13}
    top = comparison.unplanned_peak_bytes / unit
    figure.add_scatter(x=[top], y=[0], mode="markers", marker=star, name="no checkpoints", meta="ink", cliponaxis=False)
    figure.update_xaxes(title_text=f"peak of the step [{name}]")
    figure.update_yaxes(title_text="added time [% of the step]", rangemode="tozero")
    figure.update_layout(height=480)
    return figure


def _add_solver(figure: Any, comparison: Comparison, solver: str, number: int, unit: int, unit_name: str) -> None:
    look, steps = SOLVERS[solver], steps_of(comparison, solver)
    rows = comparison.feasible().query("solver == @solver")
    colour = {"color": look.colour}
    if not len(rows):
        figure.add_scatter(x=[None], y=[None], mode="lines", line=colour, name=f"{solver}: no plan fits")
        return
    shown = {"legendgroup": solver, "showlegend": False, "name": solver}
    x, y = steps["peak_bytes"] / unit, 100 * steps["added"]
    figure.add_scatter(x=x, y=y, mode="lines", line={**colour, "shape": "hv", "width": 1.5}, hoverinfo="skip", **shown)
    figure.add_scatter(
        x=rows["predicted_peak_bytes"].astype(float) / unit,
        y=100 * rows["predicted_overhead"],
        customdata=np.stack(
            [[format_bytes(b) for b in rows["budget_bytes"]], rows["segments"], rows["status"]], axis=-1
        ),
        hovertemplate="budget %{customdata[0]}: peak %{x:.1f} " + unit_name + ", %{y:.1f} % more time<br>"
        "%{customdata[1]} segments, %{customdata[2]}<extra>" + solver + "</extra>",
        mode="markers",
        marker={**colour, "symbol": f"{look.symbol}-open", "size": 9 + 4 * number, "line": {"width": 2}},
        name=solver,
        legendgroup=solver,
    )
    _add_measured(figure, rows, look, unit, shown)
    least = comparison.least[solver]
    at = (least.predicted_peak_bytes or 0) / unit
    figure.add_scatter(
        x=[at],
        y=[100 * (least.predicted_overhead or 0.0)],
        mode="markers",
        marker={**colour, "symbol": "line-ns-open", "size": 18 + 8 * number, "line": {"width": 3}},
        hovertemplate=f"least peak reached: {at:.1f} {unit_name}<extra>{solver}</extra>",
        **shown,
    )


def _add_measured(figure: Any, rows: Any, look: Look, unit: int, shown: dict[str, Any]) -> None:
    measured = rows.dropna(subset=["measured_peak_bytes", "measured_overhead"])
    if len(measured):
        figure.add_scatter(
            x=measured["measured_peak_bytes"].astype(float) / unit,
            y=100 * measured["measured_overhead"],
            mode="markers",
            marker={"color": look.colour, "symbol": look.symbol, "size": 8},
            hovertemplate="measured: %{y:.1f} % more time<extra></extra>",
            **shown,
        )


def module_memory(profile: Profile, *, rows: int = 24) -> go.Figure:
    """Return where the memory is: parameters, gradients, optimizer state and kept activations of each module."""
    table = memory_by_module(profile, rows)
    unit, name = byte_unit(int(table[list(MODULE_COLUMNS)].to_numpy().sum(axis=1).max()))
    figure: Any = go.Figure()
    for column, use in MODULE_COLUMNS.items():
        if table[column].to_numpy().any():
            figure.add_bar(
                x=table[column] / unit,
                y=table["module"],
                customdata=[format_bytes(b) for b in table[column]],
                hovertemplate="%{y}: %{customdata}<extra>" + use + "</extra>",
                orientation="h",
                marker={"color": MEMORY[use].colour, "line": {"width": 0}},
                name=use,
            )
    figure.update_xaxes(title_text=f"memory [{name}]")
    figure.update_yaxes(autorange="reversed", dtick=1)
    figure.update_layout(barmode="stack", height=200 + 22 * len(table))
    return figure


def _pattern(look: Look) -> dict[str, Any] | None:
    if not look.hatch:
        return None
    return {"shape": _SHAPES[look.hatch], "fgcolor": look.second, "bgcolor": look.colour, "size": 6, "solidity": 0.25}
