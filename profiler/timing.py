"""Measure operator and step times on the model's own device, warmed up by the caller."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile
from torch.utils._python_dispatch import TorchDispatchMode

from .internals import kineto_events, ran_on_cpu
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


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    runs: list[list[int]] = []
    seen: list[str] = []

    def run() -> None:
        forward_without_saving(step)

    def run_marked() -> None:
        marker = _Marker()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        with torch_profile(activities=activities) as profiler:
            with marker:
                run()
            synchronize(device)
        durations = _durations(profiler, device)
        assert len(durations) == len(marker.names), "torch.profiler dropped operators"
        runs.append(_match(marker.names, durations, names))
        seen[:] = marker.names

    run_marked()
    forward_ns = timed_ns(run, device, repeats, between=run_marked)
    return [median_low(times) for times in zip(*runs, strict=True)], forward_ns, seen == list(names)


def _durations(profiler: Any, device: torch.device) -> list[int]:
    events = kineto_events(profiler)
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() == _MARK and ran_on_cpu(event)
    )
    starts = [start for start, _ in marks]
    durations = [0] * len(marks)

    def mark_of(event: Any) -> int | None:
        position = bisect_right(starts, event.start_ns()) - 1
        inside = position >= 0 and event.start_ns() + event.duration_ns() <= marks[position][1]
        return position if inside else None

    on_cpu = [event for event in events if ran_on_cpu(event) and event.name() not in (_MARK, "[memory]")]
    if device.type != "cuda":
        for event in on_cpu:
            position = mark_of(event)
            if position is not None:
                durations[position] = max(durations[position], event.duration_ns())
        return durations
    mark_of_launch = {event.correlation_id(): mark_of(event) for event in on_cpu}
    for event in events:
        if not ran_on_cpu(event) and event.name() != _MARK:
            position = mark_of_launch.get(event.linked_correlation_id())
            if position is not None:
                durations[position] += event.duration_ns()
    return durations


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
    times = list(known)
    while len(times) < repeats and sum(times) < ENOUGH_NS:
        synchronize(device)
        start = time.perf_counter_ns()
        result = run()
        synchronize(device)
        times.append(time.perf_counter_ns() - start)
        del result
        if between is not None:
            between()
    return median_low(times)


def train_once(step: Step) -> None:
    """Run forward, loss and backward, and drop the gradients."""
    step.train()
    step.model.zero_grad(set_to_none=True)
