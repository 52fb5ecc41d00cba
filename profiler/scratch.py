"""Measure the workspace operators allocate inside themselves, which no dry run can see: convolutions, mostly.

Each distinct operator call (shapes, strides, dtypes, settings) is run once alone on tensors of ones; what the
allocator gave out beyond the outputs is its scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from .allocator import allocated_peaks_bytes

WITH_SCRATCH = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
"""Operators known to take workspace through the allocator."""


class ScratchMeter:
    """Answer how many bytes operator calls take beyond their outputs; each distinct call is measured once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._unknown: dict[str, tuple[Callable[[], Any], int, torch.device]] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Sequence[Any]) -> str | None:
        """Register a call to be measured; return its key, or None for operators not in `WITH_SCRATCH`."""
        if str(func) not in WITH_SCRATCH:
            return None
        key = repr((str(func), pytree.tree_map(_signature, (args, sorted(kwargs.items())))))
        if key not in self._known and key not in self._unknown:
            spec_args, spec_kwargs = pytree.tree_map_only(torch.Tensor, _Blueprint, (args, dict(kwargs)))
            output_bytes = sum(leaf.untyped_storage().nbytes() for leaf in outputs)
            self._unknown[key] = (lambda: _alone(func, spec_args, spec_kwargs), output_bytes, outputs[0].device)
        return key

    def scratch_bytes(self, key: str) -> int:
        """Return the scratch of a registered call, measuring all that are still unknown in one go."""
        if self._unknown:
            with unset_fake_temporarily(), torch.no_grad():
                calls, output_bytes, devices = zip(*self._unknown.values(), strict=True)
                peaks = allocated_peaks_bytes(calls, devices[0])
            for name, peak, own in zip(self._unknown, peaks, output_bytes, strict=True):
                self._known[name] = max(0, peak - own)
            self._unknown.clear()
        return self._known[key]


class _Blueprint:
    """Shape, strides, dtype and device of a tensor, to make one like it later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.layout = (tuple(tensor.shape), tuple(tensor.stride()))
        self.options = {"dtype": tensor.dtype, "device": tensor.device}

    def make(self) -> torch.Tensor:
        return torch.empty_strided(*self.layout, **self.options).fill_(1)


def _alone(func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """Make the arguments, outside what is measured, and return the call to measure."""
    real_args, real_kwargs = pytree.tree_map_only(_Blueprint, _Blueprint.make, (args, kwargs))
    return lambda: func(*real_args, **real_kwargs)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), str(value.dtype), str(value.device))
    return value
