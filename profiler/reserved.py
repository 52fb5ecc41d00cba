"""What a recorded step makes a card reserve: its allocations and frees, replayed through the allocator's model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .caching_allocator import AllocatorSettings, CachingAllocator
from .step_record import StepRecord, Storage

STEPS = 2
"""The second step begins with what the first left: the optimizer's state, and segments cut for other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Hold both figures of a step, in bytes.

    Attributes:
        allocated_bytes: Most that tensors take at any moment, by the allocator's rounding.
        reserved_bytes: Most that the allocator has taken from the driver for them.
    """

    allocated_bytes: int
    reserved_bytes: int

    @property
    def cached_bytes(self) -> int:
        """Return what is reserved beyond what is allocated."""
        return self.reserved_bytes - self.allocated_bytes


def reserved_bytes(
    record: StepRecord,
    *,
    state_bytes: int = 0,
    optimizer_bytes: int = 0,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> Reserved:
    """Replay a step twice, the optimizer's between, and return what is allocated and reserved at most.

    Within an operator its outputs are allocated first, then its workspace is taken and given back, then what dies in it
    is freed. The optimizer is known by its totals only: its state, and what its step takes meanwhile, are divided
    over the parameters by their size.

    Args:
        record: The step, with bytes rounded or not.
        state_bytes: The optimizer's state.
        optimizer_bytes: What its step allocates and frees.
        settings: The allocator's settings; default torch's.
        capacity_bytes: What the driver can give; None is without limit.

    Raises:
        DeviceFullError: The step does not fit the capacity.
    """
    memory = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    born: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(record.storages):
        if storage.born < 0:
            memory.allocate(storage.nbytes, stream=storage.stream)
        elif storage.last is None or storage.last >= storage.born:
            born[storage.born].append(index)
            if storage.last is not None:
                dying[storage.last].append(index)
    parameters = [storage for storage in record.storages if storage.kind == "parameter"]
    for number in range(STEPS):
        handles: dict[int, int] = {}
        for k, operator in enumerate(record.operators):
            for index in born[k]:
                handles[index] = memory.allocate(record.storages[index].nbytes, stream=record.storages[index].stream)
            memory.free(memory.allocate(operator.scratch_bytes))
            for index in dying[k]:
                memory.free(handles.pop(index))
        if number == 0:
            _divided(memory, parameters, state_bytes)
        for handle in _divided(memory, parameters, optimizer_bytes):
            memory.free(handle)
        for handle in handles.values():
            memory.free(handle)
    return Reserved(allocated_bytes=memory.peak_allocated_bytes, reserved_bytes=memory.peak_reserved_bytes)


def _divided(memory: CachingAllocator, parameters: list[Storage], nbytes: int) -> list[int]:
    """Allocate bytes in pieces as the parameters are: as many whole copies as fit, and a remainder in one piece."""
    total = sum(parameter.nbytes for parameter in parameters)
    copies = nbytes // total if total else 0
    pieces = [parameter.nbytes for parameter in parameters for _ in range(copies)]
    return [memory.allocate(size) for size in (*pieces, nbytes - sum(pieces))]
