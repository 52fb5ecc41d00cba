"""All one-level plans of a problem as paths of a graph, exact for shared and skip tensors.

A node is a boundary between stages together with the set of tensors that are alive or needed across it and already
held; an edge is an item: a kept stage, or a segment with one of its save sets. An edge adds bytes to what is
resident, adds time, and needs room above what is resident where it starts. A plan fits a budget when no edge of its
path needs more than is left. The sets are small in practice (one to six tensors travel across a boundary); where
they are not, the tensors that travel farthest are *pinned*: counted as held from their producer on, whoever holds
them. That can only overstate a plan's memory, and it is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..leaf_peaks import leaf_peaks
from ..problem import Problem, Segment
from ..simulate import replay_ns, segment_peak
from ..tables import Tables
from .level_edges import LevelEdge, LevelEdges, SaveOptions, bits
from .save_options import save_options

MOST_NODES_AT_A_BOUNDARY = 96
PINNED_NOTE = "{count} tensors that travel far are counted as held from their producer on; cheaper plans may exist"


class Edge(NamedTuple):
    """Describe one item between two nodes: a kept stage, or a segment.

    Attributes:
        source: The node where it starts.
        target: The node where it ends.
        added_bytes: What it adds to the resident bytes.
        forward_bytes: Its largest forward moment, above fixed bytes and the resident bytes where it starts.
        entered_bytes: A segment: what its backward starts on, likewise. A kept stage: its backward moment.
        needed_bytes: Its largest moment of all, likewise.
        added_ns: Time of its replay.
        item: The segment, or None for a kept stage.
    """

    source: int
    target: int
    added_bytes: int
    forward_bytes: int
    entered_bytes: int
    needed_bytes: int
    added_ns: int
    item: Segment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionGraph:
    """Hold nodes in order of position, and edges.

    Attributes:
        nodes: The nodes of each boundary: held set, as bits over tensor ranks, to node number.
        edges: The edges, by where they start.
        pinned: The tensors counted as held from their producer on.
        first_bytes: Resident bytes at the first node: pinned tensors that exist before the first stage.
    """

    nodes: list[dict[int, int]]
    edges: list[Edge]
    pinned: int
    first_bytes: int

    def node_count(self) -> int:
        """Return the number of nodes of all boundaries."""
        return sum(len(nodes) for nodes in self.nodes)

    def segments(self, path: list[int]) -> tuple[Segment, ...]:
        """Return the segments on a path."""
        return tuple(item for edge in path if (item := self.edges[edge].item) is not None)


class TooManySetsError(Exception):
    """Say that a boundary has more held sets than are searched."""

    def __init__(self, sets: list[int]) -> None:
        super().__init__(sets)
        self.sets = sets


def retention_graph(problem: Problem, tables: Tables, *, save_sets: bool) -> RetentionGraph:
    """Return the graph of all one-level plans; it does not depend on the budget and is kept with the tables."""
    key = ("graph", save_sets)
    graph = tables.graphs.get(key)
    if graph is None:
        graph = tables.graphs[key] = graph_of(tables, save_options(problem) if save_sets else {})
    assert isinstance(graph, RetentionGraph)
    return graph


def graph_of(tables: Tables, options: SaveOptions) -> RetentionGraph:
    """Return the graph of all one-level plans with some save sets, tensors pinned where it would be too large."""
    pinned = 0
    while True:
        try:
            return build_graph(tables, options, pinned)
        except TooManySetsError as error:
            pinned |= _farthest(tables, error)


def _farthest(tables: Tables, error: TooManySetsError) -> int:
    """Choose the quarter of the tensors that differ between the held sets which stay alive longest."""
    union = intersection = error.sets[0]
    for held in error.sets:
        union |= held
        intersection &= held
    ranks = sorted(bits(union & ~intersection), key=lambda rank: -int(tables.last_alive[rank]))
    return sum(1 << rank for rank in ranks[: max(1, len(ranks) // 4)])


def build_graph(tables: Tables, options: SaveOptions, pinned: int) -> RetentionGraph:
    """Build the graph boundary by boundary, node by node.

    Raises:
        TooManySetsError: If a boundary has more held sets than the limit.
    """
    count = tables.stage_count
    edges = LevelEdges(tables, options, pinned)
    first = pinned & edges.made[0] & edges.crossing[0]
    all_nodes: list[dict[int, int]] = [{first: 0}, *({} for _ in range(count))]
    found: list[Edge] = []
    met = 1
    for position in range(count):
        nodes = all_nodes[position]
        if len(nodes) > MOST_NODES_AT_A_BOUNDARY:
            raise TooManySetsError(list(nodes))
        for held, node in nodes.items():
            for edge in edges.leave(position, edges.crossing[position], held, top=True):
                targets = all_nodes[edge.stop]
                if edge.held not in targets:
                    targets[edge.held] = met
                    met += 1
                    if len(targets) > 4 * MOST_NODES_AT_A_BOUNDARY:
                        raise TooManySetsError(list(targets))
                found.append(_priced(tables, node, targets[edge.held], position, edge))
    number = {node: place for place, node in enumerate(node for nodes in all_nodes for node in nodes.values())}
    return RetentionGraph(
        # By position; they were numbered as they were met.
        nodes=[{held: number[node] for held, node in nodes.items()} for nodes in all_nodes],
        edges=[edge._replace(source=number[edge.source], target=number[edge.target]) for edge in found],
        pinned=pinned,
        first_bytes=edges.total(first),
    )


def _priced(tables: Tables, source: int, target: int, position: int, edge: LevelEdge) -> Edge:
    """Say what an edge adds and needs at the top level."""
    segment = None if edge.keep is None else Segment(start=position, stop=edge.stop, keep=edge.keep)
    inner = 0
    if segment is not None:
        inner = segment_peak(tables, segment).nbytes if segment.keep else leaf_peaks(tables)[position, edge.stop]
    entered = edge.entered_bytes + tables.outliving_bytes
    return Edge(
        source=source,
        target=target,
        added_bytes=edge.added_bytes,
        forward_bytes=edge.forward_bytes,
        entered_bytes=entered,
        needed_bytes=max(edge.forward_bytes, entered + inner),
        added_ns=replay_ns(tables, position, edge.stop, segment.keep) if segment else 0,
        item=segment,
    )
