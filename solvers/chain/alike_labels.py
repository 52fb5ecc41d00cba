"""The cheapest plan that treats the blocks of each kind alike: label setting over whole blocks.

A label is (resident bytes, nanoseconds), as in `labels`, and remembers for each kind that is under way which pattern
its blocks have, and whether it is the second one: then the first is forgotten. A step runs a whole block with a
pattern; what lies outside of blocks goes edge by edge. Among labels that remember the same, only those that no other
beats are kept, so the search is exact over all pairs of patterns and all blocks at which they may change.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..problem import Problem, Segment
from ..tables import IntArray
from .alike_patterns import Patterns
from .labels import grouped
from .retention_graph import RetentionGraph

_NONE = -1


@dataclass(slots=True)
class _Labels:
    """Hold the labels at one boundary.

    Attributes:
        node: Where they stand.
        resident: Resident bytes.
        cost: Time so far.
        tags: For each kind -1 where it is not under way, else twice the pattern, and one more if it is the second.
        parent: The boundary and the label that each came from.
        action: What it came by: kind, block and pattern, or -1, -1 and the edge.
    """

    node: IntArray
    resident: IntArray
    cost: IntArray
    tags: IntArray
    parent: IntArray
    action: IntArray

    def take(self, chosen: IntArray) -> _Labels:
        return _Labels(
            self.node[chosen],
            self.resident[chosen],
            self.cost[chosen],
            self.tags[chosen],
            self.parent[chosen],
            self.action[chosen],
        )


@dataclass(frozen=True, slots=True)
class _Block:
    kind: int
    block: int
    stop: int
    is_first: bool
    is_last: bool


class AlikeSearch:
    """Search one graph for plans with blocks alike, under any budget."""

    def __init__(self, problem: Problem, graph: RetentionGraph, patterns: list[Patterns]) -> None:
        """Prepare.

        Args:
            problem: The problem, with its kinds.
            graph: The plans of its candidates.
            patterns: By kind, the patterns to choose from.
        """
        self.kinds, self.graph, self.patterns = problem.kinds, graph, patterns
        self.blocks = {
            bounds[0]: _Block(number, block, bounds[-1], block == 0, block == len(kind.bounds) - 1)
            for number, kind in enumerate(problem.kinds)
            for block, bounds in enumerate(kind.bounds)
        }
        self.position = {node: place for place, nodes in enumerate(graph.nodes) for node in nodes.values()}
        sources = np.array([edge.source for edge in graph.edges], dtype=np.int64)
        self.outgoing = grouped(np.arange(len(graph.edges)), sources, graph.node_count())

    def cheapest(
        self, room_bytes: int, *, most_ns: int | None = None, deadline: float | None = None
    ) -> tuple[Segment, ...] | None:
        """Return the cheapest plan that fits, or None where none does.

        Args:
            room_bytes: The room that moments have, as `Tables.room_bytes` gives it.
            most_ns: Look for plans that take less only.
            deadline: `time.perf_counter()` at which to give up.

        Raises:
            TimeoutError: If the deadline passes first.
        """
        return self._search(room_bytes, most_ns, deadline, timed=True)

    def smallest(self, room_bytes: int) -> tuple[Segment, ...] | None:
        """Return some plan that fits, each state reached with as few resident bytes as can be; None where none does."""
        return self._search(room_bytes, None, None, timed=False)

    def _search(
        self, room_bytes: int, most_ns: int | None, deadline: float | None, *, timed: bool
    ) -> tuple[Segment, ...] | None:
        nodes = self.graph.nodes
        waiting: list[list[_Labels]] = [[] for _ in nodes]
        zero = np.zeros(1, dtype=np.int64)
        start = _Labels(
            zero,
            zero + self.graph.first_bytes,
            zero,
            np.full((1, len(self.kinds)), _NONE),
            np.zeros((1, 2), dtype=np.int64) - 1,
            np.zeros((1, 3), dtype=np.int64) - 1,
        )
        waiting[0].append(start)
        reached: list[_Labels | None] = []
        for position in range(len(nodes)):
            if deadline is not None and time.perf_counter() > deadline:
                raise TimeoutError
            labels = _joined(waiting[position])
            waiting[position] = []
            if labels is not None:
                if most_ns is not None:
                    labels = labels.take(np.flatnonzero(labels.cost < most_ns))
                labels = _best(labels)
            reached.append(labels)
            if labels is None or position == len(nodes) - 1 or not len(labels.node):
                continue
            for stop, after in self._steps(position, labels, room_bytes):
                if not timed:
                    after.cost[:] = 0
                after.parent[:, 0] = position
                waiting[stop].append(after)
        final = reached[-1]
        if final is None or not len(final.node):
            return None
        return self._walked_back(reached, int(final.cost.argmin()))

    def _steps(self, position: int, labels: _Labels, room_bytes: int) -> list[tuple[int, _Labels]]:
        """Return where what may come next leads to, and the labels there."""
        block = self.blocks.get(position)
        found: list[tuple[int, _Labels]] = []
        for node in self.graph.nodes[position].values():
            own = np.flatnonzero(labels.node == node)
            if len(own) and block is not None:
                found.append((block.stop, self._run(block, node, labels, own, room_bytes)))
            elif len(own):
                found += [self._follow(int(number), labels, own, room_bytes) for number in self.outgoing[node]]
        return found

    def _follow(self, number: int, labels: _Labels, own: IntArray, room_bytes: int) -> tuple[int, _Labels]:
        """Take an edge outside of all blocks."""
        edge = self.graph.edges[number]
        fits = own[labels.resident[own] + edge.needed_bytes <= room_bytes]
        none = np.zeros_like(fits)
        return self.position[edge.target], _Labels(
            none + edge.target,
            labels.resident[fits] + edge.added_bytes,
            labels.cost[fits] + edge.added_ns,
            labels.tags[fits],
            np.stack((none, fits), axis=1),
            np.stack((none + _NONE, none + _NONE, none + number), axis=1),
        )

    def _run(self, block: _Block, node: int, labels: _Labels, own: IntArray, room_bytes: int) -> _Labels:
        """Run a block with every pattern that each label may choose."""
        runs = self.patterns[block.kind].runs[block.block, node]
        count = len(runs.added)
        every = np.arange(count)
        tag = labels.tags[own, block.kind]
        if block.is_first:
            parent, pattern = np.repeat(own, count), np.tile(every, len(own))
            after_tag = 2 * pattern
        else:
            # What goes on as before; and what changes, where nothing did: whatever the first pattern was.
            unchanged = own[tag % 2 == 0]
            changing = labels.take(unchanged)
            changing.tags = changing.tags.copy()
            changing.tags[:, block.kind] = _NONE
            pooled = unchanged[_best_places(changing)]
            parent = np.concatenate((own, np.repeat(pooled, count)))
            pattern = np.concatenate((tag // 2, np.tile(every, len(pooled))))
            after_tag = np.concatenate((tag, 2 * np.tile(every, len(pooled)) + 1))
        fits = labels.resident[parent] + runs.needed[pattern] <= room_bytes
        parent, pattern, after_tag = parent[fits], pattern[fits], after_tag[fits]
        none, tags = np.zeros_like(parent), labels.tags[parent]
        tags[:, block.kind] = _NONE if block.is_last else after_tag
        return _Labels(
            runs.target[pattern],
            labels.resident[parent] + runs.added[pattern],
            labels.cost[parent] + runs.added_ns[pattern],
            tags,
            np.stack((none, parent), axis=1),
            np.stack((none + block.kind, none + block.block, pattern), axis=1),
        )

    def _walked_back(self, reached: list[_Labels | None], index: int) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        position = len(reached) - 1
        while position > 0:
            labels = reached[position]
            assert labels is not None
            kind, block, number = (int(value) for value in labels.action[index])
            if kind != _NONE:
                parts = self.patterns[kind].parts[number]
                segments += [part.segment(self.kinds[kind], block) for part in parts]
            elif (item := self.graph.edges[number].item) is not None:
                segments.append(item)
            position, index = (int(value) for value in labels.parent[index])
        return tuple(sorted(segments, key=lambda item: item.start))


def _joined(parts: list[_Labels]) -> _Labels | None:
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return _Labels(
        np.concatenate([part.node for part in parts]),
        np.concatenate([part.resident for part in parts]),
        np.concatenate([part.cost for part in parts]),
        np.concatenate([part.tags for part in parts]),
        np.concatenate([part.parent for part in parts]),
        np.concatenate([part.action for part in parts]),
    )


def _best(labels: _Labels) -> _Labels:
    return labels.take(_best_places(labels))


def _best_places(labels: _Labels) -> IntArray:
    """Return the places of labels that none beats that stands at the same node and remembers the same."""
    if not len(labels.node):
        return np.zeros(0, dtype=np.int64)
    # Of equals the first, so a plan whose pattern does not change is kept before one that does.
    order = np.lexsort((labels.cost, labels.resident, *labels.tags.T, labels.node))
    same = np.ones(len(order), dtype=np.bool_)
    same[0] = False
    for key in (*labels.tags.T, labels.node):
        same[1:] &= key[order][1:] == key[order][:-1]
    group = np.cumsum(~same)
    cost = labels.cost[order]
    span = int(cost.max()) + 1
    # Falling from group to group by more than any time: the running least begins anew in each.
    lowered = cost - group * span
    better = np.ones(len(order), dtype=np.bool_)
    better[1:] = lowered[1:] < np.minimum.accumulate(lowered)[:-1]
    return order[better]
