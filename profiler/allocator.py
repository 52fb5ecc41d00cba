"""Measure what the allocator really gave out: the ground truth for every predicted byte."""

from __future__ import annotations

import gc
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from .internals import kineto_events

_MARK = "remat.measured"
FREE_SHARE = 0.9
"""What is run takes no more than this share of the device's free memory."""
Window = Callable[[Callable[[], Any]], Any]


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage once, and leave what is alive then out of the collections that measuring needs: they are fast."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def allocated_peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Run something and return the most bytes allocated on `device` at any moment, above what was there at entry.

    On a CPU this is the running sum of the allocator's own events (torch.profiler, profile_memory), exact to the byte.
    On CUDA it is `max_memory_allocated` less `memory_allocated` at entry.
    """
    return allocations_inside(lambda window: window(run), device)[0][0]


def allocations_inside(body: Callable[[Window], Any], device: torch.device | None = None) -> list[tuple[int, int]]:
    """Measure calls: for each, the most bytes it had allocated at any moment, and what it still had at its end.

    Args:
        body: Receives a function; what is called through that function is measured, in order.
        device: Where memory is counted; default the CPU.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        measured: list[tuple[int, int]] = []
        body(lambda call: _on_cuda(call, device, measured))
        return measured

    def window(call: Callable[[], Any]) -> Any:
        with record_function(_MARK):
            return call()

    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = body(window)
    del result
    return _inside_marks(profiler)


def _on_cuda(call: Callable[[], Any], device: torch.device, measured: list[tuple[int, int]]) -> Any:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    measured.append((torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before))
    return result


def _inside_marks(profiler: Any) -> list[tuple[int, int]]:
    allocations: list[tuple[int, int]] = []
    marks: list[tuple[int, int]] = []
    for event in kineto_events(profiler):
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
    return nbytes <= FREE_SHARE * _free_memory_bytes(device)


def _free_memory_bytes(device: torch.device) -> int:
    """Return how much memory the device can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    # Elsewhere the standard library tells at most how much there is.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
