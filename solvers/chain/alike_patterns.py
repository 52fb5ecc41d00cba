"""The patterns of segments that a kind of block may have: those that no other beats in every block of the kind.

A pattern is a path through the retention graph of one block, and the same path in all others. What it adds to the
resident bytes, the most room it needs and the time it takes are known for each block and each node where the block may
be entered; of two patterns that leave by the same nodes, the one that is no better in any of these is dropped.
Blocks whose parts of the graph have the same shape are walked together, as columns of one array.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..alike_space import Part
from ..problem import Kind
from ..tables import IntArray
from .retention_graph import Edge, RetentionGraph

MOST_PATTERNS = 4000
"""A kind with more patterns than these is searched in those that are spread evenly over the time they take."""
_LEAST = -(2**60)
Entry = tuple[int, int]
"""A block, and the node where it is entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Say what every pattern does to one block that is entered at one node; arrays over patterns.

    Attributes:
        target: The node where the block is left.
        added: Bytes added to the resident ones.
        needed: The most room needed above the bytes resident at the entry.
        added_ns: Time of its replays.
    """

    target: IntArray
    added: IntArray
    needed: IntArray
    added_ns: IntArray

    def take(self, chosen: IntArray) -> Runs:
        """Return the same of some patterns."""
        return Runs(
            target=self.target[chosen],
            added=self.added[chosen],
            needed=self.needed[chosen],
            added_ns=self.added_ns[chosen],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """Hold the patterns of a kind.

    Attributes:
        parts: By pattern, its segments.
        runs: What they do, by block and node of entry.
        exact: Whether no pattern was left out that could be better.
    """

    parts: list[tuple[Part, ...]]
    runs: dict[Entry, Runs]
    exact: bool

    def thinned(self, most: int) -> Patterns:
        """Return at most so many patterns, spread evenly over the time they take."""
        if len(self.parts) <= most:
            return self
        order = np.argsort(next(iter(self.runs.values())).added_ns, kind="stable")
        chosen = np.unique(order[np.linspace(0, len(order) - 1, most).round().astype(np.int64)])
        runs = {entry: known.take(chosen) for entry, known in self.runs.items()}
        return Patterns(parts=[self.parts[place] for place in chosen], runs=runs, exact=False)


def patterns_of(graph: RetentionGraph, kind: Kind) -> Patterns:
    """Return the patterns of a kind whose blocks' candidates correspond in a graph."""
    return _Walk(graph, kind).patterns()


@dataclass(frozen=True, slots=True)
class _Step:
    """One thing to do at a boundary: keep what follows up to the next, or run a segment; arrays over entries."""

    part: Part | None
    stop: int
    by_source: list[dict[int, tuple[int, int, int, int]]]
    """By entry: source node to target node, added bytes, needed bytes, time."""


@dataclass(slots=True)
class _Labels:
    """Beginnings of patterns that end at one boundary; arrays (labels, entries)."""

    node: IntArray
    added: IntArray
    needed: IntArray
    added_ns: IntArray
    origin: list[tuple[tuple[Part, ...], Part | None]]

    def take(self, chosen: IntArray) -> _Labels:
        return _Labels(
            self.node[chosen],
            self.added[chosen],
            self.needed[chosen],
            self.added_ns[chosen],
            [self.origin[place] for place in chosen],
        )


class _Walk:
    def __init__(self, graph: RetentionGraph, kind: Kind) -> None:
        self.graph, self.kind = graph, kind
        self.leaving = defaultdict[int, list[Edge]](list)
        for edge in graph.edges:
            self.leaving[edge.source].append(edge)
        self.entries: list[Entry] = [
            (block, node) for block, bounds in enumerate(kind.bounds) for node in graph.nodes[bounds[0]].values()
        ]
        self.position = {node: place for place, nodes in enumerate(graph.nodes) for node in nodes.values()}

    def patterns(self) -> Patterns:
        count = len(self.kind.bounds[0])
        steps = self._steps()
        zeros = np.zeros((1, len(self.entries)), dtype=np.int64)
        starts = np.array([[node for _, node in self.entries]], dtype=np.int64)
        waiting: list[list[_Labels]] = [[] for _ in range(count)]
        waiting[0].append(_Labels(starts, zeros, zeros + _LEAST, zeros, [((), None)]))
        exact = True
        for place in range(count - 1):
            labels, complete = _best(waiting[place])
            exact &= complete
            waiting[place] = []
            done = [parts if part is None else (*parts, part) for parts, part in labels.origin]
            for step in steps[place]:
                waiting[step.stop].append(_after(labels, step, done))
        labels, complete = _best(waiting[-1])
        parts = [parts if part is None else (*parts, part) for parts, part in labels.origin]
        runs = {
            entry: Runs(
                target=labels.node[:, column],
                added=labels.added[:, column],
                needed=labels.needed[:, column],
                added_ns=labels.added_ns[:, column],
            )
            for column, entry in enumerate(self.entries)
        }
        return Patterns(parts=parts, runs=runs, exact=exact and complete)

    def _steps(self) -> list[list[_Step]]:
        """Return what can be done at each boundary in all blocks."""
        count = len(self.kind.bounds[0])
        found: list[list[_Step]] = []
        for place in range(count - 1):
            kept = [self._kept(block, place) for block, _ in self.entries]
            steps = [_Step(None, place + 1, kept)]
            by_part = [self._segments(block, place) for block in range(len(self.kind.bounds))]
            steps += [
                _Step(part, part.last, [by_part[block][part] for block, _ in self.entries])
                for part in by_part[0]
                if all(part in own for own in by_part)
            ]
            found.append(steps)
        return found

    def _kept(self, block: int, place: int) -> dict[int, tuple[int, int, int, int]]:
        """Keep all stages from one boundary to the next."""
        first, last = self.kind.bounds[block][place : place + 2]
        found: dict[int, tuple[int, int, int, int]] = {}
        for source in self.graph.nodes[first].values():
            node, added, needed = source, 0, _LEAST
            for _ in range(first, last):
                edge = next(edge for edge in self.leaving[node] if edge.item is None)
                needed = max(needed, added + edge.needed_bytes)
                node, added = edge.target, added + edge.added_bytes
            found[source] = node, added, needed, 0
        return found

    def _segments(self, block: int, place: int) -> dict[Part, dict[int, tuple[int, int, int, int]]]:
        bounds, operators = self.kind.bounds[block], self.kind.operators[block]
        numbers = {bound: number for number, bound in enumerate(bounds)}
        index_of = {operator: index for index, operator in enumerate(operators)}
        found: dict[Part, dict[int, tuple[int, int, int, int]]] = defaultdict(dict)
        for source in self.graph.nodes[bounds[place]].values():
            for edge in self.leaving[source]:
                if edge.item is not None:
                    keep = tuple(sorted(index_of[operator] for operator in edge.item.keep))
                    part = Part(place, numbers[edge.item.stop], keep)
                    found[part][source] = edge.target, edge.added_bytes, edge.needed_bytes, edge.added_ns
        return found


def _after(labels: _Labels, step: _Step, done: list[tuple[Part, ...]]) -> _Labels:
    """Return labels after a step."""
    node, added, needed, added_ns = (np.empty_like(labels.node) for _ in range(4))
    for column, by_source in enumerate(step.by_source):
        before = labels.node[:, column]
        if len(by_source) == 1 or (before == before[0]).all():
            moves = np.array(by_source[int(before[0])], dtype=np.int64)[None, :]
        else:
            sources = sorted(by_source)
            table = np.array([by_source[source] for source in sources], dtype=np.int64)
            moves = table[np.searchsorted(sources, before)]
        node[:, column] = moves[:, 0]
        added[:, column] = labels.added[:, column] + moves[:, 1]
        needed[:, column] = np.maximum(labels.needed[:, column], labels.added[:, column] + moves[:, 2])
        added_ns[:, column] = labels.added_ns[:, column] + moves[:, 3]
    return _Labels(node, added, needed, added_ns, [(parts, step.part) for parts in done])


def _best(waiting: list[_Labels]) -> tuple[_Labels, bool]:
    """Put labels together that no other beats everywhere; say whether all of these are there."""
    labels = _Labels(
        np.concatenate([part.node for part in waiting]),
        np.concatenate([part.added for part in waiting]),
        np.concatenate([part.needed for part in waiting]),
        np.concatenate([part.added_ns for part in waiting]),
        [origin for part in waiting for origin in part.origin],
    )
    _, group = np.unique(labels.node, axis=0, return_inverse=True)
    # A block's time is the same wherever it is entered, and columns that differ by a constant say the same.
    facts = np.concatenate((labels.added, labels.needed, labels.added_ns), axis=1)
    facts = np.unique(facts - facts.min(axis=0), axis=1)
    keep = np.concatenate([members[_undominated(facts[members])] for members in _members(group.reshape(-1))])
    if len(keep) <= MOST_PATTERNS:
        return labels.take(np.sort(keep)), True
    order = keep[np.argsort(labels.added_ns[keep].sum(axis=1), kind="stable")]
    spread = np.linspace(0, len(order) - 1, MOST_PATTERNS).round().astype(np.int64)
    return labels.take(np.sort(order[spread])), False


def _members(group: npt.NDArray[np.int64]) -> list[IntArray]:
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _undominated(facts: IntArray) -> IntArray:
    """Return the rows that no other row beats or equals in all columns; of equal rows the first."""
    order = np.lexsort(facts.T[::-1])
    found = np.empty(len(order), dtype=np.int64)
    rows = np.empty_like(facts)
    count = 0
    # What beats a row comes before it in this order, so it is enough to compare with those that were kept.
    for place in order:
        row = facts[place]
        if not count or not (rows[:count] <= row).all(axis=1).any():
            rows[count] = row
            found[count] = place
            count += 1
    return found[:count]
