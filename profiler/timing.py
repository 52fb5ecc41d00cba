"""Measure operator and step times on the model's own device, warmed up by the caller."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch
from torch.profiler import profile as torch_profile
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from .devices import device_of
from .internals import kineto_events
from .kernels import marked_durations
from .step import Step

_MARK = "remat.operator"
ENOUGH_NS = 2_000_000_000
"""Runs as long as this are not repeated: what disturbs a short one averages out in them."""


class _Marker(TorchDispatchMode):
    """Tag every operator, so that its kernels' time can be told from everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or func is torch.ops.aten.detach.default:
            return func(*args, **(kwargs or {}))
        self.names.append(str(func))
        with record_function(_MARK):
            return func(*args, **(kwargs or {}))


def forward_without_saving(step: Step) -> torch.Tensor:
    """Run forward and loss with autograd on but saving nothing: training's operators in inference's memory."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _never):
        return step.loss_of(step.forward())


def _never(_: object) -> torch.Tensor:
    raise AssertionError("backward of a forward that saved nothing")


def operator_times(step: Step, names: Sequence[str], device: torch.device, repeats: int) -> tuple[list[int], int, bool]:
    """Time the forward and every operator of it: its own kernels, by median over repeats, in nanoseconds.

    Args:
        step: The step, warmed up; its model's state must be preserved by the caller.
        names: The operators of forward and loss expected, in order (from the recording).
        device: Where the model is.
        repeats: The most repeats; fewer where `ENOUGH_NS` have been measured, but every operator is timed twice.

    Returns:
        Nanoseconds for each expected operator; nanoseconds of forward and loss; and whether the real forward ran
        exactly the expected operators. When it did not (data-dependent paths), times are matched by operator name and
        occurrence.
    """
    place = device_of(device)
    runs: list[list[int]] = []
    seen: list[str] = []

    def run() -> None:
        forward_without_saving(step)

    def run_marked() -> None:
        marker = _Marker()
        with torch_profile(activities=place.activities) as profiler:
            with marker:
                run()
            place.synchronize()
        durations = marked_durations(kineto_events(profiler), _MARK, on_device=place.runs_behind)
        assert len(durations) == len(marker.names), "torch.profiler dropped operators"
        runs.append(_match(marker.names, durations, names))
        seen[:] = marker.names

    run_marked()
    forward_ns = timed_ns(run, device, repeats, between=run_marked)
    return [median_low(times) for times in zip(*runs, strict=True)], forward_ns, seen == list(names)


def _match(seen: Sequence[str], durations: Sequence[int], expected: Sequence[str]) -> list[int]:
    if list(seen) == list(expected):
        return list(durations)
    by_occurrence = dict(zip(_occurrences(seen), durations, strict=True))
    return [by_occurrence.get(key, 0) for key in _occurrences(expected)]


def _occurrences(names: Sequence[str]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    keys: list[tuple[str, int]] = []
    for name in names:
        keys.append((name, counts[name]))
        counts[name] += 1
    return keys


def timed_ns(
    run: Callable[[], Any],
    device: torch.device,
    repeats: int,
    *,
    known: Sequence[int] = (),
    between: Callable[[], Any] | None = None,
) -> int:
    """Return the (low) median wall time of a run that is warmed up, in nanoseconds, the device's work included.

    Args:
        run: What is timed.
        device: Where its work is done.
        repeats: The most times taken; fewer where `ENOUGH_NS` have been measured.
        known: Times taken already.
        between: Run after each run.
    """
    place = device_of(device)
    times = list(known)
    while len(times) < repeats and sum(times) < ENOUGH_NS:
        place.synchronize()
        start = time.perf_counter_ns()
        result = run()
        place.synchronize()
        times.append(time.perf_counter_ns() - start)
        del result
        if between is not None:
            between()
    return median_low(times)


def train_once(step: Step) -> None:
    """Run forward, loss and backward, and drop the gradients."""
    step.train()
    step.model.zero_grad(set_to_none=True)
