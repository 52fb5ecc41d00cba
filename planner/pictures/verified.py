"""The picture of a verification: peaks and added time, predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..budget import format_bytes
from .memory import byte_unit
from .palette import INK, MEMORY
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
    bytes_of = {
        "without checkpoints,\nmeasured": found.unplanned_measured_peak_bytes,
        "with the plan,\npredicted": found.predicted_peak_bytes if found.ranks == 1 else None,
        "with the plan,\nmeasured": found.measured_peak_bytes,
    }
    known = {name: count for name, count in bytes_of.items() if count is not None}
    unit, name = byte_unit(max(known.values()))
    _bars(peaks, {label: count / unit for label, count in known.items()}, [format_bytes(c) for c in known.values()])
    if found.budget_bytes is not None and found.ranks == 1:
        label = f"budget {format_bytes(found.budget_bytes)}"
        peaks.axvline(found.budget_bytes / unit, color=INK, linestyle="--", label=label)
        peaks.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    peaks.set_xlabel(f"peak memory of the step [{name}]")
    shares = {"predicted": found.predicted_overhead, "measured": found.measured_overhead}
    added = {label: 100 * share for label, share in shares.items() if share is not None}
    _bars(times, added, [f"{value:+.1f} %" for value in added.values()])
    times.set_xlabel("added time [% of the step]")
    verdict = "gradients bitwise equal" if found.exact else "NOT exact"
    figure.suptitle(title or f"The plan against {found.against}: {verdict}", fontsize=11)
    return figure


def _bars(axis: Axes, widths: dict[str, float], words: list[str]) -> None:
    kept, recomputed = MEMORY["activations kept for backward"], MEMORY["recomputed activations"]
    looks = [kept if label.startswith("without") else recomputed for label in widths]
    hollow = [label.endswith("predicted") for label in widths]
    colours = ["none" if empty else look.colour for look, empty in zip(looks, hollow, strict=True)]
    bars = axis.barh(list(widths), list(widths.values()), color=colours, edgecolor=[look.colour for look in looks])
    axis.bar_label(bars, words, padding=3, fontsize=8)
    axis.margins(x=0.25)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
