"""A card that is not there: torch.cuda's memory counters kept by hand, and events as torch.profiler gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import DeviceType


class Counters:
    """What torch.cuda counts, over allocations that a test makes; segments are never given back."""

    def __init__(self, monkeypatch, *, total=80 << 30, others=0):
        self.allocated = self.reserved = self.peak = 0
        self.total, self.others = total, others
        for name, function in {
            "memory_allocated": lambda device=None: self.allocated,
            "memory_reserved": lambda device=None: self.reserved,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": self._reset,
            "synchronize": lambda device=None: None,
            "mem_get_info": lambda device=None: (self.total - self.reserved - self.others, self.total),
            "get_per_process_memory_fraction": lambda device=None: 1.0,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def take(self, nbytes):
        self.allocated += nbytes
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)

    def give(self, nbytes):
        self.allocated -= nbytes

    def _reset(self, device=None):
        self.peak = self.allocated


@dataclass
class Event:
    """A raw event of torch.profiler; the fields that are read, as methods."""

    label: str
    start: int
    duration: int
    number: int
    linked: int = 0
    activity: str = "cpu_op"
    asynchronous: bool = False

    def name(self):
        return self.label

    def start_ns(self):
        return self.start

    def duration_ns(self):
        return self.duration

    def correlation_id(self):
        return self.number

    def linked_correlation_id(self):
        return self.linked

    def activity_type(self):
        return self.activity

    def is_user_annotation(self):
        return self.activity in ("user_annotation", "gpu_user_annotation")

    def is_async(self):
        return self.asynchronous

    def device_type(self):
        on_device = self.activity in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        return DeviceType.CUDA if on_device else DeviceType.CPU


def launched(mark, kernels, *, first_driver_number):
    """Return the events of operators that launch one kernel each: marks, operators, launches, kernels, mirrors."""
    events = []
    for k, duration in enumerate(kernels):
        start, own = 1000 * k, 2 * k + 2
        driver = first_driver_number + k
        events += [
            Event(mark, start, 900, 2 * k + 1, activity="user_annotation"),
            Event("aten::mm", start + 100, 700, own),
            Event("cudaLaunchKernel", start + 200, 50, driver, linked=own, activity="cuda_runtime"),
            Event("gemm", 10_000 + start, duration, driver, linked=own, activity="kernel"),
            Event(mark, 10_000 + start, duration, 2 * k + 1, linked=2 * k + 1, activity="gpu_user_annotation"),
        ]
    return events
