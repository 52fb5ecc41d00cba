"""Measure operator and step times on the model's own device, warmed up by the caller.

A replay is a forward that saves. So operators are timed where they do just that: in forwards of training, with all that
the steps before them left behind in allocators and caches. On a CPU a forward that saves nothing takes its memory from
what it has just given back, and is a tenth faster on a ResNet-50.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch.profiler import profile as torch_profile
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from .allocator import collect
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
CLEAR_NS = 1_000_000
"""Where a step's operators take this much each, watching them adds too little to be seen."""
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
        """Say what about these times is not to be believed."""
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
        return found

    def notes(self) -> list[str]:
        """Say what a reader of these times must know: what is doubtful, and that others used the machine."""
        busy = f"the machine is busy: runs took {self.wall_over_clock:.1f} times their CPU time"
        return [*self.doubts(), *([busy] if self.wall_over_clock > BUSY else [])]


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


def step_times(
    step: Step,
    names: Sequence[str],
    device: torch.device,
    repeats: int,
    *,
    trains: bool,
    alike: Sequence[Sequence[range]] = (),
) -> StepTimes:
    """Time a step and every operator of its forward.

    Args:
        step: The step, warmed up; its model's state must be preserved by the caller.
        names: The operators of forward and loss expected, in order (from the recording).
        device: Where the model is.
        repeats: The most repeats; fewer where `ENOUGH_NS` have been measured, or where blocks of a kind show their
            operators' times as often in one repeat, but two at least.
        trains: Run whole training steps. Where they do not fit the device, forwards that save nothing are timed.
        alike: As for `times_of_runs`.
    """
    place = device_of(device)
    timed = TimedRuns(step, place, trains=trains)
    marked: list[list[int]] = []
    seen: list[str] = []
    # What profiling has made so far is no training step's to collect.
    collect()
    enough = 2 if any(len(blocks) >= repeats for blocks in alike) else repeats
    for number in range(max(2, enough)):
        if number >= 2 and timed.wall_ns >= ENOUGH_NS:
            break
        timed.run()
        seen, durations = _marked_forward(step, place, trains)
        marked.append(_match(seen, durations, names))
    return times_of_runs(timed, marked, same=seen == list(names), alike=alike)


def times_of_runs(
    timed: TimedRuns, marked: Sequence[Sequence[int]], *, same: bool, alike: Sequence[Sequence[range]] = ()
) -> StepTimes:
    """Sum up runs of a step.

    Args:
        timed: The runs.
        marked: By run, the nanoseconds of each expected operator.
        same: Whether exactly the expected operators were run.
        alike: By kind of block, the operators of each block; they correspond, and take the median over all blocks.
    """
    operators_ns = [median_low(times) for times in zip(*marked, strict=True)]
    for blocks in alike:
        for corresponding in zip(*blocks, strict=True):
            taken = median_low([times[k] for k in corresponding for times in marked])
            for k in corresponding:
                operators_ns[k] = taken
    return StepTimes(
        operators_ns=tuple(operators_ns),
        forward=Spread.of(timed.forward_ns),
        step=Spread.of(timed.step_ns) if timed.trains else None,
        same=same,
        wall_over_clock=timed.wall_ns / max(1, sum(timed.step_ns)),
    )


class TimedRuns:
    """Time steps, and the forwards in them."""

    def __init__(self, step: Step, place: Device, *, trains: bool = True) -> None:
        self._step, self._place = step, place
        self.trains = trains
        self.forward_ns: list[int] = []
        self.step_ns: list[int] = []
        self.wall_ns = 0

    def run(self) -> None:
        """Run a step, or its forward alone, and drop the gradients."""
        if self.trains:
            self.train()
            _drop_gradients(self._step)
        else:
            self._timed(lambda after_forward: _forward_alone(self._step, after_forward))

    def train(self) -> torch.Tensor:
        """Run a training step; return the loss."""
        return self._timed(self._step.train)

    def _timed(self, run: Callable[[Callable[[], None]], torch.Tensor]) -> torch.Tensor:
        wall, start = time.perf_counter_ns(), self._place.clock_ns()
        loss = run(lambda: self.forward_ns.append(self._place.clock_ns() - start))
        self.step_ns.append(self._place.clock_ns() - start)
        self.wall_ns += time.perf_counter_ns() - wall
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Hold steps that were run for what they allocate, and were timed by the way.

    Attributes:
        timed: The steps.
        operators: Names of the last one's operators, and their nanoseconds.
    """

    timed: TimedRuns
    operators: Sequence[tuple[str, int]]

    def tells_times(self) -> bool:
        """Say whether watching took so little of the steps' time that they stand for steps which are not watched."""
        spread = Spread.of(self.timed.step_ns)
        return spread.low_ns >= CLEAR_NS * len(self.operators) and spread.low_ns >= ENOUGH_NS and spread.is_steady

    def times(self, names: Sequence[str], alike: Sequence[Sequence[range]]) -> StepTimes:
        """Return the times of the operators expected, and of the steps.

        Args:
            names: The operators of forward and loss expected, in order.
            alike: As for `times_of_runs`.
        """
        seen = [name for name, _ in self.operators[: len(names)]]
        marked = _match(seen, [taken for _, taken in self.operators[: len(names)]], names)
        return times_of_runs(self.timed, [marked], same=seen == list(names), alike=alike)


def _forward_alone(step: Step, after_forward: Callable[[], None]) -> torch.Tensor:
    loss = forward_without_saving(step)
    after_forward()
    return loss


def _marked_forward(step: Step, place: Device, trains: bool) -> tuple[list[str], list[int]]:
    """Run forward and loss, of training or saving nothing; return the operators, with the nanoseconds of each."""

    def forward() -> torch.Tensor:
        if not trains:
            return forward_without_saving(step)
        with torch.enable_grad():
            return step.loss_of(step.forward())

    if not place.runs_behind:
        with _Clocked(place.clock_ns) as clocked:
            loss = forward()
        names, durations = clocked.names, clocked.durations
    else:
        with torch_profile(activities=place.activities) as profiler:
            with _Marker() as marker:
                loss = forward()
            place.synchronize()
        names = marker.names
        durations = marked_durations(kineto_events(profiler), _MARK, on_device=True)
    del loss
    assert len(durations) == len(names), "torch.profiler dropped operators"
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
