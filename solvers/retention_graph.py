"""All one-level plans of a problem as paths of a graph, exact for shared and skip tensors.

A node is a boundary between stages together with the set of tensors that are alive or needed across it and already
held; an edge is an item: a kept stage, or a segment with one of its save sets. An edge adds bytes to what is
resident, adds time, and needs room above what is resident where it starts. A plan fits a budget when no edge of its
path needs more than is left. The sets are small in practice (one to six tensors travel across a boundary); where
they are not, the tensors that travel farthest are *pinned*: counted as held from their producer on, whoever holds
them. That can only overstate a plan's memory, and it is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .problem import Problem, Segment
from .save_options import save_options
from .simulate import replay_ns, segment_peak
from .tables import Tables

MOST_NODES_AT_A_BOUNDARY = 96


@dataclass(slots=True, kw_only=True)
class RetentionGraph:
    """Hold nodes in order of position, and edges as parallel lists.

    Attributes:
        nodes: The nodes of each boundary: held set, as bits over tensor ranks, to node number.
        source: Where each edge starts; edges are grouped by it, ascending.
        target: Where each edge ends.
        added_bytes: What it adds to the resident bytes.
        needed_bytes: Its largest moment, above fixed bytes and the resident bytes where it starts.
        added_ns: Time of its replay.
        items: The segment, or None for a kept stage.
        pinned: The tensors counted as held from their producer on.
        first_bytes: Resident bytes at the first node: pinned tensors that exist before the first stage.
    """

    nodes: list[dict[int, int]]
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)
    needed_bytes: list[int] = field(default_factory=list)
    added_ns: list[int] = field(default_factory=list)
    items: list[Segment | None] = field(default_factory=list)
    pinned: int = 0
    first_bytes: int = 0

    def node_count(self) -> int:
        """Return the number of nodes of all boundaries."""
        return sum(len(nodes) for nodes in self.nodes)


class _TooManySetsError(Exception):
    def __init__(self, position: int, sets: list[int]) -> None:
        super().__init__(position, sets)
        self.position = position
        self.sets = sets


def retention_graph(problem: Problem, tables: Tables, *, save_sets: bool) -> RetentionGraph:
    """Return the graph of all one-level plans; it does not depend on the budget and is kept with the tables."""
    key = ("graph", save_sets)
    graph = tables.graphs.get(key)
    if graph is None:
        options = save_options(problem) if save_sets else {}
        pinned = 0
        while graph is None:
            try:
                graph = _Builder(tables, options, pinned).build()
            except _TooManySetsError as error:
                pinned |= _farthest(tables, error)
        tables.graphs[key] = graph
    assert isinstance(graph, RetentionGraph)
    return graph


def _farthest(tables: Tables, error: _TooManySetsError) -> int:
    """Choose the quarter of the tensors that differ between the held sets which stay alive longest."""
    union = intersection = error.sets[0]
    for held in error.sets:
        union |= held
        intersection &= held
    ranks = sorted(bits(union & ~intersection), key=lambda rank: -int(tables.last_alive[rank]))
    return sum(1 << rank for rank in ranks[: max(1, len(ranks) // 4)])


def bits(mask: int) -> list[int]:
    """Return the ranks that a mask names, ascending."""
    ranks: list[int] = []
    while mask:
        low = mask & -mask
        ranks.append(low.bit_length() - 1)
        mask ^= low
    return ranks


class _Builder:
    """Build the graph boundary by boundary, node by node."""

    def __init__(
        self, tables: Tables, options: dict[tuple[int, int], tuple[tuple[int, ...], ...]], pinned: int
    ) -> None:
        self.tables = tables
        self.options = options
        self.count = tables.stage_count
        self.weights: list[int] = [int(weight) for weight in tables.weight]
        self.last: list[int] = [int(last) for last in tables.last_alive]
        self.totals: dict[int, int] = {}
        count = self.count
        self.made = [0] * (count + 1)  # made[stage + 1]: bits of what the stage makes.
        self.reads = [0] * count
        self.holds = [0] * count
        self.crossing = [0] * (count + 1)
        for rank, weight in enumerate(self.weights):
            if not weight:
                continue
            bit = 1 << rank
            self.made[int(tables.producer[rank]) + 1] |= bit
            for stage in tables.consumers[rank]:
                self.reads[stage] |= bit
            for stage in tables.holders[rank]:
                self.holds[stage] |= bit
            for position in range(int(tables.producer[rank]) + 1, self.last[rank] + 1):
                self.crossing[position] |= bit
        self.stops: list[list[int]] = [[] for _ in range(count)]
        for start, stop in sorted(tables.candidates):
            if tables.last_saver[stop] >= start:
                self.stops[start].append(stop)
        birth = np.bincount(np.maximum(tables.producer, 0), weights=tables.weight, minlength=count + 1)
        death = np.bincount(np.minimum(tables.last_alive, count - 1) + 1, weights=tables.weight, minlength=count + 1)
        alive = np.cumsum(birth[: count + 1] - death[: count + 1])[:count].astype(np.int64)
        self.alive = alive + tables.outliving_forward + tables.forward_extra
        first = pinned & self.made[0]
        self.graph = RetentionGraph(
            nodes=[{first & self.crossing[0]: 0}, *({} for _ in range(count))],
            pinned=pinned,
            first_bytes=self.total(first),
        )
        self.next_node = 1

    def total(self, mask: int) -> int:
        found = self.totals.get(mask)
        if found is None:
            found = sum(self.weights[rank] for rank in bits(mask))
            self.totals[mask] = found
        return found

    def build(self) -> RetentionGraph:
        """Return the finished graph.

        Raises:
            _TooManySetsError: If a boundary has more held sets than the limit.
        """
        for position in range(self.count):
            nodes = self.graph.nodes[position]
            if len(nodes) > MOST_NODES_AT_A_BOUNDARY:
                raise _TooManySetsError(position, list(nodes))
            for held, node in nodes.items():
                self._leave(position, held, node)
        return self._numbered()

    def _numbered(self) -> RetentionGraph:
        """Renumber the nodes by position: they were numbered as they were met."""
        graph = self.graph
        number: dict[int, int] = {}
        for nodes in graph.nodes:
            for held, node in nodes.items():
                number[node] = len(number)
                nodes[held] = number[node]
        graph.source = [number[node] for node in graph.source]
        graph.target = [number[node] for node in graph.target]
        return graph

    def _leave(self, position: int, held: int, node: int) -> None:
        """Add every edge that leaves a node."""
        tables = self.tables
        end = self.stops[position][-1] if self.stops[position] else position + 1
        alive = self.alive[position:end].copy()
        for rank in bits(held):
            alive[: self.last[rank] - position + 1] -= self.weights[rank]

        pinned = self.graph.pinned
        fixed = pinned & self.made[position + 1] & self.crossing[position + 1]
        new = (self.holds[position] | fixed) & ~held
        added = self.total(new)
        backward = added + tables.outliving_bytes + int(tables.backward_extra[position])
        self._add(position + 1, held | new, node, added, max(int(alive[0]), backward), 0, None)

        forward_of: dict[int, tuple[np.ndarray, list[int]]] = {}
        exists = 0
        inputs = 0
        made_inside = 0
        stage = position
        for stop in self.stops[position]:
            while stage < stop:
                inputs |= self.reads[stage] & self.crossing[position]
                made_inside |= self.made[stage + 1]
                stage += 1
            exists = inputs & ~held
            if exists not in forward_of:
                forward = alive.copy()
                for rank in bits(exists):
                    forward[self.last[rank] - position + 1 :] += self.weights[rank]
                forward_of[exists] = forward, [int(most) for most in np.maximum.accumulate(forward)]
            forward, most = forward_of[exists]
            entered = self.total(exists) + tables.outliving_bytes
            for keep in ((), *self.options.get((position, stop), ())):
                segment = Segment(start=position, stop=stop, keep=keep)
                kept = sum(1 << rank for rank in tables.outputs(keep))
                new = exists | kept | (pinned & made_inside & self.crossing[stop])
                run = (
                    most[stop - position - 1] if not kept else self._forward(forward[: stop - position], position, kept)
                )
                needed = max(run, entered + segment_peak(tables, segment).nbytes)
                cost = replay_ns(tables, position, stop, keep)
                self._add(stop, held | new, node, self.total(new), needed, cost, segment)

    def _forward(self, forward: np.ndarray, position: int, kept: int) -> int:
        """Return the largest forward moment of a segment that keeps tensors it would have freed."""
        forward = forward.copy()
        for rank in bits(kept):
            forward[self.last[rank] - position + 1 :] += self.weights[rank]
        return int(forward.max())

    def _add(
        self, stop: int, held: int, node: int, added: int, needed: int, cost: int, segment: Segment | None
    ) -> None:
        nodes = self.graph.nodes[stop]
        held &= self.crossing[stop]
        target = nodes.get(held)
        if target is None:
            target = nodes[held] = self.next_node
            self.next_node += 1
            if len(nodes) > 4 * MOST_NODES_AT_A_BOUNDARY:
                raise _TooManySetsError(stop, list(nodes))
        graph = self.graph
        graph.source.append(node)
        graph.target.append(target)
        graph.added_bytes.append(added)
        graph.needed_bytes.append(needed)
        graph.added_ns.append(cost)
        graph.items.append(segment)
