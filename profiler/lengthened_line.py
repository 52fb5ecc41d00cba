"""A line of operators, storages or calls, and the new numbers in it once those of the blocks left out are put in."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .shortened import KEPT, PATTERN, NotAlikeError


class Place(NamedTuple):
    """Where something is: in which sweep, at which block, and which of the things there."""

    sweep: int
    block: int
    offset: int


Target = int | tuple[list[int], int, int]
"""A new number that is the same in all copies; or by block left out where a block's things begin, which of these counts
from there on, and which of the things."""


class Line:
    """A list of things, cut into the blocks' parts in every sweep; copies of the pattern's parts are put into it.

    Args:
        count: How many things there are.
        parts: By sweep and block, the first thing and the one past the last.
        ascending: By sweep, whether it goes in the blocks' order.
        copies: How many blocks are left out.
        dropped: Things that are taken out: what stands for the blocks left out.

    Attributes:
        order: By new number, the old one, or the number of the block left out and the old one of what is copied.
    """

    def __init__(
        self,
        count: int,
        parts: list[list[tuple[int, int]]],
        ascending: list[bool],
        copies: int,
        dropped: frozenset[int] = frozenset(),
    ) -> None:
        self.parts = parts
        self._place: list[Place | None] = [None] * count
        for sweep, blocks in enumerate(parts):
            for block, (start, stop) in enumerate(blocks):
                for position in range(start, stop):
                    self._place[position] = Place(sweep, block, position - start)
            lengths = {blocks[block][1] - blocks[block][0] for block in (PATTERN - 1, PATTERN, PATTERN + 1)}
            if len(lengths) > 1:
                raise NotAlikeError("blocks run different operators")
        self.order: list[int | tuple[int, int]] = []
        self._kept: list[int] = []
        # By sweep: where the block before those left out begins, each of them, and the one behind.
        self._starts: list[list[int]] = [[0] * (copies + 2) for _ in parts]
        inserted: dict[int, list[int]] = {}
        for sweep, blocks in enumerate(parts):
            inserted.setdefault(blocks[PATTERN][1 if ascending[sweep] else 0], []).append(sweep)
        for position in range(count + 1):
            for sweep in inserted.get(position, ()):
                start, stop = parts[sweep][PATTERN]
                for number in range(copies) if ascending[sweep] else reversed(range(copies)):
                    self._starts[sweep][number + 1] = len(self.order)
                    self.order += [(number, thing) for thing in range(start, stop)]
            self._kept.append(len(self.order))
            if position < count and position not in dropped:
                self.order.append(position)
        for starts, blocks in zip(self._starts, parts, strict=True):
            starts[0], starts[-1] = (self._kept[blocks[block][0]] for block in (PATTERN, PATTERN + 1))

    def place(self, position: int) -> Place | None:
        """Return where a thing is; None outside of all blocks."""
        return self._place[position] if 0 <= position < len(self._place) else None

    def kept(self, position: int) -> int:
        """Return the new number of a thing that was there, or of the end; what is below 0 stays."""
        return self._kept[position] if position >= 0 else position

    def start(self, place: Place, copy: int | None) -> int:
        """Return the new number of the first thing of a part, or of its copy in a block left out."""
        if copy is None:
            return self.kept(self.parts[place.sweep][place.block][0])
        return self._starts[place.sweep][copy + 1]

    def relative(self, position: int | None, block: int) -> Hashable:
        """Name a thing as seen from a block: the same name means the same, seen from another one."""
        place = None if position is None else self.place(position)
        if place is None:
            return position
        if self._is_the_end_for(block, place):
            return position
        if abs(place.block - block) > 1:
            raise NotAlikeError("a block refers to what is more than one block away")
        return place.sweep, place.block - block, place.offset

    @staticmethod
    def _is_the_end_for(block: int | None, place: Place) -> bool:
        """Say whether all blocks see a thing alike: the last block's, whose backward begins a replay of all of them."""
        return block is not None and place.block == KEPT - 1 and block <= PATTERN

    def target(self, position: int, block: int) -> Target:
        """Return what a reference in the block that is copied means in every copy: see `resolved`."""
        place = self.place(position)
        if place is None or self._is_the_end_for(block, place):
            return self.kept(position)
        step = place.block - block
        if abs(step) > 1:
            raise NotAlikeError("a block refers to what is more than one block away")
        return self._starts[place.sweep], step + 1, place.offset

    def seen_from(self, position: int, block: int | None) -> int:
        """Return the new number of what something that was run refers to, in a block or, with None, outside."""
        place = self.place(position)
        if place is None or self._is_the_end_for(block, place):
            return self.kept(position)
        if block is None:
            if place.block in (PATTERN - 1, PATTERN):
                raise NotAlikeError("something outside of the blocks uses what is inside of one")
            return self.kept(position)
        if (block > PATTERN) == (place.block > PATTERN):
            return self.kept(position)
        if abs(place.block - block) > 1:
            raise NotAlikeError("a block refers to what is more than one block away")
        # Across those left out: the first of them, or the last.
        return self._starts[place.sweep][-2 if block > PATTERN else 1] + place.offset


def resolved(target: Target, copy: int) -> int:
    """Return the new number that a target means in a copy, by the number of the block left out."""
    if isinstance(target, int):
        return target
    starts, step, offset = target
    return starts[copy + step] + offset
