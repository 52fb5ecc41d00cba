"""What people write by hand: torch.utils.checkpoint around blocks, and timing of several ways in turn."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from remat.profiler.allocator import collected
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

Arm = Callable[[], AbstractContextManager]


@contextmanager
def each_checkpointed(modules: Sequence[nn.Module], contexts: Sequence[Callable] | None = None) -> Iterator[None]:
    """Call every one of these modules under a checkpoint of its own.

    Args:
        modules: What to checkpoint.
        contexts: For each, what returns the contexts of its forward and of its replay; None checkpoints all inside.
    """
    for module, context in zip(modules, contexts or [noop_context_fn] * len(modules), strict=True):
        module.forward = _checkpointed(module.forward, context)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _checkpointed(forward: Callable, context: Callable) -> Callable:
    def wrapped(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context, **kwargs)

    return wrapped


@contextmanager
def runs_checkpointed(chain: nn.Sequential, runs: Sequence[Sequence[int]]) -> Iterator[None]:
    """Call these runs of a chain's members under a checkpoint each, the other members as they are.

    The checkpoint does what planned segments do: it brings random states back and stops a replay early.
    """
    members = list(chain)
    first = {run[0]: run for run in runs}

    def forward(value):
        position = 0
        while position < len(members):
            run = first.get(position)
            if run is None:
                value = members[position](value)
                position += 1
            else:
                run_members = _run_of([members[index] for index in run])
                value = checkpoint(run_members, value, use_reentrant=False, preserve_rng_state=True, early_stop=True)
                position += len(run)
        return value

    chain.forward = forward
    try:
        yield
    finally:
        del chain.forward


def _run_of(members: Sequence[nn.Module]) -> Callable:
    def run(value):
        for member in members:
            value = member(value)
        return value

    return run


@dataclass(frozen=True, slots=True)
class Times:
    """Hold the seconds that each timed step took.

    Attributes:
        wall: By the clock.
        cpu: Of the process, on all its threads: steadier where others use the machine too.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@collected()
def timed_in_turn(
    step: Callable[[], None], arms: Mapping[str, Arm], rounds: int, *, warm: bool = False, each: int = 1
) -> dict[str, Times]:
    """Time a step under every arm, in turn, after one round that warms up; times by arm.

    The order turns round with every round, so that neither drift nor neighbours favour an arm. What is alive before,
    a planner's records above all, is left out of garbage collections: a training loop has none of it.

    Args:
        step: What to time.
        arms: By name, what to be inside of.
        rounds: How often each is timed.
        warm: Run the step once untimed each time an arm is entered, so that work done once an entry does not count.
        each: How many steps are timed each time an arm is entered.
    """
    times = {name: Times() for name in arms}
    names = list(arms)
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            with arms[name]():
                if warm:
                    step()
                marks = [(time.perf_counter(), time.process_time())]
                for _ in range(each):
                    step()
                    marks.append((time.perf_counter(), time.process_time()))
            if number:
                times[name].wall.extend(stop - start for (start, _), (stop, _) in pairwise(marks))
                times[name].cpu.extend(stop - start for (_, start), (_, stop) in pairwise(marks))
    return times


def ratio(seconds: Mapping[str, list[float]], arm: str, base: str) -> float:
    """Return the median of two arms' ratios in each turn: a machine that slows down between turns slows both."""
    return median(ours / others for ours, others in zip(seconds[arm], seconds[base], strict=True))


def largest_difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of gradients."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
