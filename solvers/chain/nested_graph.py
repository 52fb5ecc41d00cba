"""The retention graph with an edge for each trade of memory for time that nesting offers inside a segment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..leaf_peaks import leaf_peaks
from ..problem import Problem, Segment
from ..tables import Tables, tables_of
from .nested_tables import INFINITE, NestedTables, Place
from .retention_graph import RetentionGraph, retention_graph

_MOST_TRADES = 24
_Choice = tuple[Place, int]


class NestedGraph:
    """The retention graph with an edge for each trade that nesting offers."""

    def __init__(
        self,
        problem: Problem,
        room_bytes: int,
        *,
        units: int,
        save_sets: bool,
        deadline: float | None,
        most_ns: int = INFINITE - 1,
    ) -> None:
        """Build the tables, unless those of a close budget are known, and the graph.

        Args:
            problem: The problem.
            room_bytes: Most room that matters: the budget less fixed bytes.
            units: About how many units the room is counted in.
            save_sets: Whether segments may keep some operators' outputs.
            deadline: `time.perf_counter()` at which to give up.
            most_ns: Leave out trades that take longer.

        Raises:
            TooManyStatesError: If nesting cannot be searched.
            TimeoutError: If the deadline passes first.
        """
        tables = tables_of(problem)
        self.most_ns = most_ns
        flat = retention_graph(problem, tables, save_sets=save_sets)
        leaves = leaf_peaks(tables)
        most = min(room_bytes, max(leaves.values(), default=1))
        unit = _round_unit(-(-max(most, 1) // units))
        self.tables = _nested_tables(tables, unit, -(-max(most, 1) // unit), deadline)
        self.exact = unit == 1 and not flat.pinned and tables.least_extra() >= 0
        self.graph = replace(
            flat,
            source=list(flat.source),
            target=list(flat.target),
            added_bytes=list(flat.added_bytes),
            forward_bytes=list(flat.forward_bytes),
            entered_bytes=list(flat.entered_bytes),
            needed_bytes=list(flat.needed_bytes),
            added_ns=list(flat.added_ns),
            items=list(flat.items),
        )
        self.choices: dict[int, _Choice] = {}
        trades: dict[Place, list[tuple[int, int]]] = {}
        for edge, item in enumerate(flat.items):
            if item is None or item.keep:
                continue
            place = (item.start, item.stop)
            if place not in trades:
                trades[place] = self._trades(place, leaves[place])
            for units, cost in trades[place]:
                self._add(flat, edge, place, units, cost)

    def _trades(self, place: Place, leaf_bytes: int) -> list[tuple[int, int]]:
        """Return (units of room, time) pairs of nested insides that need less room than the bare segment."""
        unit = self.tables.unit
        row = self.tables.costs[place][: max(0, -(-leaf_bytes // unit))]
        better = np.flatnonzero((row[1:] < row[:-1]) & (row[1:] <= self.most_ns)) + 1
        if len(row) and row[0] <= self.most_ns:
            better = np.concatenate([np.zeros(1, dtype=np.int64), better])
        if len(better) > _MOST_TRADES:
            self.exact = False
            better = better[np.linspace(0, len(better) - 1, _MOST_TRADES).round().astype(np.int64)]
        return [(int(units), int(row[units])) for units in better]

    def _add(self, flat: RetentionGraph, edge: int, place: Place, units: int, cost: int) -> None:
        graph = self.graph
        self.choices[len(graph.source)] = (place, units)
        graph.source.append(flat.source[edge])
        graph.target.append(flat.target[edge])
        graph.added_bytes.append(flat.added_bytes[edge])
        graph.forward_bytes.append(flat.forward_bytes[edge])
        graph.entered_bytes.append(flat.entered_bytes[edge])
        inner = flat.entered_bytes[edge] + units * self.tables.unit
        graph.needed_bytes.append(max(flat.forward_bytes[edge], inner))
        graph.added_ns.append(cost)
        graph.items.append(flat.items[edge])

    def segments(self, edges: list[int]) -> tuple[Segment, ...]:
        """Return the segments on a path, their insides worked out."""
        found: list[Segment] = []
        for edge in edges:
            item = self.graph.items[edge]
            if item is not None:
                choice = self.choices.get(edge)
                found.append(item if choice is None else self.tables.tree(*choice[0], choice[1]))
        return tuple(found)


def _round_unit(nbytes: int) -> int:
    """Round up to a power of two, or halfway to the next, so that close budgets share their tables."""
    power = 1 << (nbytes - 1).bit_length() if nbytes > 1 else 1
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= nbytes else power


def _nested_tables(tables: Tables, unit: int, units: int, deadline: float | None) -> NestedTables:
    key = ("nested", unit)
    known = tables.graphs.get(key)
    if isinstance(known, NestedTables) and known.size > units:
        return known
    made = NestedTables(tables, unit_bytes=unit, units=units)
    made.build(deadline)
    tables.graphs[key] = made
    return made
