"""Measure operator and step times on the model's own device, warmed up by the caller.

A replay is a forward that saves. So operators are timed where they do just that: in the forward of real training steps,
with all that earlier steps left behind in allocators and caches. On a CPU a forward that saves nothing takes its memory
from what it has just given back, and is a tenth faster on a ResNet-50.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch.profiler import profile as torch_profile
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from .devices import Device, device_of
from .internals import kineto_events
from .kernels import marked_durations
from .step import Step
from .times import Spread

_MARK = "remat.operator"
ENOUGH_NS = 2_000_000_000
"""Runs are not repeated beyond this, but twice: what disturbs a short one averages out in them."""
BUSY = 1.2
"""A machine is busy with other work where runs take this many times the CPU time by the clock on the wall."""
MOST_FORWARD = 0.6
"""A forward takes a third of a step where backward makes two products for each of forward's, and half where nearly all
parameters are frozen; a larger share than this is something else's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Hold how long a step and its operators take.

    Attributes:
        operators_ns: Nanoseconds of each expected operator of forward and loss: its own work, by median over repeats.
        forward: Forward and loss.
        step: Forward, loss and backward; None where backward was not run.
        same: Whether the real forward ran exactly the expected operators. When it did not (data-dependent paths), times
            are matched by operator name and occurrence.
        wall_over_clock: What the runs took by the clock on the wall, over what they took by the device's clock.
    """

    operators_ns: tuple[int, ...]
    forward: Spread
    step: Spread | None
    same: bool
    wall_over_clock: float

    def doubts(self) -> list[str]:
        """Say what about these times is not to be believed, or needs an explanation."""
        found: list[str] = []
        for name, spread in (("forward", self.forward), ("step", self.step)):
            if spread is not None and not spread.is_steady:
                found.append(f"repeats of the {name} differ widely: {spread}")
        if self.step is not None and self.forward.median_ns > MOST_FORWARD * self.step.median_ns:
            share = 100 * self.forward.median_ns / self.step.median_ns
            found.append(
                f"forward took {share:.0f} % of the measured step, more than usual: either Python's own time dominates "
                "(small operators) or the machine was disturbed; the added time is less certain"
            )
        if self.wall_over_clock > BUSY:
            found.append(f"the machine is busy: runs took {self.wall_over_clock:.1f} times their CPU time")
        return found


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


class _Clocked(TorchDispatchMode):
    """Time every operator by the clock of a device that runs it at once."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        super().__init__()
        self.names: list[str] = []
        self.durations: list[int] = []
        self._clock_ns = clock_ns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or func is torch.ops.aten.detach.default:
            return func(*args, **(kwargs or {}))
        start = self._clock_ns()
        out = func(*args, **(kwargs or {}))
        self.durations.append(self._clock_ns() - start)
        self.names.append(str(func))
        return out


def forward_without_saving(step: Step) -> torch.Tensor:
    """Run forward and loss with autograd on but saving nothing: training's operators in inference's memory."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _never):
        return step.loss_of(step.forward())


def _never(_: object) -> torch.Tensor:
    raise AssertionError("backward of a forward that saved nothing")


def step_times(step: Step, names: Sequence[str], device: torch.device, repeats: int, *, trains: bool) -> StepTimes:
    """Time a step and every operator of its forward.

    Args:
        step: The step, warmed up; its model's state must be preserved by the caller.
        names: The operators of forward and loss expected, in order (from the recording).
        device: Where the model is.
        repeats: The most repeats; fewer where `ENOUGH_NS` have been measured, but two at least.
        trains: Run whole training steps. Where they do not fit the device, forwards that save nothing are timed.
    """
    place = device_of(device)
    timed = _Runs(step, place, trains)
    marked: list[list[int]] = []
    seen: list[str] = []
    for number in range(max(2, repeats)):
        if number >= 2 and timed.wall_ns >= ENOUGH_NS:
            break
        timed.run()
        seen, durations = _marked_run(step, place, trains)
        marked.append(_match(seen, durations, names))
    return StepTimes(
        operators_ns=tuple(median_low(times) for times in zip(*marked, strict=True)),
        forward=Spread.of(timed.forward_ns),
        step=Spread.of(timed.step_ns) if trains else None,
        same=seen == list(names),
        wall_over_clock=timed.wall_ns / max(1, sum(timed.step_ns)),
    )


class _Runs:
    """Time steps, and the forwards in them."""

    def __init__(self, step: Step, place: Device, trains: bool) -> None:
        self._step, self._place, self._trains = step, place, trains
        self.forward_ns: list[int] = []
        self.step_ns: list[int] = []
        self.wall_ns = 0

    def run(self) -> None:
        wall, start = time.perf_counter_ns(), self._place.clock_ns()
        _run(self._step, self._trains, lambda: self.forward_ns.append(self._place.clock_ns() - start))
        self.step_ns.append(self._place.clock_ns() - start)
        self.wall_ns += time.perf_counter_ns() - wall
        _drop_gradients(self._step)


def _run(step: Step, trains: bool, after_forward: Callable[[], None]) -> None:
    """Run a step, or its forward alone."""
    if trains:
        step.train(before_backward=after_forward)
    else:
        forward_without_saving(step)
        after_forward()


def _marked_run(step: Step, place: Device, trains: bool) -> tuple[list[str], list[int]]:
    """Run a step and return the operators of its forward, with the nanoseconds of each."""
    with ExitStack() as forward:
        if not place.runs_behind:
            clocked = forward.enter_context(_Clocked(place.clock_ns))
            _run(step, trains, forward.close)
            names, durations = clocked.names, clocked.durations
        else:
            profiler = forward.enter_context(torch_profile(activities=place.activities))
            forward.callback(place.synchronize)
            marker = forward.enter_context(_Marker())
            _run(step, trains, forward.close)
            names = marker.names
            durations = marked_durations(kineto_events(profiler), _MARK, on_device=True)
    assert len(durations) == len(names), "torch.profiler dropped operators"
    _drop_gradients(step)
    return names, durations


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


def timed_ns(run: Callable[[], Any], device: torch.device) -> int:
    """Return the time of a run that is warmed up, in nanoseconds by the device's clock, its work included."""
    place = device_of(device)
    start = place.clock_ns()
    result = run()
    taken = place.clock_ns() - start
    del result
    return taken


def train_once(step: Step) -> None:
    """Run forward, loss and backward, and drop the gradients."""
    step.train()
    _drop_gradients(step)


def _drop_gradients(step: Step) -> None:
    step.model.zero_grad(set_to_none=True)
