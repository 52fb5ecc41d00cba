"""Cut a step into sweeps, and each of these into blocks: which operators, storages and calls are whose.

A sweep goes along a run of blocks once, in their order or against it: forward, a replay, backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise

from .lengthened_line import Line
from .shortened import KEPT, PATTERN, NotAlikeError
from .step_record import ModuleCall

Parts = list[list[tuple[int, int]]]
"""By sweep and block, the first thing and the one past the last."""


def parts_of_operators(blocks: Sequence[int | None]) -> tuple[Parts, list[bool]]:
    """Cut the operators.

    Args:
        blocks: By operator, its block; None outside of all.

    Returns:
        The parts, and by sweep whether it goes in the blocks' order.

    Raises:
        NotAlikeError: The blocks are not run one after the other, or something runs between them.
    """
    pieces: list[tuple[int, int, int]] = []
    start = 0
    for block, group in groupby(blocks):
        stop = start + sum(1 for _ in group)
        if block is not None:
            pieces.append((block, start, stop))
        start = stop
    parts: Parts = []
    ascending: list[bool] = []
    while pieces:
        if [block for block, _, _ in pieces[:2]] == [KEPT - 1, 0]:
            # The last block's backward begins, and needs what a replay of all of them makes.
            pieces = pieces[1:]
        upward = pieces[0][0] == 0
        sweep, pieces = pieces[:KEPT], pieces[KEPT:]
        if [block for block, _, _ in sweep] != (list(range(KEPT)) if upward else list(reversed(range(KEPT)))):
            raise NotAlikeError("the blocks are not run one after the other")
        if pieces and pieces[0][0] == (KEPT - 2 if upward else 1):
            # It turns round: the last block's operators of both ways are in one piece, and count in the first.
            pieces.insert(0, (sweep[-1][0], sweep[-1][2], sweep[-1][2]))
        found = [(start, stop) for _, start, stop in sorted(sweep)]
        _adjoin(found, upward)
        parts.append(found)
        ascending.append(upward)
    if not parts or not ascending[0]:
        raise NotAlikeError("the blocks are not run one after the other")
    return parts, ascending


def _adjoin(parts: list[tuple[int, int]], upward: bool) -> None:
    """Check that nothing runs between the blocks among which others are left out."""
    middle = parts[PATTERN - 1 : PATTERN + 2]
    ordered = middle if upward else list(reversed(middle))
    if any(before[1] != after[0] for before, after in pairwise(ordered)):
        raise NotAlikeError("something runs between the blocks")


def parts_of_storages(met: Sequence[int], fixed: int, operators: Parts) -> Parts:
    """Cut the storages: each is part of what the operators do during which it was met.

    Args:
        met: By storage, how many operators there had been when it was met.
        fixed: Storages known before the first operator.
        operators: The operators' parts.
    """
    return [
        [(bisect_left(met, start, lo=fixed), bisect_left(met, stop, lo=fixed)) for start, stop in blocks]
        for blocks in operators
    ]


def parts_of_calls(
    calls: Sequence[ModuleCall], called: Sequence[int | None], dropped: frozenset[int], operators: Line
) -> Parts:
    """Cut the calls; a sweep that makes none, as backward does, has empty parts.

    Args:
        calls: The calls.
        called: By call, its block; None outside of all.
        dropped: Calls of the blocks left out.
        operators: The operators, cut.

    Raises:
        NotAlikeError: The calls are not the blocks', one after the other.
    """
    found: list[list[tuple[int, int] | None]] = [[None] * KEPT for _ in operators.parts]
    for block, group in groupby(range(len(calls)), key=lambda number: -1 if number in dropped else called[number]):
        numbers = list(group)
        if block is None or block < 0:
            continue
        places = (operators.place(calls[number].start) for number in numbers)
        sweep = next((place.sweep for place in places if place is not None and place.block == block), None)
        if sweep is None or found[sweep][block] is not None:
            raise NotAlikeError("a block's calls are not together")
        found[sweep][block] = numbers[0], numbers[-1] + 1
    return [_whole(blocks, len(calls), dropped) for blocks in found]


def _whole(blocks: list[tuple[int, int] | None], end: int, dropped: frozenset[int]) -> list[tuple[int, int]]:
    """Return a sweep's calls, the missing ones as empty parts, if nothing else is called between the blocks."""
    middle = [part for part in blocks[PATTERN - 1 : PATTERN + 2] if part is not None]
    if len(middle) not in (0, 3):
        raise NotAlikeError("blocks make different calls")
    if middle:
        (_, first), (second, third), (fourth, _) = middle if middle == sorted(middle) else reversed(middle)
        skipped = set(range(first, second)) | set(range(third, fourth))
        if not skipped <= dropped:
            raise NotAlikeError("something is called between the blocks")
    return [(end, end) if part is None else part for part in blocks]
