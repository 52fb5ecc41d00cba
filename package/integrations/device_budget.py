"""The budget "auto": what the device can give this training step, less a reserve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from remat.planner import BudgetError
from remat.planner.budget import format_bytes, parse_budget
from remat.profiler.devices import device_of
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

RESERVE = "10%"
"""What "auto" leaves of the free memory: for fragments, buffers of collectives, and whatever else allocates later."""


def device_budget(model: nn.Module, batch: object, optimizer: object, reserve: int | str) -> int:
    """Return the bytes that a step of this model may take at its peak on its device.

    That is what the device has free, less the reserve, and what the step's own tensors (parameters, gradients, buffers,
    batch, optimizer state), which every peak counts, take of it already. Other tensors of this process stay outside.

    Args:
        model: The model, on its device.
        batch: The batch, on that device.
        optimizer: The optimizer with its present state, a name, or None.
        reserve: Bytes to leave free: an int, "2GiB", or a share of what is free now, "10%".

    Raises:
        BudgetError: The reserve cannot be read, or leaves nothing.
    """
    device = next(model.parameters()).device
    free = device_of(device).free_bytes()
    kept = parse_budget(reserve, free)
    if kept >= free:
        raise BudgetError(
            f'budget="auto": {device} has {format_bytes(free)} free, of which reserve={reserve!r} leaves nothing: pass '
            "a smaller reserve, or free some"
        )
    return free - kept + _bytes_on(device, _own_tensors(model, batch, optimizer))


def _own_tensors(model: nn.Module, batch: object, optimizer: object) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter
        yield parameter.grad
    yield from model.buffers()
    yield from pytree.tree_leaves(batch)
    if isinstance(optimizer, Optimizer):
        for state in optimizer.state.values():
            yield from state.values()


def _bytes_on(device: torch.device, values: Iterator[Any]) -> int:
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.device == device]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
