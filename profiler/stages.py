"""Cut the recorded call tree into a chain of stages, finest where the saved bytes are."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from .records import StageSpan
from .step_record import ModuleCall, Storage

SHARE = 0.02
"""A stage is cut further while it holds more than this share of all saved bytes."""


def cut(
    calls: Sequence[ModuleCall], storages: Sequence[Storage], operator_count: int, share: float = SHARE
) -> tuple[StageSpan, ...]:
    """Cut forward and loss into stages.

    Starts from the model's call with the loss behind it and replaces the heaviest stage by its children, the
    container's own operators between them being stages too, until no stage holds more than `share` of the saved bytes
    or it calls no module.

    Args:
        calls: The module calls, in order of their beginning.
        storages: The storages, with the operators that save them.
        operator_count: Operators of forward and loss.
        share: Largest share of the saved bytes that one stage may hold if it can be cut.
    """
    first_saved = [0] * operator_count
    for storage in storages:
        if storage.saved_by and storage.kind == "activation":
            first_saved[storage.saved_by[0]] += storage.nbytes
    before = [0, *accumulate(first_saved)]
    tree = _CallTree(calls)
    final: list[StageSpan] = []
    heap: list[tuple[int, int, StageSpan]] = []

    def push(spans: list[StageSpan]) -> None:
        for span in spans:
            if span.is_call and tree.children.get(span.call):
                heapq.heappush(heap, (before[span.start] - before[span.stop], span.start, span))
            else:
                final.append(span)

    push(tree.pieces(-1, 0, operator_count))
    while heap and -heap[0][0] > share * before[-1]:
        _, _, span = heapq.heappop(heap)
        push(tree.pieces(span.call, span.start, span.stop))
    return tuple(sorted([*final, *(span for _, _, span in heap)], key=lambda span: span.start))


class _CallTree:
    """The module calls that run operators, by the call around them; -1 stands for what is around all."""

    def __init__(self, calls: Sequence[ModuleCall]) -> None:
        self.children: dict[int, list[int]] = {}
        for index, call in enumerate(calls):
            if call.stop > call.start:
                self.children.setdefault(call.parent, []).append(index)
        self._calls = calls
        self._names = _names(calls)

    def pieces(self, call: int, start: int, stop: int) -> list[StageSpan]:
        """Return the operators of a call in order: its children's, and between them its own."""
        spans: list[StageSpan] = []
        own = f"{self._names[call]} (own operators)" if call >= 0 else "(loss)"
        position = start
        for child in self.children.get(call, []):
            inner = self._calls[child]
            if inner.start > position:
                spans.append(StageSpan(name=own, call=call, is_call=False, start=position, stop=inner.start))
            name = self._names[child]
            spans.append(StageSpan(name=name, call=child, is_call=True, start=inner.start, stop=inner.stop))
            position = inner.stop
        if stop > position:
            spans.append(StageSpan(name=own, call=call, is_call=False, start=position, stop=stop))
        return spans


def _names(calls: Sequence[ModuleCall]) -> list[str]:
    several = {call.module for call in calls if call.index > 0}
    return [(call.module or call.kind) + _which(call, several) for call in calls]


def _which(call: ModuleCall, several: set[str]) -> str:
    if call.index < 0:
        return " (without gradients)"
    return f" (call {call.index + 1})" if call.module in several else ""
