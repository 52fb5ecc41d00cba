"""Measure the workspace operators allocate inside themselves, which no dry run can see: convolutions, LSTMs.

Where the step fits the device, one real step under torch.profiler shows every operator's. Where it does not,
convolutions are run alone, each distinct call once, on tensors of ones. So are products and sums that a rank computes
in another type than the step that was run. What the allocator gave out inside an operator beyond what the operator
returned is its scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .allocator import Window, allocations_inside
from .devices import is_out_of_memory
from .internals import unset_fake_temporarily
from .step_record import StepRecord

MEASURED_ALONE = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
"""Operators that can safely be run alone on made-up values, and whose scratch may be large."""
_NEW_ALONE = frozenset(
    {
        *("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"),
        *("aten.mean.default", "aten.sum.dim_IntList", "aten.native_layer_norm_backward.default"),
        "fsdp.chunk_cat.default",
    }
)
"""The same, for calls that a step which was run did not have: mixed precision on ranks brings other types."""
_NOT_RECORDED = ("aten.detach.default", "prim.")
"""Beginnings of the names of calls that are in no record."""


class ScratchMeter:
    """Answer how many bytes operator calls take beyond their outputs; each distinct call is measured once.

    Attributes:
        unmeasured: Calls for which memory ran out while they were measured alone.
        ran: What the calls of the last real step are known under, in order, without those that a record leaves out;
            empty where none was run.
    """

    def __init__(self) -> None:
        self.unmeasured: list[str] = []
        self.ran: tuple[str, ...] = ()
        self._known: dict[str, int] = {}
        self._alone: dict[str, tuple[Callable[[], Any], torch.device]] = {}
        self._names: frozenset[str] | None = None

    def key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return what identifies a call; None for operators known to take no scratch."""
        name = str(func)
        is_new_alone = self._names is not None and name in _NEW_ALONE
        if self._names is not None and name not in self._names and not is_new_alone:
            return None
        key = repr((name, pytree.tree_map(_signature, (args, sorted(kwargs.items())))))
        if (name in MEASURED_ALONE or is_new_alone) and key not in self._known and key not in self._alone:
            spec_args, spec_kwargs = pytree.tree_map_only(torch.Tensor, _Blueprint, (args, dict(kwargs)))
            device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self._alone[key] = (lambda: _prepare(func, spec_args, spec_kwargs), device)
        return key

    def learn(self, train: Callable[[], Any], device: torch.device) -> int:
        """Measure every operator of a real step; return the most bytes allocated at any moment of it.

        Args:
            train: Runs the step, which must not be the first: libraries keep what they allocate then.
            device: The model's device.
        """
        marker = _Keys()
        whole, *windows = allocations_inside(lambda run: run(lambda: marker.run(run, train)), device)
        assert len(windows) == len(marker.keys), "torch.profiler dropped operators"
        self.ran = tuple(
            key for name, key in zip(marker.names, marker.keys, strict=True) if not name.startswith(_NOT_RECORDED)
        )
        for key, (peak, net) in zip(marker.keys, windows, strict=True):
            self._known[key] = max(self._known.get(key, 0), peak - max(net, 0))
        self._names = frozenset(
            name for name, key in zip(marker.names, marker.keys, strict=True) if self._known[key] > 0
        )
        return whole[0]

    def measure_alone(self) -> None:
        """Run alone the calls met so far that can be, and whose scratch is not known."""
        pending = {key: call for key, call in self._alone.items() if key not in self._known}
        self._alone.clear()
        if not pending:
            return
        device = next(iter(pending.values()))[1]
        measured: list[str] = []

        def body(run: Window) -> None:
            for key, (make, _) in pending.items():
                try:
                    call = make()
                    measured.append(key)
                    run(call)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self.unmeasured.append(key)

        with unset_fake_temporarily(), torch.no_grad():
            windows = allocations_inside(body, device)
        for key, (peak, net) in zip(measured, windows, strict=True):
            if key not in self.unmeasured:
                self._known[key] = peak - max(net, 0)

    def fill_in(self, record: StepRecord) -> StepRecord:
        """Return a record with the scratch of its operators; 0 where it was not measured."""
        known = [0 if key is None else self._known.get(key, 0) for key in record.scratch_keys]
        operators = tuple(
            operator if operator.scratch_bytes == nbytes else replace(operator, scratch_bytes=nbytes)
            for operator, nbytes in zip(record.operators, known, strict=True)
        )
        return replace(record, operators=operators)


class _Keys(TorchDispatchMode):
    """Run every operator inside a window of its own and note which call it is."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []
        self.names: list[str] = []
        self._window: Callable[[Callable[[], Any]], Any] = lambda call: call()

    def run(self, window: Callable[[Callable[[], Any]], Any], train: Callable[[], Any]) -> Any:
        self._window = window
        with self:
            return train()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        self.names.append(name)
        self.keys.append(repr((name, pytree.tree_map(_signature, (args, sorted(kwargs.items()))))))
        return self._window(lambda: func(*args, **kwargs))


class _Blueprint:
    """Shape, strides, dtype and device of a tensor, to make one like it later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.layout = (tuple(tensor.shape), tuple(tensor.stride()))
        self.options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}

    def make(self) -> torch.Tensor:
        return torch.empty_strided(*self.layout, **self.options).fill_(1)


def _prepare(func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """Make the arguments, outside what is measured, and return the call to measure."""
    real_args, real_kwargs = pytree.tree_map_only(_Blueprint, _Blueprint.make, (args, kwargs))
    return lambda: func(*real_args, **real_kwargs)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), str(value.dtype), str(value.device))
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
