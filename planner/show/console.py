"""What the command line prints: tables for people."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...profiler.cards import TERA, Card
from ...profiler.records import Profile
from ..budget import format_bytes
from ..compare import Comparison, table_cells, table_header
from ..differences import Differences, pair_words
from ..patterns import Entry, line_of
from ..pictures.stages import memory_by_module
from ..pictures.timeline import Timeline, memory_parts
from ..plan import Plan, PlannedSegment
from ..plan_words import percent_range

_COLUMNS, _BLOCKS = 64, " ▁▂▃▄▅▆▇█"


def table_of(title: str, columns: tuple[str, ...], *, numeric: tuple[str, ...] = ()) -> Table:
    """Return an empty table; numeric columns are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", no_wrap=column in numeric)
    return table


def print_profile(console: Console, profile: Profile, *, rows: int = 24) -> None:
    """Print where the memory of a step is, by part and by module, and how the figures were obtained."""
    print_parts(console, profile)
    _print_modules(console, profile, rows)
    console.print(f"bytes: {profile.bytes_from}; times: {profile.times_from}; step time: {profile.step_time_from}")
    for note in profile.notes:
        console.print(f"note: {note}", markup=False)


def print_parts(console: Console, profile: Profile) -> None:
    """Print the peak of a step and what it is made of."""
    peak = profile.peak_bytes()
    of_tensors = " of tensors" if _is_card(profile.device) else ""
    console.print(
        f"{profile.model} on {profile.device}: peak {format_bytes(peak)}{of_tensors}, in the {profile.peak_moment()}; "
        f"{profile.time_words()}",
        markup=False,
    )
    table = table_of("Where the memory is", ("part", "bytes", "of the peak"), numeric=("bytes", "of the peak"))
    for name, nbytes, share in memory_parts(profile):
        table.add_row(name, format_bytes(nbytes), f"{share:.0%}")
    console.print(table)


def print_card(console: Console, card: Card) -> None:
    """Print what was measured of a card."""
    table = table_of(f"A card, {card.source}", ("figure", "reached"), numeric=("reached",))
    table.add_row("memory", format_bytes(card.memory_bytes))
    table.add_row("bandwidth", f"{format_bytes(int(card.bandwidth))}/s")
    for dtype, rate in card.rates.items():
        table.add_row(f"products in {dtype}", f"{rate / TERA:,.3g} TFLOP/s")
    table.add_row("attention, of the rate of products", f"{card.reached.attention:.0%}")
    console.print(table)


def _is_card(device: str) -> bool:
    """Say whether a budget on a device is on what its allocator reserves; a profile counts tensors on any."""
    return device not in ("", "cpu")


def _print_modules(console: Console, profile: Profile, rows: int) -> None:
    names = {name: name for name in ("parameters", "gradients", "optimizer")} | {"saved": "saved activations"}
    found = memory_by_module(profile, rows)
    shown = {column: title for column, title in names.items() if sum(found[column])}
    titles = tuple(shown.values())
    table = table_of("By module, in order of execution", ("module", *titles), numeric=titles)
    for row in found.to_dict("records"):
        counts = (int(row[column]) for column in shown)
        cells = (format_bytes(count) if count else "-" for count in counts)
        table.add_row(Text(str(row["module"])), *cells)
    console.print(table)


def print_plan(console: Console, plan: Plan) -> None:
    """Print what a plan promises and its segments."""
    peak, unplanned = plan.predicted_peak_bytes or 0, plan.unplanned_peak_bytes or 0
    each = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    reserved = " reserved on the card" if _is_card(plan.circumstances.device) else ""
    console.print(
        f"{plan.solver} plan ({plan.status}): peak {format_bytes(peak)} instead of {format_bytes(unplanned)} "
        f"({peak / max(1, unplanned):.0%}){reserved}{each}, budget {format_bytes(plan.budget_bytes or 0)}; "
        f"added time {percent_range(plan.predicted_overhead, plan.predicted_overhead_range)} of the step "
        f"({plan.times_from}); {plan.circumstances.words()}",
        markup=False,
    )
    for entry in plan.batches:
        console.print(f"  {entry}", markup=False)
    if not plan.segments:
        console.print("No segments: the step fits the budget as it is.")
    else:
        table = table_of("Checkpointed segments", ("calls", "segments", "keeps"), numeric=("segments", "keeps"))
        for group in plan.groups():
            _add_segments(table, group.entry, group.segments[0], str(len(group.segments)), 0)
        console.print(table)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)


def _add_segments(table: Table, entry: Entry, segment: PlannedSegment, count: str, depth: int) -> None:
    kept = f"{len(segment.save)} operators" if segment.save else ""
    table.add_row(Text("  " * depth + line_of(entry)), count, kept)
    inside = entry.get("inside", []) if isinstance(entry, dict) else []
    for nested, child in zip(inside, segment.children, strict=True):
        _add_segments(table, nested, child, "", depth + 1)


def print_memory(console: Console, timelines: Mapping[str, Timeline]) -> None:
    """Draw memory over time in a line of characters for each step; a full block is the largest peak of all.

    Args:
        console: Where to print.
        timelines: By what to call it, each step; all are drawn over their own time.
    """
    most = max(timeline.peak_bytes for timeline in timelines.values())
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, timeline in timelines.items():
        bars = np.zeros(_COLUMNS, dtype=np.int64)
        ends = timeline.ends_ns / timeline.ends_ns[-1]
        begins = np.concatenate([[0.0], ends[:-1]])
        for begin, end, nbytes in zip(begins, ends, timeline.total(), strict=True):
            within = slice(int(begin * _COLUMNS), max(int(begin * _COLUMNS) + 1, int(end * _COLUMNS)))
            bars[within] = np.maximum(bars[within], nbytes)
        line = "".join(_BLOCKS[int(nbytes) * (len(_BLOCKS) - 1) // most] for nbytes in bars)
        table.add_row(name, line, f"peak {format_bytes(timeline.peak_bytes)}")
    console.print(table)


def print_differences(console: Console, found: Differences, names: tuple[str, str]) -> None:
    """Print in what two plans differ: each segment that one has and the other has not, and each field.

    Args:
        console: Where to print.
        found: The differences.
        names: What to call the two.
    """
    if not found:
        console.print("no difference")
        return
    table = table_of("Differences", ("what", *names))
    for line in found.only_first:
        table.add_row("segments", Text(line), "")
    for line in found.only_second:
        table.add_row("segments", "", Text(line))
    for field, values in found.fields.items():
        first, second = pair_words(field, values)
        words = field.removesuffix("_bytes").replace("overhead", "added time").replace("_", " ")
        table.add_row(Text(words), Text(first), Text(second))
    console.print(table)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print a comparison as a table, with the reasons where no plan fits."""
    unplanned = format_bytes(comparison.unplanned_peak_bytes)
    header = table_header()
    table = table_of(f"Solvers by budget (unplanned peak {unplanned})", header, numeric=header[1:-1])
    previous = None
    for row in comparison.frame.to_dict("records"):
        if previous not in (None, row["budget_bytes"]):
            table.add_section()
        previous = row["budget_bytes"]
        table.add_row(*table_cells(row))
    console.print(table)
    console.print(
        "added: time of the replays as a share of the step; bound: no plan of the solver's kind adds less; "
        "took: solving and dry runs; ≥: the smallest peak the solver reaches"
    )
    infeasible = comparison.frame.query("status == 'infeasible'").sort_values(by="least_peak_bytes")
    for row in infeasible.drop_duplicates("budget_bytes").to_dict("records"):
        console.print(str(row["note"]), markup=False)
