"""The items that may come next on a level, and the room that each needs: shared by flat and nested programmes.

Sets of tensors are bit masks over ranks. At a boundary of a level, the tensors of the level that are still alive or
needed across it are *visible*, and those of them that earlier items hold are *held*. What an item adds and needs
depends on these two sets only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..tables import IntArray, Tables

SaveOptions = dict[tuple[int, int], tuple[tuple[int, ...], ...]]


class LevelEdge(NamedTuple):
    """Describe one item: a kept stage, or a segment with a save set.

    Attributes:
        stop: The boundary it leads to.
        visible: The visible tensors there.
        held: Those of them that are held there.
        added_bytes: What it adds to the resident bytes.
        forward_bytes: Its largest moment while the level runs forward, above the resident bytes before it.
        entered_bytes: A kept stage's backward moment, or what a segment's backward starts on, likewise.
        keep: The save set; None for a kept stage.
    """

    stop: int
    visible: int
    held: int
    added_bytes: int
    forward_bytes: int
    entered_bytes: int
    keep: tuple[int, ...] | None


def bits(mask: int) -> list[int]:
    """Return the ranks that a mask names, ascending."""
    ranks: list[int] = []
    while mask:
        low = mask & -mask
        ranks.append(low.bit_length() - 1)
        mask ^= low
    return ranks


class LevelEdges:
    """List the items that leave a boundary; tensors that outlive the forward are not part of any level."""

    def __init__(self, tables: Tables, options: SaveOptions, pinned: int = 0) -> None:
        """Prepare.

        Args:
            tables: Of the problem.
            options: Save sets by candidate.
            pinned: Tensors that count as held from their producer on.
        """
        count = tables.stage_count
        self.tables = tables
        self.options = options
        self.pinned = pinned
        self.weights: list[int] = [int(weight) for weight in tables.weight]
        self.last: list[int] = [int(last) for last in tables.last_alive]
        self.made = [0] * (count + 1)  # made[stage + 1]: what the stage makes; made[0]: what is there before.
        self.reads = [0] * count
        self.holds = [0] * count
        self.crossing = [0] * (count + 1)
        for rank, weight in enumerate(self.weights):
            if weight:
                self._place(rank)
        self.stops: list[list[int]] = [[] for _ in range(count)]
        for start, stop in sorted(tables.candidates):
            if tables.last_saver[stop] >= start:
                self.stops[start].append(stop)
        self.top_in_use: IntArray = tables.in_use + tables.top_forward
        self._totals: dict[int, int] = {}

    def _place(self, rank: int) -> None:
        bit = 1 << rank
        producer = int(self.tables.producer[rank])
        self.made[producer + 1] |= bit
        for stage in self.tables.consumers[rank]:
            self.reads[stage] |= bit
        for stage in self.tables.holders[rank]:
            self.holds[stage] |= bit
        for position in range(producer + 1, self.last[rank] + 1):
            self.crossing[position] |= bit

    def total(self, mask: int) -> int:
        """Return the bytes of a set of tensors."""
        found = self._totals.get(mask)
        if found is None:
            found = sum(self.weights[rank] for rank in bits(mask))
            self._totals[mask] = found
        return found

    def leave(self, position: int, visible: int, held: int, *, top: bool = False) -> Iterator[LevelEdge]:
        """Yield a kept stage, then every segment that starts here, the shortest first.

        Args:
            position: The boundary.
            visible: The level's tensors that cross it.
            held: Those of them that are held.
            top: Whether the level is the top one: there, what outlives the forward exists from its producer on only.
        """
        stops = self.stops[position]
        in_use = self.top_in_use if top else self.tables.in_use
        alive = in_use[position : (stops[-1] if stops else position + 1)].copy()
        for rank in bits((self.crossing[position] & ~visible) | held):
            alive[: self.last[rank] - position + 1] -= self.weights[rank]
        within = visible | self.made[position + 1]
        crossing = self.crossing[position + 1]
        new = ((self.holds[position] & within) | (self.pinned & self.made[position + 1] & crossing)) & ~held
        added = self.total(new)
        backward = added + int(self.tables.backward_extra[position])
        yield LevelEdge(position + 1, within & crossing, (held | new) & crossing, added, int(alive[0]), backward, None)
        forward_of: dict[int, tuple[IntArray, list[int]]] = {}
        read = made = 0
        stage = position
        for stop in stops:
            while stage < stop:
                read |= self.reads[stage]
                made |= self.made[stage + 1]
                stage += 1
            first_held = read & visible & ~held
            if first_held not in forward_of:
                forward = self._lingering(alive, position, first_held)
                forward_of[first_held] = forward, [int(most) for most in np.maximum.accumulate(forward)]
            forward, most = forward_of[first_held]
            entered = self.total(first_held)
            crossing = self.crossing[stop]
            pinned = self.pinned & made & crossing
            for keep in ((), *self.options.get((position, stop), ())):
                kept = sum(1 << rank for rank in self.tables.outputs(keep))
                new = first_held | kept | pinned
                run = most[stop - position - 1]
                if kept:
                    run = int(self._lingering(forward[: stop - position], position, kept).max())
                seen = (visible | made) & crossing
                yield LevelEdge(stop, seen, (held | new) & crossing, self.total(new), run, entered, keep)

    def _lingering(self, alive: IntArray, position: int, ranks: int) -> IntArray:
        """Add tensors that are held to the moments at which they would be dead."""
        alive = alive.copy()
        for rank in bits(ranks):
            alive[self.last[rank] - position + 1 :] += self.weights[rank]
        return alive
