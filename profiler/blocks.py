"""The blocks of a recorded step that are built alike: recognised by what they ran, not by names or classes.

A block is a call of a module that is kept in a list (its path ends with a number) and that calls others. Blocks of one
list are of one kind where they ran the same operators on the same sizes, wired alike inside; what lives how long, and
what was measured, plays no part. Of lists within lists the outermost that repeats counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from itertools import islice, takewhile

from .step_record import StepRecord, Storage


def kinds_of(record: StepRecord) -> tuple[tuple[int, ...], ...]:
    """Return the calls of blocks that are built alike, by kind: indices into the record's calls, in order.

    What occurs once is no kind. Calls of one kind run as many operators each.
    """
    made_by: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(record.calls):
        if call.stop > call.start and call.stop <= record.loss_stop:
            made_by[call.parent].append(index)
    found: list[tuple[int, ...]] = []
    waiting = [-1]
    while waiting:
        parent = waiting.pop()
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for index in made_by[parent]:
            call = record.calls[index]
            where, _, number = call.module.rpartition(".")
            if number.isdecimal() and made_by[index] and call.index >= 0:
                alike[where, _built(record, index)].append(index)
            else:
                waiting.append(index)
        for blocks in alike.values():
            if len(blocks) > 1:
                found.append(tuple(blocks))
            else:
                waiting += blocks
    return tuple(sorted(found))


def _built(record: StepRecord, block: int) -> Hashable:
    """Return what two calls have in common that are built alike."""
    around = record.calls[block]
    cut = len(around.module)
    calls: list[Hashable] = []
    for call in takewhile(lambda call: call.start < around.stop, islice(record.calls, block, None)):
        span = call.start - around.start, call.stop - around.start
        calls.append((call.module[cut:], call.kind, span, call.training, call.hooked, call.findings))
    return tuple(calls), tuple(_ran(record, around.start, k) for k in range(around.start, around.stop))


def _ran(record: StepRecord, first: int, k: int) -> Hashable:
    """Return what an operator did, its block's other operators named by their distance from the first."""
    operator = record.operators[k]
    reads = tuple(_read(record.storages[index], first) for index in operator.reads)
    facts = operator.operator, operator.output_bytes, operator.flops, operator.moved_bytes, operator.dtype
    return facts, reads, operator.is_random, operator.is_view, operator.counted, bool(operator.writes)


def _read(storage: Storage, first: int) -> Hashable:
    """Return what a storage is to a block: its own, or one of a kind and size from outside."""
    if storage.born >= first:
        return storage.born - first
    # The first block may read what later ones are handed on.
    return "activation" if storage.kind == "batch" else storage.kind, storage.nbytes
