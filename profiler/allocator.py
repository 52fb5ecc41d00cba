"""Measure what the allocator really gave out: the ground truth for every predicted byte."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

_MARK = "remat.measured"


def allocated_peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Run something and return the most bytes allocated on `device` at any moment, above what was there at entry.

    On a CPU this is the running sum of the allocator's own events (torch.profiler, profile_memory), exact to the byte.
    On CUDA it is `max_memory_allocated` less `memory_allocated` at entry.
    """
    return allocated_peaks_bytes([lambda: run], device)[0]


def allocated_peaks_bytes(preparations: Sequence[Callable[[], Callable[[], Any]]], device: torch.device) -> list[int]:
    """Measure several runs in one go; each preparation returns what is to be measured. See `allocated_peak_bytes`."""
    gc.collect()
    if device.type == "cuda":
        return [_cuda_peak(prepare(), device) for prepare in preparations]
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for prepare in preparations:
            run = prepare()
            with record_function(_MARK):
                result = run()
            del result, run
    return _peaks_inside_marks(profiler)


def _cuda_peak(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def _peaks_inside_marks(profiler: Any) -> list[int]:
    allocations: list[tuple[int, int]] = []
    marks: list[tuple[int, int]] = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocations.append((event.start_ns(), event.nbytes()))
        elif event.name() == _MARK:
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    allocations.sort(key=lambda event: event[0])
    peaks: list[int] = []
    for start, stop in sorted(marks):
        live = peak = 0
        for time, nbytes in allocations:
            if start <= time <= stop:
                live += nbytes
                peak = max(peak, live)
        peaks.append(peak)
    return peaks
