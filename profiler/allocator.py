"""Measure what the allocator really gave out: the ground truth for every predicted byte."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from .devices import Device, device_of
from .internals import marks_and_allocations

_MARK = "remat.measured"
FREE_SHARE = 0.9
"""What is run takes no more than this share of the device's free memory."""
_leaves_out = False
Window = Callable[[Callable[[], Any]], Any]


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage once, and leave what is alive then out of the collections that measuring needs: they are fast."""
    global _leaves_out
    if gc.get_freeze_count():
        yield
        return
    _leaves_out = True
    collect()
    try:
        yield
    finally:
        _leaves_out = False
        gc.unfreeze()


def collect() -> None:
    """Collect garbage; inside `collected`, what is alive now is left out of later collections, as our records are."""
    gc.collect()
    if _leaves_out:
        gc.freeze()


def allocated_peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Run something and return the most bytes allocated on `device` at any moment, above what was there at entry.

    On a CPU this is the running sum of the allocator's own events (torch.profiler's), exact to the byte.
    On CUDA it is what its allocator counts, above what was allocated at entry.
    """
    return allocations_inside(lambda window: window(run), device)[0][0]


def allocations_inside(body: Callable[[Window], Any], device: torch.device | None = None) -> list[tuple[int, int]]:
    """Measure calls: for each, the most bytes it had allocated at any moment, and what it still had at its end.

    Args:
        body: Receives a function; what is called through that function is measured, in order.
        device: Where memory is counted; default the CPU.
    """
    collect()
    if device is not None and device_of(device).counts_itself:
        counted = _Counted(device_of(device))
        body(counted)
        return counted.measured

    def window(call: Callable[[], Any]) -> Any:
        with record_function(_MARK):
            return call()

    with marks_and_allocations() as events:
        result = body(window)
    del result
    return _inside_marks(events)


class _Counted:
    """Measure calls, and calls inside them, by the one peak that a device's allocator keeps."""

    def __init__(self, place: Device) -> None:
        self.measured: list[tuple[int, int]] = []
        self._place = place
        self._peaks: list[int] = []

    def __call__(self, call: Callable[[], Any]) -> Any:
        outermost, position = not self._peaks, len(self.measured)
        self.measured.append((0, 0))
        self._fold(wait=outermost)
        before = self._place.allocated_bytes()
        self._peaks.append(before)
        try:
            return call()
        finally:
            self._fold(wait=outermost)
            peak, after = self._peaks.pop(), self._place.allocated_bytes()
            self.measured[position] = (peak - before, after - before)

    def _fold(self, *, wait: bool) -> None:
        """Take the counter into every open window, and start it again."""
        # The allocator counts on the host, at once: only what other streams still hold must be waited for.
        if wait:
            self._place.synchronize()
        peak = self._place.take_peak_bytes()
        self._peaks = [max(known, peak) for known in self._peaks]


def _inside_marks(events: list[Any]) -> list[tuple[int, int]]:
    allocations: list[tuple[int, int]] = []
    marks: list[tuple[int, int]] = []
    for event in events:
        if event.name() == "[memory]":
            allocations.append((event.start_ns(), event.nbytes()))
        elif event.name() == _MARK:
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    allocations.sort(key=lambda event: event[0])
    times = [time for time, _ in allocations]
    measured: list[tuple[int, int]] = []
    for start, stop in sorted(marks):
        live = peak = 0
        for _, nbytes in allocations[bisect_left(times, start) : bisect_right(times, stop)]:
            live += nbytes
            peak = max(peak, live)
        measured.append((peak, live))
    return measured


def fits(nbytes: int, device: torch.device) -> bool:
    """Return whether a device has room for so many bytes, and some to spare."""
    return nbytes <= FREE_SHARE * device_of(device).free_bytes()
