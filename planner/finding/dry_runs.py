"""Record planned steps as the unplanned one was recorded: a solver's figure is a model, a dry run is the truth."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from ...profiler import Profile, Session
from ...profiler.allocator import allocated_peak_bytes
from ...profiler.caching_allocator import AllocatorSettings
from ...profiler.reserved import reserved_bytes
from ...profiler.results import differing
from ...profiler.step_record import StepRecord
from ..applier.apply import apply_segments, unplanned
from ..errors import ApplyError
from ..segments import PlannedSegment

REMEMBERED = 16
"""Dry runs kept: solvers often come to the same plan."""
UNSEEN = 0.01
"""Where the allocator gave out this share of the peak more than was recorded, planned steps are measured for real."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Hold the record of a planned step.

    Attributes:
        record: What was recorded, of one rank where the model will be sharded.
        alive_bytes: The most that is alive in it.
        beside_bytes: What is reserved beside what is allocated, and the context; 0 where allocated bytes run out.
    """

    record: StepRecord
    alive_bytes: int
    beside_bytes: int


class DryRunFailedError(Exception):
    """Carry the segments under which a step failed that runs without them."""

    def __init__(self, segments: tuple[PlannedSegment, ...], cause: Exception) -> None:
        super().__init__(str(cause))
        self.segments = segments
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRuns:
    """Dry-run plans of one profiled step.

    Attributes:
        profile: The recorded step, that of one rank where there are several.
        whole: The recorded step of the whole model, which is run here; `profile` where nothing is.
        session: Records the planned steps as the unplanned one was recorded.
    """

    profile: Profile
    whole: Profile
    session: Session
    _known: dict[tuple[PlannedSegment, ...], DryRun] = field(default_factory=dict, repr=False)

    def of(self, segments: tuple[PlannedSegment, ...]) -> DryRun:
        """Apply segments, record the planned step, and take them off again.

        Raises:
            DryRunFailedError: The step fails under them.
        """
        if segments not in self._known:
            if len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[segments] = self._run(segments)
        return self._known[segments]

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

    def beside_bytes(self, record: StepRecord) -> int:
        """Return what a step needs beside its allocated bytes, where reserved bytes are what runs out; else 0.

        That is what the caching allocator reserves without a tensor in it, by the model of it, and the context.
        """
        parts = self.profile.parts
        if self.session.budget_on == "allocated":
            return 0
        held = parts.parameters + parts.buffers + parts.batch + parts.gradients + parts.optimizer
        replayed = reserved_bytes(
            record,
            state_bytes=parts.optimizer,
            optimizer_bytes=max(0, parts.optimizer_step_peak - held),
            settings=AllocatorSettings.of(os.environ),
        )
        return replayed.cached_bytes + self.session.context_bytes

    def unplanned_peak_bytes(self) -> int:
        """Return the peak of the unplanned step, by the figure that runs out on its device."""
        return self.profile.peak_bytes() + self.beside_bytes(self.profile)

    def whole_step_bytes(self) -> int:
        """Return what the unmodified step of the whole model allocates."""
        return self.whole.peak_bytes() - self.whole.fixed_bytes()

    def missed_bytes(self, run: DryRun, allocated: int | None) -> int:
        """Return what a real planned step allocated beyond its dry run; 0 where the two cannot be compared.

        Args:
            run: The dry run.
            allocated: The allocator's peak over the real step; None where none was run.
        """
        if allocated is None or self.whole.accumulation or self.session.ranks is not None:
            return 0
        return max(0, self._with_entry(allocated) - run.alive_bytes)

    def _failure(self, segments: tuple[PlannedSegment, ...]) -> DryRunFailedError | None:
        try:
            self._run(segments)
        except DryRunFailedError as failed:
            return failed
        return None

    def _run(self, segments: tuple[PlannedSegment, ...]) -> DryRun:
        model = self.session.step.model
        try:
            with unplanned(model), apply_segments(model, segments, training=model.training):
                record = self.session.record(self.profile.bytes_from, planned=True, role=partial(_role, segments))
                left = self.session.step.guard.left
                measured = self._measured_bytes()
        except Exception as error:
            raise DryRunFailedError(segments, error) from error
        left = self._left_otherwise(left)
        if left:
            raise DryRunFailedError(segments, _left_error(segments, left))
        recorded = record.peak_bytes() + self.profile.parts.optimizer + self.profile.library_bytes
        unseen = max(0, measured - recorded) if measured else self._unseen_bytes(segments)
        return DryRun(record=record, alive_bytes=recorded + unseen, beside_bytes=self.beside_bytes(record))

    def _left_otherwise(self, left: dict[str, object]) -> list[str]:
        """Name what a planned step has left in Python's objects otherwise than the unmodified one does, every time."""
        session = self.session
        # What sharding makes is new in every dry run.
        if session.ranks is not None or session.step.repeatable_hooks or not differing(left, session.left):
            return []
        known = session.left
        with unplanned(session.step.model):
            session.record(self.profile.bytes_from)
        varying = differing(known, session.left)
        return [name for name in differing(left, session.left) if name not in varying]

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
            return self._with_entry(allocated_peak_bytes(session.step.train, session.device))

    def _with_entry(self, allocated: int) -> int:
        """Return the peak of a step by what the allocator gave out in it: nothing unseen is left to add."""
        return allocated + self.whole.fixed_bytes() - self.whole.unseen_bytes

    def _unseen_bytes(self, segments: tuple[PlannedSegment, ...]) -> int:
        """Return what a planned step holds beyond its dry run, counted as alive throughout.

        Besides what the profile missed, that is what torch's checkpoint keeps of the random state, which is no
        operator's output: once per region, once more in a replay. It lies in the CPU's memory whatever the device.
        """
        if self.session.card is not None or not self.session.place.keeps_random_state_on_host:
            return self.profile.unseen_bytes
        regions = sum(1 for segment in segments for _ in segment.walk())
        random_state = (regions + 1) * torch.get_rng_state().nbytes if regions else 0
        return self.profile.unseen_bytes + random_state


def _role(segments: tuple[PlannedSegment, ...], block: str) -> Hashable:
    """Return what a plan has in store for a block: the same for two of which one can be known from the other.

    Those are the segments within it, by what they are called there, and those it is in. The save set of one around
    several blocks counts operators over all of them, and a segment may begin in one block and end in another: such
    blocks have nothing in common with others.
    """
    prefix = f"{block}."
    found: list[Hashable] = []
    for number, segment in enumerate(found for top in segments for found in top.walk()):
        names = [f"{member.module}." if member.module else "" for member in segment.members]
        within = [name for name in names if name.startswith(prefix)]
        around = within == [prefix] if len(names) > 1 else prefix.startswith(names[0]) and prefix != names[0]
        if within and len(within) == len(names):
            found.append(_renamed(segment, block))
        elif around and not segment.save:
            found.append(number)
        elif within or any(prefix.startswith(name) for name in names):
            return block
    return tuple(found)


def _renamed(segment: PlannedSegment, block: str) -> PlannedSegment:
    return replace(
        segment,
        members=tuple(replace(member, module=member.module[len(block) :]) for member in segment.members),
        children=(),
        restored_buffers=tuple(name[len(block) :] for name in segment.restored_buffers),
    )


def _left_error(segments: tuple[PlannedSegment, ...], left: list[str]) -> ApplyError:
    names = ", ".join(str(segment) for segment in segments)
    return ApplyError(
        f"segment {names}: after a planned step {left[0]} is another than after the unmodified one (a counter, or a "
        "list that grows?): a replay changes it once more. Change it outside of the model, or in the outermost forward"
    )
