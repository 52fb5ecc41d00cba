"""The picture of a verification: peaks and added time, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..budget import format_bytes
from .memory import byte_unit
from .palette import INK, MEMORY, Look
from .picture import Picture

if TYPE_CHECKING:
    from ..verify import Verification


def promises_kept(verification: Verification, *, title: str = "") -> Figure:
    """Draw the peaks and the added time that were predicted beside those that were measured.

    Args:
        verification: What `verify` returned.
        title: Above everything.
    """
    found = verification
    figure = Picture(figsize=(8, 3), layout="constrained")
    peaks, times = figure.subplots(1, 2, width_ratios=(3, 2))
    kept, recomputed = MEMORY["activations kept for backward"], MEMORY["recomputed activations"]
    bytes_of = (
        ("without checkpoints,\nmeasured", found.unplanned_measured_peak_bytes, kept, True),
        ("with the plan,\npredicted", found.predicted_peak_bytes if found.ranks == 1 else None, recomputed, False),
        ("with the plan,\nmeasured", found.measured_peak_bytes, recomputed, True),
    )
    known = [(label, count, look, filled) for label, count, look, filled in bytes_of if count is not None]
    unit, name = byte_unit(max(count for _, count, *_ in known))
    _bars(peaks, [_Bar(label, count / unit, format_bytes(count), look, filled) for label, count, look, filled in known])
    if found.budget_bytes is not None and found.ranks == 1:
        label = f"budget {format_bytes(found.budget_bytes)}"
        peaks.axvline(found.budget_bytes / unit, color=INK, linestyle="--", label=label)
        peaks.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    peaks.set_xlabel(f"peak memory of the step [{name}]")
    shares = (
        ("predicted", found.predicted_overhead, found.predicted_overhead_range, False),
        ("measured", found.measured_overhead, found.measured_overhead_range, True),
    )
    added = [(label, 100 * share, around, filled) for label, share, around, filled in shares if share is not None]
    bars = [_Bar(label, share, f"{share:+.1f} %", recomputed, filled) for label, share, _, filled in added]
    ends = [(share, share) if around is None else (100 * around[0], 100 * around[1]) for _, share, around, _ in added]
    _bars(times, bars, ends)
    times.set_xlabel("added time [% of the step]" + ("\n(the machine was busy)" if found.doubt else ""))
    verdict = "gradients bitwise equal" if found.exact else "NOT exact"
    figure.suptitle(title or f"The plan against {found.against}: {verdict}", fontsize=11)
    return figure


class _Bar(NamedTuple):
    """A figure as a bar: hollow where it was predicted, filled where it was measured."""

    label: str
    width: float
    words: str
    look: Look
    filled: bool


def _bars(axis: Axes, bars: list[_Bar], ends: Sequence[tuple[float, float]] = ()) -> None:
    """Draw bars with their words behind them, and behind the ends of their ranges where there are any."""
    drawn = axis.barh(
        [bar.label for bar in bars],
        [bar.width for bar in bars],
        color=[bar.look.colour if bar.filled else "none" for bar in bars],
        edgecolor=[bar.look.colour for bar in bars],
        xerr=_reach(bars, ends),
        error_kw={"ecolor": INK, "capsize": 3},
    )
    for words in axis.bar_label(drawn, [bar.words for bar in bars], padding=6, fontsize=8):
        words.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"})
    axis.margins(x=0.4)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)


def _reach(bars: list[_Bar], ends: Sequence[tuple[float, float]]) -> list[list[float]] | None:
    """Return how far ranges reach below and above their bars' ends."""
    if not ends:
        return None
    reached = zip(bars, ends, strict=True)
    below, above = zip(
        *((max(0, bar.width - low), max(0, high - bar.width)) for bar, (low, high) in reached), strict=True
    )
    return [list(below), list(above)]
