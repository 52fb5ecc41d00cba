"""Label setting: the cheapest path of a retention graph that fits a budget, without rounding of memory.

A label is a pair (resident bytes, nanoseconds); at each node only labels that no other beats in both are kept. Two
things keep their number small, and neither gives up exactness. A relaxation, resident bytes rounded down to a grid,
bounds the time still to come from each node; and a beam search gives a plan, so that labels that cannot beat it go.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..tables import IntArray, Tables
from .level_edges import bits
from .retention_graph import RetentionGraph

_LEAST_GRID, _MOST_GRID, _GRID_CELLS = 1024, 16384, 2**24
_BEAM = 24
_INFINITE = np.iinfo(np.int64).max // 4
_MOST_COMPARED_NODES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Give the best path found.

    Attributes:
        edges: Its edges in order.
        added_ns: Its time.
        bound_ns: No path takes less.
        finished: Whether the search ended before its deadline.
    """

    edges: list[int]
    added_ns: int
    bound_ns: int
    finished: bool


class _Labels:
    """Labels of one node, resident bytes ascending and time descending."""

    __slots__ = ("cost", "edge", "origin", "resident")

    def __init__(self, resident: IntArray, cost: IntArray, edge: IntArray, origin: IntArray) -> None:
        self.resident = resident
        self.cost = cost
        self.edge = edge
        self.origin = origin

    def take(self, chosen: npt.NDArray[np.bool_] | IntArray) -> _Labels:
        return _Labels(self.resident[chosen], self.cost[chosen], self.edge[chosen], self.origin[chosen])


class LabelSearch:
    """Search one graph, under any budget."""

    def __init__(self, graph: RetentionGraph, tables: Tables) -> None:
        """Prepare.

        Args:
            graph: The plans.
            tables: Of the same problem.
        """
        self.graph = graph
        self.tables = tables
        self.node_count = graph.node_count()
        columns = [(e.source, e.target, e.added_bytes, e.needed_bytes, e.added_ns) for e in graph.edges]
        table = np.array(columns, dtype=np.int64).reshape(-1, 5)
        self.source, self.target, self.added, self.needed, self.cost = np.ascontiguousarray(table.T)
        self.incoming = grouped(np.arange(len(columns)), self.target, self.node_count)

    def smallest(self, room_bytes: int) -> list[int] | None:
        """Return a path that fits, each node reached with as few resident bytes as can be; None when none fits.

        Fewer resident bytes are never worse for what follows, so one number for each node decides.
        """
        limit = room_bytes - self.needed
        resident = np.full(self.node_count, _INFINITE, dtype=np.int64)
        resident[0] = self.graph.first_bytes
        came_by = np.full(self.node_count, -1, dtype=np.int64)
        for node in range(1, self.node_count):
            edges = self.incoming[node]
            if not len(edges):
                continue
            before = resident[self.source[edges]]
            after = np.where(before <= limit[edges], before + self.added[edges], _INFINITE)
            least = int(after.argmin())
            if after[least] < _INFINITE:
                resident[node] = after[least]
                came_by[node] = edges[least]
        node = self.node_count - 1
        if resident[node] >= _INFINITE:
            return None
        path: list[int] = []
        while node:
            path.append(int(came_by[node]))
            node = int(self.source[path[-1]])
        return path[::-1]

    def cheapest(self, room_bytes: int, *, gap: float, deadline: float | None) -> Path | None:
        """Return the cheapest path, or None when no path fits.

        Args:
            room_bytes: The room that moments have, as `Tables.room_bytes` gives it.
            gap: Stop once the path is proven to be within this share of its own time of the best.
            deadline: `time.perf_counter()` at which to return the best known path.
        """
        smallest = self.smallest(room_bytes)
        return None if smallest is None else _Cheapest(self, room_bytes).path(smallest, gap, deadline)


class _Cheapest:
    """The search for the cheapest path within one room.

    Resident bytes are rounded on a grid of `step` bytes for the relaxation only. A node's offset is added to resident
    bytes before they are rounded down. Rounding may lose up to a step at each edge; a path of kept stages, the most
    frequent by far, would lose one at each of them. So each node's offset is chosen such that what the kept stage
    before it adds comes out as whole steps, and nothing is lost there.
    """

    def __init__(self, search: LabelSearch, room_bytes: int) -> None:
        self.search = search
        self.graph, self.tables, self.node_count = search.graph, search.tables, search.node_count
        self.source, self.target, self.added, self.cost = search.source, search.target, search.added, search.cost
        self.limit = room_bytes - search.needed
        usable = np.flatnonzero(self.limit >= 0)
        most = max(room_bytes, 0)
        self.grid = min(_MOST_GRID, max(_LEAST_GRID, _GRID_CELLS // self.node_count), most + 5)
        self.step = max(1, -(-(most + 1) // (self.grid - 4)))
        self.outgoing = grouped(usable, self.source, self.node_count)
        self.incoming = grouped(usable, self.target, self.node_count)
        self.offsets = self._offsets()

    def path(self, smallest: list[int], gap: float, deadline: float | None) -> Path:
        """Return the cheapest path, where that of the fewest resident bytes is known."""
        best, best_ns = smallest, self._time_of(smallest)
        ahead = self._time_ahead()
        bound = int(ahead[0][self._places(0, np.array([self.graph.first_bytes]))[0]])
        for width in (_BEAM, None):
            if best_ns - bound <= gap * best_ns:
                break
            most_ns = best_ns - 1 if gap == 0.0 else int(best_ns * (1.0 - gap))
            try:
                # The beam is short and always runs: without it a deadline leaves only the plan of least memory.
                until = deadline if width is None else None
                found = self._labels_to_the_end(ahead, most_ns=most_ns, width=width, deadline=until)
            except TimeoutError:
                return Path(edges=best, added_ns=best_ns, bound_ns=bound, finished=False)
            if found is not None:
                best, best_ns = found, self._time_of(found)
            if width is None:
                bound = max(bound, best_ns if found is not None else most_ns + 1)
        return Path(edges=best, added_ns=best_ns, bound_ns=min(bound, best_ns), finished=True)

    def _time_of(self, path: list[int]) -> int:
        return int(self.cost[path].sum())

    def _offsets(self) -> IntArray:
        """Return, for each node, between one and two grid steps that are added to its resident bytes before rounding.

        They are chosen so that what kept stages add comes out as whole steps: only segments then lose by rounding.
        """
        offsets = np.full(self.node_count, 2 * self.step, dtype=np.int64)
        for node in range(1, self.node_count):
            for edge in self.incoming[node]:
                if self.graph.edges[edge].item is None:
                    wanted = offsets[self.source[edge]] - self.added[edge]
                    offsets[node] = self.step + (wanted % self.step or self.step)
                    break
        return offsets

    def _time_ahead(self) -> list[IntArray]:
        """Return, for each node and grid step of resident bytes, a bound on the time still to come.

        Entry k of a node is the least time from it when k steps are resident and every addition is rounded down.
        """
        ahead = [np.full(self.grid, _INFINITE, dtype=np.int64) for _ in range(self.node_count)]
        ahead[-1][:] = 0
        before, after = self.offsets[self.source], self.offsets[self.target]
        shifts = (self.added + after - before) // self.step
        lengths = np.minimum((self.limit + before) // self.step + 1, self.grid)
        shifts[self.target == self.node_count - 1] = 0  # Whatever is resident at the end, no time is to come.
        lengths = np.minimum(lengths, self.grid - shifts)
        for node in range(self.node_count - 2, -1, -1):
            row = ahead[node]
            for edge in self.outgoing[node]:
                length, shift = lengths[edge], shifts[edge]
                if length > 1:
                    part = ahead[self.target[edge]][1 + shift : length + shift] + self.cost[edge]
                    np.minimum(row[1:length], part, out=row[1:length])
        return ahead

    def _places(self, node: int, resident: IntArray) -> IntArray:
        """Return where labels stand on a node's grid."""
        return np.minimum((resident + self.offsets[node]) // self.step, self.grid - 1)

    def _labels_to_the_end(
        self, ahead: list[IntArray], *, most_ns: int, width: int | None, deadline: float | None
    ) -> list[int] | None:
        """Return the cheapest path of at most `most_ns`, or None; with a width, the best of a beam of that width.

        Raises:
            TimeoutError: If the deadline passes first.
        """
        none = np.zeros(1, dtype=np.int64)
        labels: list[_Labels | None] = [None] * self.node_count
        labels[0] = _Labels(none + self.graph.first_bytes, none, none - 1, none)
        for nodes in self.graph.nodes[1:]:
            if deadline is not None and time.perf_counter() > deadline:
                raise TimeoutError
            for node in nodes.values():
                labels[node] = self._arrive(node, labels, ahead[node], most_ns, width)
            if 1 < len(nodes) <= _MOST_COMPARED_NODES:
                self._compare(nodes, labels)
        final = labels[-1]
        if final is None or not len(final.cost):
            return None
        return self._walk_back(labels, int(final.cost.argmin()))

    def _arrive(
        self, node: int, labels: list[_Labels | None], ahead: IntArray, most_ns: int, width: int | None
    ) -> _Labels | None:
        """Collect the labels that reach a node, and keep those that nothing rules out."""
        parts: list[tuple[IntArray, IntArray, int]] = []
        for edge in self.incoming[node]:
            before = labels[self.source[edge]]
            if before is None:
                continue
            count = int(before.resident.searchsorted(self.limit[edge], "right"))
            if count:
                parts.append((before.resident[:count] + self.added[edge], before.cost[:count] + self.cost[edge], edge))
        if not parts:
            return None
        resident = np.concatenate([part[0] for part in parts])
        cost = np.concatenate([part[1] for part in parts])
        sizes = [len(part[0]) for part in parts]
        edge = np.repeat(np.array([part[2] for part in parts], dtype=np.int64), sizes)
        origin = np.concatenate([np.arange(size) for size in sizes])
        total = cost + ahead[self._places(node, resident)]
        chosen = np.flatnonzero(total <= most_ns)
        if not len(chosen):
            return None
        chosen = chosen[np.lexsort((cost[chosen], resident[chosen]))]
        least = np.minimum.accumulate(cost[chosen])
        better = np.ones(len(chosen), dtype=np.bool_)
        better[1:] = cost[chosen][1:] < least[:-1]
        chosen = chosen[better]
        if width is not None and len(chosen) > width:
            chosen = chosen[np.sort(np.argpartition(total[chosen], width)[:width])]
        return _Labels(resident[chosen], cost[chosen], edge[chosen], origin[chosen])

    def _compare(self, nodes: dict[int, int], labels: list[_Labels | None]) -> None:
        """Drop labels that a label of another held set beats even after it has held what the other has already."""
        weights = self.tables.weight
        for held, node in nodes.items():
            for other_held, other in nodes.items():
                mine, theirs = labels[node], labels[other]
                if node == other or mine is None or theirs is None:
                    continue
                lacking = sum(int(weights[rank]) for rank in bits(other_held & ~held))
                place = mine.resident.searchsorted(theirs.resident - lacking, "right") - 1
                beaten = (place >= 0) & (mine.cost[place] <= theirs.cost)
                if beaten.any():
                    labels[other] = theirs.take(~beaten) if not beaten.all() else None

    def _walk_back(self, labels: list[_Labels | None], index: int) -> list[int]:
        path: list[int] = []
        node = self.node_count - 1
        while node:
            here = labels[node]
            assert here is not None
            edge = int(here.edge[index])
            index = int(here.origin[index])
            path.append(edge)
            node = int(self.source[edge])
        return path[::-1]


def grouped(edges: IntArray, keys: IntArray, count: int) -> list[IntArray]:
    """Return, for each key below `count`, the edges that have it."""
    ordered = edges[np.argsort(keys[edges], kind="stable")]
    cuts = np.searchsorted(keys[ordered], np.arange(1, count))
    return np.split(ordered, cuts)
