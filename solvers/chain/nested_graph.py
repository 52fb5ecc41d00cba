"""The retention graph with an edge for each trade of memory for time that nesting offers inside a segment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..leaf_peaks import leaf_peaks
from ..problem import Problem, Segment
from ..simulate import replay_ns
from ..tables import Tables, tables_of
from .nested_tables import INFINITE, NestedTables, Place
from .retention_graph import retention_graph

MOST_TRADES = 24


class NestedGraph:
    """The retention graph with an edge for each trade that nesting offers.

    Where it promises, each trade's room is enough for a tree that takes its time. Where it bounds, no tree in less room
    takes less time, so that no nested plan is cheaper than the cheapest path.
    """

    def __init__(
        self,
        problem: Problem,
        room_bytes: int,
        *,
        units: int,
        save_sets: bool,
        deadline: float | None,
        most_ns: int = INFINITE - 1,
        bounding: bool = False,
    ) -> None:
        """Build the tables, unless those of a close budget are known, and the graph.

        Args:
            problem: The problem.
            room_bytes: Most room that matters, as `Tables.room_bytes` gives it.
            units: About how many units the room is counted in.
            save_sets: Whether segments may keep some operators' outputs.
            deadline: `time.perf_counter()` at which to give up.
            most_ns: Leave out trades that take longer.
            bounding: Whether the graph bounds rather than promises.

        Raises:
            TooManyStatesError: If nesting cannot be searched.
            TimeoutError: If the deadline passes first.
        """
        tables = tables_of(problem)
        flat = retention_graph(problem, tables, save_sets=save_sets)
        leaves = leaf_peaks(tables)
        most = min(room_bytes, max(leaves.values(), default=1))
        unit = _round_unit(-(-max(most, 1) // units))
        self.tables = _nested_tables(tables, unit, -(-max(most, 1) // unit), deadline, bounding=bounding)
        self.exact = unit == 1
        self._most_ns = most_ns
        self._with_a_child = _with_a_child(tables) if bounding else {}
        self._choices: dict[int, tuple[Place, int]] = {}
        edges = list(flat.edges)
        trades: dict[Place, list[tuple[int, int]]] = {}
        for edge in flat.edges:
            if edge.item is None or edge.item.keep:
                continue
            place = (edge.item.start, edge.item.stop)
            if place not in trades:
                trades[place] = self._trades(place, leaves[place])
            for units, cost in trades[place]:
                self._choices[len(edges)] = (place, units)
                # Where room is bounded, so many units stand for anything beyond one unit less.
                inner = max(0, (units - 1) * unit + 1) if bounding else units * unit
                needed = max(edge.forward_bytes, edge.entered_bytes + inner)
                edges.append(edge._replace(needed_bytes=needed, added_ns=cost))
        self.graph = replace(flat, edges=edges)

    def segments(self, path: list[int]) -> tuple[Segment, ...]:
        """Return the segments on a path, their insides worked out; of a graph that promises."""
        found: list[Segment] = []
        for edge in path:
            item = self.graph.edges[edge].item
            if item is not None:
                choice = self._choices.get(edge)
                found.append(item if choice is None else self.tables.tree(*choice[0], choice[1]))
        return tuple(found)

    def _trades(self, place: Place, leaf_bytes: int) -> list[tuple[int, int]]:
        """Return (units of room, time) pairs of nested insides that need less room than the bare segment."""
        unit = self.tables.unit
        row = self.tables.costs[place][: -(-leaf_bytes // unit)]
        if self.tables.bounding:
            # One unit more: in less room than the bare segment's there is at least one replay beside its own.
            row = np.maximum(self.tables.costs[place][: -(-leaf_bytes // unit) + 1], self._with_a_child[place])
        better = np.flatnonzero((row[1:] < row[:-1]) & (row[1:] <= self._most_ns)) + 1
        if len(row) and row[0] <= self._most_ns:
            better = np.concatenate([np.zeros(1, dtype=np.int64), better])
        if len(better) <= MOST_TRADES:
            return [(int(units), int(row[units])) for units in better]
        self.exact = False
        places = np.linspace(0, len(better) - 1, MOST_TRADES).round().astype(np.int64)
        if not self.tables.bounding:
            return [(int(units), int(row[units])) for units in better[places]]
        # What lies between two of them is bounded by the room of the first and the time of the last.
        ends = np.append(places[1:] - 1, len(better) - 1)
        return [(int(better[a]), int(row[better[b]])) for a, b in zip(places, ends, strict=True)]


def _with_a_child(tables: Tables) -> dict[Place, int]:
    """Return, for each candidate that saves something, the time of its replay and of the cheapest one inside it."""
    count = tables.stage_count
    own = np.full((count + 1, count + 1), INFINITE, dtype=np.int64)
    for start, stop in tables.candidates:
        if tables.last_saver[stop] >= start:
            own[start, stop] = replay_ns(tables, start, stop, ())
    # within[a, b]: the least of all that start at `a` or later and stop at `b` or earlier.
    within = np.minimum.accumulate(np.minimum.accumulate(own[::-1], axis=0)[::-1], axis=1)
    return {
        (start, stop): int(own[start, stop] + min(within[start + 1, stop], within[start, stop - 1], INFINITE))
        for start, stop in tables.candidates
        if tables.last_saver[stop] >= start
    }


def _round_unit(nbytes: int) -> int:
    """Round up to a power of two, or halfway to the next, so that close budgets share their tables."""
    power = 1 << (nbytes - 1).bit_length() if nbytes > 1 else 1
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= nbytes else power


def _nested_tables(tables: Tables, unit: int, units: int, deadline: float | None, *, bounding: bool) -> NestedTables:
    key = ("nested", unit, bounding)
    known = tables.graphs.get(key)
    if isinstance(known, NestedTables) and known.size > units:
        return known
    made = NestedTables(tables, unit_bytes=unit, units=units, bounding=bounding)
    made.build(deadline)
    tables.graphs[key] = made
    return made
