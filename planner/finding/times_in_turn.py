"""Time several ways of running a step, in turn, so that neither drift nor other work favours one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from ...profiler.results import Arm
from ...profiler.step import Step
from ...profiler.times import Spread
from ...profiler.timing import BUSY, timed_ns, train_once
from ..phases import Phase

UNPLANNED = "unplanned"
"""The name of the arm in which nothing is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesInTurn:
    """Hold the nanoseconds of every round, by arm; arms have equally many.

    Attributes:
        rounds: They.
        wall_over_clock: What all rounds took by the clock on the wall, over what they took by the device's clock.
    """

    rounds: Mapping[str, tuple[int, ...]]
    wall_over_clock: float = 1.0

    @property
    def doubt(self) -> str:
        """Say why these times are not to be relied on; "" where nothing tells."""
        if self.wall_over_clock > BUSY:
            return f"the machine was busy, steps took {self.wall_over_clock:.1f} times their CPU time"
        spreads = {arm: Spread.of(times) for arm, times in self.rounds.items() if times}
        return next((f"{arm} steps differ widely, {s}" for arm, s in spreads.items() if not s.is_steady), "")

    def median_ns(self, arm: str) -> int | None:
        """Return an arm's median; None where it was not run."""
        times = self.rounds.get(arm, ())
        return int(median(times)) if times else None

    def overhead(self, arm: str) -> float | None:
        """Return what an arm adds, as a share of the unplanned step, by medians; None where either was not run."""
        planned, plain = self.median_ns(arm), self.median_ns(UNPLANNED)
        return planned / plain - 1 if planned and plain else None

    def overhead_range(self, arm: str) -> tuple[float, float] | None:
        """Return the least and the most that an arm added in a round; None where either was not run."""
        pairs = list(zip(self.rounds.get(arm, ()), self.rounds.get(UNPLANNED, ()), strict=False))
        shares = [planned / plain - 1 for planned, plain in pairs]
        return (min(shares), max(shares)) if shares else None


def time_in_turn(
    step: Step, arms: Mapping[str, Arm], device: torch.device, rounds: int, say: Callable[[str], None]
) -> TimesInTurn:
    """Time a step under every arm, in turn; the order turns round with every round.

    Every time an arm is entered the step is run once untimed: its first step prepares what later ones find ready, which
    a training loop pays for once.

    Args:
        step: The step; its model is left as it was.
        arms: By name, what to run it in.
        device: Where the model is.
        rounds: How often each is timed.
        say: Called with a few words before each round.
    """
    times: dict[str, list[int]] = {name: [] for name in arms}
    wall_ns = 0
    names = list(arms)
    for number in range(rounds):
        say(Phase("round of timing", number, rounds))
        for name in names if number % 2 else reversed(names):
            with step.guard.preserved(), arms[name]():
                train_once(step)
                start = time.perf_counter_ns()
                times[name].append(timed_ns(lambda: train_once(step), device))
                wall_ns += time.perf_counter_ns() - start
    clock_ns = sum(map(sum, times.values()))
    rounds_of = {name: tuple(taken) for name, taken in times.items()}
    return TimesInTurn(rounds=rounds_of, wall_over_clock=wall_ns / clock_ns if clock_ns else 1.0)
