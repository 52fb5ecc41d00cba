"""Solve, dry-run the plan, tighten, until the dry run fits: a solver's figure is a model, the dry run is the truth."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from ...profiler import Profile, Session
from ...profiler.allocator import allocated_peak_bytes
from ...profiler.caching_allocator import AllocatorSettings
from ...profiler.reserved import reserved_bytes
from ...profiler.results import differing
from ...profiler.step_record import StepRecord
from ...solvers import SOLVERS, BudgetTooSmallError, Segment, Solution
from ..applier.apply import apply_segments, unplanned
from ..bridge.bridge import Bridge
from ..budget import format_bytes
from ..errors import ApplyError
from ..plan import PlannedSegment

ROUNDS = 8
"""Most rounds of solving and dry-running."""
REMEMBERED = 16
"""Dry runs kept: solvers often come to the same plan."""
UNSEEN = 0.01
"""Where the allocator gave out this share of the peak more than was recorded, planned steps are measured for real."""
CLOSE = 0.002
"""A memory model that overstated a plan by less than this share of the budget is not asked again."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Hold a solution, the segments it names on the model, and their dry run.

    Attributes:
        solution: The solver's answer.
        segments: Its segments by name.
        recording: What was recorded, of one rank where the model will be sharded.
        alive_bytes: The most that is alive in it.
        peak_bytes: The step's peak, the optimizer's own step included; on a card with what is reserved beside it.
        beside_bytes: What is reserved beside what is allocated, and the context; 0 where allocated bytes run out.
    """

    solution: Solution
    segments: tuple[PlannedSegment, ...]
    recording: StepRecord
    alive_bytes: int
    peak_bytes: int
    beside_bytes: int


class DryRunFailedError(Exception):
    """Carry the segments under which a step failed that runs without them."""

    def __init__(self, segments: tuple[PlannedSegment, ...], cause: Exception) -> None:
        super().__init__(str(cause))
        self.segments = segments
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Search:
    """Find plans for one profiled step.

    Attributes:
        profile: The recorded step, that of one rank where there are several.
        whole: The recorded step of the whole model, which is run here; `profile` where nothing is.
        bridge: Its stages and candidates.
        session: Records the planned steps as the unplanned one was recorded.
    """

    profile: Profile
    whole: Profile
    bridge: Bridge
    session: Session
    _dry_runs: dict[tuple[PlannedSegment, ...], tuple[StepRecord, int, int]] = field(default_factory=dict, repr=False)

    def best_or_failure(
        self, limit: int, solver: str, time_limit_s: float | None, gap: float, say: Callable[[str], None]
    ) -> Trial | DryRunFailedError:
        """Return the cheapest trial that fits a limit, else that of least peak; or why a dry run failed."""
        try:
            found = self._best(limit, solver, time_limit_s, gap, say)
            if solver == "dp_nested":
                # What is alive inside nested replays is foreseen less well: where that cost rounds, `dp` may be ahead.
                found = min(found, self._best(limit, "dp", time_limit_s, gap, say), key=lambda t: _rank(t, limit))
            return found
        except DryRunFailedError as failed:
            return failed

    def _best(
        self, limit: int, solver: str, time_limit_s: float | None, gap: float, say: Callable[[str], None]
    ) -> Trial:
        """Solve and dry-run until a plan fits the limit; else return the trial of least peak."""
        best: Trial | None = None
        least: Trial | None = None
        target, ceiling, infeasible = limit - self.beside_bytes(self.profile), None, False
        tried: set[tuple[Segment, ...]] = set()
        for round_number in range(1, ROUNDS + 1):
            say(f"{solver}, round {round_number}: solving for {format_bytes(target)}")
            try:
                problem = self.bridge.problem(max(1, target))
                solution = SOLVERS[solver](problem, time_limit_s=time_limit_s, gap=gap)
                infeasible = False
            except BudgetTooSmallError as error:
                solution, infeasible = error.solution, True
            if solution.segments in tried:
                break
            tried.add(solution.segments)
            say(f"{solver}, round {round_number}: dry run of {solution.count_segments()} segments")
            trial = self.trial(solution)
            if least is None or trial.peak_bytes < least.peak_bytes:
                least = trial
            if trial.peak_bytes <= limit:
                if best is None or trial.solution.added_ns < best.solution.added_ns:
                    best = trial
                overstated = solution.peak_bytes + trial.beside_bytes - trial.peak_bytes
                raised = target + overstated
                if ceiling is not None:
                    raised = min(raised, (target + ceiling) // 2)
                if infeasible or solution.added_ns == 0 or raised <= target + CLOSE * limit:
                    break
                target = raised
            elif infeasible:
                break
            else:
                # Below this plan's own simulated peak, or a solver may well answer with the same plan again.
                ceiling = solution.peak_bytes if ceiling is None else min(ceiling, solution.peak_bytes)
                target = solution.peak_bytes - max(trial.peak_bytes - limit, 1)
        if best is not None:
            return best
        assert least is not None
        names = {"sqrt"} if infeasible else {solver, "sqrt"}
        found = [least, self.unplanned_trial(), *(self._least(name, time_limit_s) for name in sorted(names))]
        return min(found, key=lambda trial: trial.peak_bytes)

    def _least(self, solver: str, time_limit_s: float | None) -> Trial:
        """Return the trial of a solver's plan of least peak."""
        try:
            solution = SOLVERS[solver](self.bridge.problem(1), time_limit_s=time_limit_s)
        except BudgetTooSmallError as error:
            solution = error.solution
        return self.trial(solution)

    def unplanned_trial(self) -> Trial:
        """Return the trial of no segments."""
        return self.trial(SOLVERS["none"](self.bridge.problem(self.profile.peak_bytes())))

    def trial(self, solution: Solution) -> Trial:
        """Apply a solution's segments, record the planned step, and take them off again."""
        segments = tuple(self.bridge.planned(segment) for segment in solution.segments)
        recording, alive, beside = self.dry_run(segments)
        peak = max(alive, self.profile.parts.optimizer_step_peak) + beside
        return Trial(solution, segments, recording, alive, peak, beside)

    def dry_run(self, segments: tuple[PlannedSegment, ...]) -> tuple[StepRecord, int, int]:
        """Return the record of a planned step, and bytes: the most alive in it, and what is beside them."""
        if segments not in self._dry_runs:
            if len(self._dry_runs) >= REMEMBERED:
                del self._dry_runs[next(iter(self._dry_runs))]
            self._dry_runs[segments] = self._dry_run(segments)
        return self._dry_runs[segments]

    def guilty(self, failed: DryRunFailedError) -> list[DryRunFailedError]:
        """Find by dry runs what fails one on its own: of a segment's members, neighbours, where it can be told."""
        segments = failed.segments
        if len(segments) > 1:
            middle = len(segments) // 2
            halves = [self._failure(half) for half in (segments[:middle], segments[middle:])]
            return [found for half in halves if half is not None for found in self.guilty(half)] or [failed]
        assert len(segments) == 1
        segment = segments[0]
        neighbours = [
            replace(segment, members=pair, children=(), save=(), crosses_operators=True)
            for pair in pairwise(segment.members)
        ]
        if len(neighbours) < 2:
            return [failed]
        found = [self._failure((neighbour,)) for neighbour in neighbours]
        return [failure for failure in found if failure is not None] or [failed]

    def _failure(self, segments: tuple[PlannedSegment, ...]) -> DryRunFailedError | None:
        try:
            self._dry_run(segments)
        except DryRunFailedError as failed:
            return failed
        return None

    def _dry_run(self, segments: tuple[PlannedSegment, ...]) -> tuple[StepRecord, int, int]:
        """Return the recording, the most bytes alive in it, and what is beside them."""
        model = self.session.step.model
        try:
            with unplanned(model), apply_segments(model, segments, training=model.training):
                recording = self.session.record(self.profile.bytes_from, planned=True)
                left = self.session.step.guard.left
                measured = self._measured_bytes()
        except Exception as error:
            raise DryRunFailedError(segments, error) from error
        left = self._left_otherwise(left)
        if left:
            raise DryRunFailedError(segments, _left_error(segments, left))
        recorded = recording.peak_bytes() + self.profile.parts.optimizer + self.profile.library_bytes
        unseen = max(0, measured - recorded) if measured else self.unseen_bytes(segments)
        return recording, recorded + unseen, self.beside_bytes(recording)

    def _left_otherwise(self, left: dict[str, object]) -> list[str]:
        """Name what a planned step has left in Python's objects otherwise than the unmodified one does, every time."""
        session = self.session
        if session.step.repeatable_hooks or not differing(left, session.left):
            return []
        known = session.left
        with unplanned(session.step.model):
            session.record(self.profile.bytes_from)
        varying = differing(known, session.left)
        return [name for name in differing(left, session.left) if name not in varying]

    def beside_bytes(self, recording: StepRecord) -> int:
        """Return what a step needs beside its allocated bytes, where reserved bytes are what runs out; else 0.

        That is what the caching allocator reserves without a tensor in it, by the model of it, and the context.
        """
        place, parts = self.session.place, self.profile.parts
        if place.budget_on == "allocated":
            return 0
        held = parts.parameters + parts.buffers + parts.batch + parts.gradients + parts.optimizer
        replayed = reserved_bytes(
            recording,
            state_bytes=parts.optimizer,
            optimizer_bytes=max(0, parts.optimizer_step_peak - held),
            settings=AllocatorSettings.of(os.environ),
        )
        return replayed.cached_bytes + place.context_bytes()

    def unplanned_peak_bytes(self) -> int:
        """Return the peak of the unplanned step, by the figure that runs out on its device."""
        return self.profile.peak_bytes() + self.beside_bytes(self.profile)

    def _measured_bytes(self) -> int:
        """Return the allocator's peak of the step as the model is now, where a recording does not tell it; else 0.

        That is where fake tensors could not be used, or where the unplanned step allocated more than was recorded: what
        depends on data, or is hidden inside a library (recurrent layers), is then not guessed.
        """
        profile, session = self.whole, self.session
        told = profile.bytes_from == "dry run" and profile.unseen_bytes <= UNSEEN * profile.peak_bytes()
        if told or profile.accumulation or session.ranks is not None:
            return 0
        with session.step.guard.preserved():
            return self.with_entry(allocated_peak_bytes(session.step.train, session.device))

    def with_entry(self, allocated: int) -> int:
        """Return the peak of a step by what the allocator gave out in it: nothing unseen is left to add."""
        return allocated + self.whole.fixed_bytes() - self.whole.unseen_bytes

    def unseen_bytes(self, segments: tuple[PlannedSegment, ...]) -> int:
        """Return what a planned step holds beyond its dry run, counted as alive throughout.

        Besides what the profile missed, that is what torch's checkpoint keeps of the random state, which is no
        operator's output: once per region, once more in a replay. It lies in the CPU's memory whatever the device.
        """
        if self.session.card is not None or not self.session.place.keeps_random_state_on_host:
            return self.profile.unseen_bytes
        regions = sum(1 for segment in segments for _ in segment.walk())
        random_state = (regions + 1) * torch.get_rng_state().nbytes if regions else 0
        return self.profile.unseen_bytes + random_state


def _left_error(segments: tuple[PlannedSegment, ...], left: list[str]) -> ApplyError:
    names = ", ".join(str(segment) for segment in segments)
    return ApplyError(
        f"segment {names}: after a planned step {left[0]} is another than after the unmodified one (a counter, or a "
        "list that grows?): a replay changes it once more. Change it outside of the model, or in the outermost forward"
    )


def _rank(trial: Trial, limit: int) -> tuple[bool, int]:
    """Order trials: those that fit by added time, then the others by peak."""
    fits = trial.peak_bytes <= limit
    return not fits, trial.solution.added_ns if fits else trial.peak_bytes
