"""Measure the workspace operators allocate inside themselves, which no dry run can see: convolutions, LSTMs.

Where the step fits the device, one real step under torch.profiler shows every distinct call's. Where it does not,
convolutions are run alone, each distinct call once, on tensors of ones. So are products and sums that a rank computes
in another type than the step that was run. What the allocator gave out inside an operator beyond what the operator
returned is its scratch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
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
OFTEN = 3
"""How many of a step's equal calls are measured: blocks repeat, and so does what their operators take."""
_BY_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Calls that may take more or less by what is in their arguments are measured every time."""


class ScratchMeter:
    """Answer how many bytes operator calls take beyond their outputs; each distinct call is measured once.

    Attributes:
        unmeasured: Calls for which memory ran out while they were measured alone.
        ran: What the calls of the last real step are known under, in order, without those that a record leaves out;
            empty where none was run.
    """

    def __init__(self) -> None:
        self.unmeasured: list[Hashable] = []
        self.ran: tuple[Hashable, ...] = ()
        self._known: dict[Hashable, int] = {}
        self._alone: dict[Hashable, tuple[Callable[[], Any], torch.device]] = {}
        self._names: frozenset[str] | None = None

    def key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return what identifies a call; None for operators known to take no scratch."""
        name = str(func)
        is_new_alone = self._names is not None and name in _NEW_ALONE
        if self._names is not None and name not in self._names and not is_new_alone:
            return None
        key = _key(name, args, kwargs)
        if (name in MEASURED_ALONE or is_new_alone) and key not in self._known and key not in self._alone:
            spec_args, spec_kwargs = pytree.tree_map_only(torch.Tensor, _Blueprint, (args, dict(kwargs)))
            device = next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self._alone[key] = (lambda: _prepare(func, spec_args, spec_kwargs), device)
        return key

    def learn(
        self, train: Callable[[], Any], device: torch.device, clock_ns: Callable[[], int] | None = None
    ) -> list[tuple[str, int]]:
        """Measure the operators of a real step.

        Args:
            train: Runs the step, which must not be the first: libraries keep what they allocate then.
            device: The model's device.
            clock_ns: Times the operators too, where the device runs them at once.

        Returns:
            The recorded operators' names and, where there is a clock, their nanoseconds.
        """
        marker = _Keys(clock_ns or int)
        windows = allocations_inside(lambda run: marker.run(run, train), device)
        assert len(windows) == len(marker.measured), "torch.profiler dropped operators"
        recorded = [call for call in marker.calls if not call[0].startswith(_NOT_RECORDED)]
        self.ran = tuple(key for _, key, _ in recorded)
        for (_, key), (peak, net) in zip(marker.measured, windows, strict=True):
            self._known[key] = max(self._known.get(key, 0), peak - max(net, 0))
        self._names = frozenset(name for name, key in marker.measured if self._known[key] > 0)
        return [(name, taken) for name, _, taken in recorded]

    def measure_alone(self) -> None:
        """Run alone the calls met so far that can be, and whose scratch is not known."""
        pending = {key: call for key, call in self._alone.items() if key not in self._known}
        self._alone.clear()
        if not pending:
            return
        device = next(iter(pending.values()))[1]
        measured: list[Hashable] = []

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
    """Note which calls a step makes and how long they take; run each distinct one inside a window, a few times."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        super().__init__()
        self.calls: list[tuple[str, Hashable, int]] = []
        self.measured: list[tuple[str, Hashable]] = []
        self._met: Counter[Hashable] = Counter()
        self._clock_ns = clock_ns
        self._window: Window = lambda call: call()

    def run(self, window: Window, train: Callable[[], Any]) -> Any:
        self._window = window
        with self:
            return train()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        key = _key(name, args, kwargs)
        self._met[key] += 1
        is_measured = self._met[key] <= OFTEN or not _BY_VALUES.isdisjoint(func.tags)
        start = self._clock_ns()
        if is_measured:
            self.measured.append((name, key))
            out = self._window(lambda: func(*args, **kwargs))
        else:
            out = func(*args, **kwargs)
        self.calls.append((name, key, self._clock_ns() - start))
        return out


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


def _key(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Hashable:
    return name, _signature(args), _signature(sorted(kwargs.items())) if kwargs else ()


def _signature(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)
