"""The picture of a batch size search: throughput and peak by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ..budget import format_bytes
from .memory import byte_unit
from .palette import INK, MEMORY, PALE
from .picture import Picture

if TYPE_CHECKING:
    from ..largest_batch import BatchSearch

_KEPT, _PLANNED = MEMORY["activations kept for backward"].colour, MEMORY["recomputed activations"].colour


def throughput_by_batch(search: BatchSearch, *, title: str = "") -> Figure:
    """Draw samples per second, and peaks with and without the plan, against the batch size.

    Args:
        search: What `largest_batch` returned.
        title: Above everything.
    """
    figure = Picture(figsize=(7.5, 6), layout="constrained")
    rates, peaks = figure.subplots(2, 1, sharex=True)
    _draw_rates(rates, search)
    _draw_peaks(peaks, search)
    for axis in (rates, peaks):
        axis.grid(color=PALE, alpha=0.5)
    figure.suptitle(title or "Throughput by batch size under the budget", fontsize=11)
    return figure


def _draw_rates(rates: Axes, search: BatchSearch) -> None:
    fitting, best = [entry for entry in search.tried if entry.fits], search.best
    sizes = [entry.size for entry in fitting]
    rates.plot(sizes, [entry.samples_per_second or 0.0 for entry in fitting], color=_PLANNED, marker="o")
    rates.plot(best.size, best.samples_per_second or 0.0, color=INK, marker="*", markersize=15)
    rates.annotate(
        f"chosen: {best.size}",
        (best.size, best.samples_per_second or 0.0),
        xytext=(0, 12),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
    rates.set_ylim(0, 1.2 * (best.samples_per_second or 1.0))
    rates.set_ylabel("predicted throughput [samples/s]")


def _draw_peaks(peaks: Axes, search: BatchSearch) -> None:
    fitting = [entry for entry in search.tried if entry.fits]
    known = [entry for entry in search.tried if entry.unplanned_peak_bytes is not None]
    unit, name = byte_unit(search.budget_bytes)
    peaks.plot(
        [entry.size for entry in known],
        [(entry.unplanned_peak_bytes or 0) / unit for entry in known],
        color=_KEPT,
        marker="s",
        linestyle=":",
        label="without checkpoints",
    )
    peaks.plot(
        [entry.size for entry in fitting],
        [(entry.predicted_peak_bytes or 0) / unit for entry in fitting],
        color=_PLANNED,
        marker="o",
        label="with the best plan",
    )
    refused = [entry for entry in search.tried if not entry.fits and entry.least_peak_bytes is not None]
    peaks.plot(
        [entry.size for entry in refused],
        [(entry.least_peak_bytes or 0) / unit for entry in refused],
        color=INK,
        marker="x",
        linestyle="none",
        label="least peak reachable, where none fits",
    )
    peaks.axhline(
        search.budget_bytes / unit, color=INK, linestyle="--", label="budget " + format_bytes(search.budget_bytes)
    )
    peaks.set_ylim(bottom=0)
    peaks.set_ylabel(f"peak memory [{name}]")
    peaks.set_xlabel("batch size [samples]")
    peaks.set_xscale("log", base=2)
    peaks.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    peaks.legend(fontsize=8, frameon=False)
