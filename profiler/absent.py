"""Models that are not there: parameters on the meta device, or fake ones. Nothing of them can be run, only recorded."""

from __future__ import annotations

import torch
from torch import nn

from .internals import FakeTensor, FakeTensorMode


def is_absent(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a shape and no values: it is on the meta device, or fake."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of a mode, on the CPU, in the place of one that is not there."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
