"""What a plan says of itself in words: its promises in a line, and a line for each group of segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .budget import format_bytes
from .patterns import Entry, line_of
from .segments import PlannedSegment

if TYPE_CHECKING:
    from .plan import Plan


def bytes_words(count: int | None) -> str:
    """Return bytes in words; they may be unknown."""
    return "unknown" if count is None else format_bytes(count)


def percent_range(share: float | None, around: tuple[float, float] | None, *, unknown: str = "unknown") -> str:
    """Return a share and its range in per cent: "18.0 % (15.1 to 22.3)"."""
    if share is None:
        return unknown
    low, high = ("", "") if around is None else (f"{100 * bound:.1f}" for bound in around)
    return f"{100 * share:.1f} %" + ("" if low == high else f" ({low} to {high})")


def rate_words(per_second: float) -> str:
    """Return what is done in a second in plain digits: "31,190", "576", "4.27"."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def headline(plan: Plan) -> str:
    """Return what a plan promises, and how that is known, in a line."""
    each = f" per rank, {plan.ranks} ranks" if plan.ranks > 1 else ""
    added, known = percent_range(plan.predicted_overhead, plan.predicted_overhead_range), plan.circumstances
    if plan.measured_overhead is not None:
        added += f", measured {percent_range(plan.measured_overhead, plan.measured_overhead_range)}"
    return (
        f"plan: {_count(len(plan.segments), 'segment')}, peak {bytes_words(plan.predicted_peak_bytes)}{each} "
        f"(unplanned {bytes_words(plan.unplanned_peak_bytes)}, budget {bytes_words(plan.budget_bytes)}), "
        f"added time {added}; solver {plan.solver or 'none'} {plan.status}; "
        f"bytes {plan.bytes_from}, times {plan.times_from}; {known.words()}"
    )


def _count(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def group_lines(entry: Entry, segment: PlannedSegment, count: int, depth: int) -> list[str]:
    """Return the lines of a group of segments that differ in a number alone, and of those inside.

    Args:
        entry: The group as it is written.
        segment: Its first segment.
        count: How many it has.
        depth: How far the lines are indented.
    """
    facts = [f"{count} segments"] if count > 1 else []
    facts += [f"keeps the outputs of {_count(len(segment.save), 'operator')}"] if segment.save else []
    facts += ["replays to its end"] if not segment.early_stop else []
    facts += [f"restores {_count(len(segment.restored_buffers), 'buffer')}"] if segment.restored_buffers else []
    facts += ["with what the container computes between them"] if segment.crosses_operators else []
    lines = ["  " * depth + line_of(entry) + (f"  ({', '.join(facts)})" if facts else "")]
    inside: list[Entry] = [] if isinstance(entry, str) else entry.get("inside", [])
    for child, nested in zip(inside, segment.children, strict=True):
        lines += group_lines(child, nested, 1, depth + 1)
    return lines
