"""What differs between kinds of device, in one place: waiting, rounding, free memory, random states, what runs out.

Knows nothing of models, steps or plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch.profiler import ProfilerActivity

from .internals import clear_cublas_workspaces, default_cpu_stream

CUDA_GRANULARITY = 512
"""PyTorch's CUDA allocator rounds every allocation up to this many bytes."""
CONTEXT_AT_MOST_BYTES = 3 << 29
"""What is in use on a card beyond this, and not by this process's allocator, is taken for another process's."""


class DeviceError(ValueError):
    """Raised for a device that steps cannot be measured on."""


@dataclass(frozen=True, slots=True)
class Device:
    """A processor and its memory, as steps are measured on it; this one is the CPU.

    Attributes:
        device: torch's name for it.
    """

    device: torch.device

    @staticmethod
    def is_there() -> bool:
        """Return whether torch finds a device of this kind here."""
        return True

    @property
    def name(self) -> str:
        """Return what a user would call it."""
        return "CPU"

    @property
    def words(self) -> str:
        """Return its kind, and its name where it has one."""
        return self.device.type

    @property
    def total_bytes(self) -> int:
        """Return how much memory it has."""
        return psutil.virtual_memory().total

    @property
    def capability(self) -> tuple[int, int]:
        """Return its CUDA compute capability, (0, 0) where it has none."""
        return 0, 0

    @property
    def round_to(self) -> int:
        """Return the granularity of allocations, in bytes."""
        return 1

    @property
    def budget_on(self) -> Literal["allocated", "reserved"]:
        """Return which figure runs out: what tensors take, or what a caching allocator took for them."""
        return "allocated"

    @property
    def counts_itself(self) -> bool:
        """Return whether the allocator counts its peak; else its events are recorded and summed."""
        return False

    @property
    def runs_behind(self) -> bool:
        """Return whether operators are launched and run later, so that the host's time is hidden or shows."""
        return False

    @property
    def keeps_random_state_on_host(self) -> bool:
        """Return whether what checkpoints keep of random states takes this device's memory."""
        return True

    @property
    def activities(self) -> list[ProfilerActivity]:
        """Return what torch.profiler must record to see this device's work."""
        return [ProfilerActivity.CPU]

    @property
    def forked(self) -> list[torch.device]:
        """Return the devices whose random state `torch.random.fork_rng` must keep besides the CPU's."""
        return []

    def synchronize(self) -> None:
        """Wait for the device."""

    @property
    def clock_words(self) -> str:
        """Return what `clock_ns` counts, in words."""
        return f"CPU time of the thread, {host_allocator()}"

    def clock_ns(self) -> int:
        """Return nanoseconds of a clock that other programs on the machine disturb as little as can be.

        On a CPU that is the time this thread computed: where torch computes with several, it takes part in all that
        they do, and waits for the others only where the work does not divide. On an idle machine the clock on the
        wall says the same.
        """
        return time.thread_time_ns()

    def current_stream(self) -> Hashable:
        """Return what tells streams apart that operators are launched on; 0 is the default one.

        torch has streams on a CPU for the sake of programs for cards, which make and enter them all the same.
        """
        stream = torch.cpu.current_stream()
        return 0 if stream is default_cpu_stream() else stream

    def free_bytes(self) -> int:
        """Return how much memory can still be had, the caching allocator's own store included."""
        return psutil.virtual_memory().available

    def context_bytes(self) -> int:
        """Return what the driver and its libraries hold for this process outside the allocator."""
        return 0

    def allocated_bytes(self) -> int:
        """Return what tensors take now, where the allocator counts it; else 0."""
        return 0

    def take_peak_bytes(self) -> int:
        """Return the most that tensors took since the last call, where the allocator counts it; else 0."""
        return 0

    def reserved_bytes(self) -> int:
        """Return what the allocator has taken for them, where it keeps more than they take; else 0."""
        return 0

    def random_state(self) -> torch.Tensor:
        """Return the device's own random state; empty where it has none besides the CPU's."""
        return torch.empty(0)

    def warm_up(self, run: Callable[[], Any]) -> int:
        """Run something so that what follows is not the first; return the bytes that libraries keep from it on.

        On a CPU nothing is run: libraries keep nothing there that counts, and what is measured first is not timed.
        """
        del run
        return 0

    def release_cached(self) -> None:
        """Give back what the allocator keeps without need, as before a measurement of what it reserves."""


class CudaDevice(Device):
    """A card that torch drives as CUDA (ROCm too); work is launched, and memory comes from a caching allocator."""

    __slots__ = ()

    @staticmethod
    def is_there() -> bool:
        """Return whether torch finds a card here."""
        return torch.cuda.is_available()

    @property
    def name(self) -> str:
        """Return the card's name."""
        return torch.cuda.get_device_name(self.device)

    @property
    def words(self) -> str:
        """Return its kind and its name."""
        return f"{self.device.type} ({self.name})"

    @property
    def total_bytes(self) -> int:
        """Return how much memory torch finds on the card."""
        return torch.cuda.get_device_properties(self.device).total_memory

    @property
    def capability(self) -> tuple[int, int]:
        """Return the card's compute capability."""
        return torch.cuda.get_device_capability(self.device)

    @property
    def round_to(self) -> int:
        """Return the granularity of allocations, in bytes."""
        return CUDA_GRANULARITY

    @property
    def budget_on(self) -> Literal["allocated", "reserved"]:
        """Return which figure runs out: a card is full when segments are, not when tensors are."""
        return "reserved"

    @property
    def counts_itself(self) -> bool:
        """Return whether the allocator counts its peak; it does."""
        return True

    @property
    def runs_behind(self) -> bool:
        """Return whether operators are launched and run later; they are."""
        return True

    @property
    def keeps_random_state_on_host(self) -> bool:
        """Return whether what checkpoints keep of random states takes this device's memory; it is the host's."""
        return False

    @property
    def activities(self) -> list[ProfilerActivity]:
        """Return what torch.profiler must record to see this device's work."""
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    @property
    def forked(self) -> list[torch.device]:
        """Return the devices whose random state `torch.random.fork_rng` must keep besides the CPU's."""
        return [self.device]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    @property
    def clock_words(self) -> str:
        """Return what `clock_ns` counts, in words."""
        return "wall time, the card's work included"

    def clock_ns(self) -> int:
        """Return the time by the clock, once the device has done what it was given."""
        self.synchronize()
        return time.perf_counter_ns()

    def current_stream(self) -> Hashable:
        """Return what tells streams apart that operators are launched on; 0 is the default one."""
        return torch.cuda.current_stream(self.device).stream_id

    def free_bytes(self) -> int:
        """Return how much memory can still be had.

        That is what the driver has left and what the caching allocator holds without a tensor in it, within the share
        of the card that `set_per_process_memory_fraction` allows.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        cached = torch.cuda.memory_reserved(self.device) - allocated
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return min(free + cached, allowed - allocated)

    def context_bytes(self) -> int:
        """Return what is in use on the card besides the allocator's segments: the context, kernels, libraries.

        The driver does not tell this by process; of what is above `CONTEXT_AT_MOST_BYTES` nothing is counted.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, min(CONTEXT_AT_MOST_BYTES, total - free - torch.cuda.memory_reserved(self.device)))

    def allocated_bytes(self) -> int:
        """Return what tensors take now."""
        return torch.cuda.memory_allocated(self.device)

    def take_peak_bytes(self) -> int:
        """Return the most that tensors took since the last call; the allocator counts anew from here."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def reserved_bytes(self) -> int:
        """Return what the allocator has taken for them."""
        return torch.cuda.memory_reserved(self.device)

    def random_state(self) -> torch.Tensor:
        """Return the device's own random state."""
        return torch.cuda.get_rng_state(self.device)

    def warm_up(self, run: Callable[[], Any]) -> int:
        """Run something so that what follows is not the first; return the bytes that libraries keep from it on.

        First calls load kernels, choose algorithms and make workspaces that stay (cuBLAS has one for each stream):
        their time is no step's time, and their memory is there from then on.
        """
        clear_cublas_workspaces()
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.synchronize()
        return max(0, torch.cuda.memory_allocated(self.device) - before)

    def release_cached(self) -> None:
        """Give back what the allocator keeps without need."""
        torch.cuda.empty_cache()


KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": CudaDevice}


def device_of(device: torch.device) -> Device:
    """Return what is known of a device.

    Raises:
        DeviceError: Steps cannot be measured on devices of this kind.
    """
    kind = KINDS.get(device.type)
    if kind is None:
        raise DeviceError(
            f"steps are measured on devices of type {' or '.join(KINDS)}, not on {device}: move the model and the batch"
        )
    return kind(device)


def host_allocator() -> str:
    """Name the allocator that gives out the host's memory: one that keeps its pages spares a forward page faults."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    found = [name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in loaded]
    return found[0] if found else "the C library's allocator"


def all_random_states() -> Callable[[], None]:
    """Remember torch's random states, on the CPU and on every card in use; return what brings them back."""
    host = torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def restore() -> None:
        torch.set_rng_state(host)
        if cards is not None:
            torch.cuda.set_rng_state_all(cards)

    return restore


_HOST_IS_FULL = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_LIBRARY_IS_FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out, in an allocator or in a library beside it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and any(sign in words for sign in (*_HOST_IS_FULL, *_LIBRARY_IS_FULL))
