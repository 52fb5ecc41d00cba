"""Try a plan before it is handed out: run the planned step for real, and compare it with the unmodified one.

A dry run tells what a plan costs, not what it computes. A replay that computes something else of the same shape gives
wrong gradients without a word: a counter in a closure, say, is out of a recorder's sight. Here that shows, and the
calls responsible are found by planning them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from ...profiler.allocator import fits
from ...profiler.devices import device_of, is_out_of_memory
from ...profiler.repeatability import Repeatability
from ...profiler.results import Results, run_steps
from ...profiler.step import Step
from ..applier.apply import apply_segments, unplanned
from ..plan import PlannedSegment

AGAIN = 2
"""Times that a plan which differed must differ again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Hold segments whose replay computes something else, and what showed it.

    Attributes:
        segments: One segment as small as could be found; several where only their combination differs.
        reason: What differs, in words.
    """

    segments: tuple[PlannedSegment, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Hold what came of running a plan for real.

    Attributes:
        faults: Segments whose replay computes something else.
        unchecked: Why the plan could not be checked, "" where it could.
        peak_bytes: What the planned step allocated at most; None where none was run.
    """

    faults: tuple[Fault, ...] = ()
    unchecked: str = ""
    peak_bytes: int | None = None


class Checker:
    """Run planned steps and compare them with the unmodified step, which is run once."""

    def __init__(self, reference: Results | None = None) -> None:
        self._reference = reference
        self._repeatability: Repeatability | None = None

    def check(self, step: Step, segments: Sequence[PlannedSegment], needed_bytes: int) -> Checked:
        """Run a plan's segments for real, and find those whose replay computes something else.

        Args:
            step: The step planned for.
            segments: The plan's top-level segments.
            needed_bytes: What the unmodified step allocates; where the device has not that much, nothing is run.
        """
        device = next(step.model.parameters()).device
        if not segments:
            return Checked()
        if not fits(needed_bytes, device):
            return Checked(unchecked="the plan's replay was not compared with the unmodified step, which does not fit")
        try:
            with unplanned(step.model):
                return self._checked(step, tuple(segments))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            first = str(error).strip().partition("\n")[0]
        # Outside of the handler: the error held the frames of the step, and those its tensors.
        device_of(device).release_cached()
        return Checked(unchecked=f"the plan was not tried: memory ran out in a real step ({first})")

    def _checked(self, step: Step, segments: tuple[PlannedSegment, ...]) -> Checked:
        if self._reference is not None:
            found, peak_bytes = self._compared(step, segments, self._reference)
            if not found:
                return Checked(peak_bytes=peak_bytes)
        # What is known may be of another moment: weights trained since, random numbers drawn.
        self._reference = reference = run_steps(step, nullcontext)
        found, peak_bytes = self._compared(step, segments, reference)
        if not found:
            return Checked(peak_bytes=peak_bytes)
        if self._repeatability is None:
            self._repeatability = Repeatability(reference, lambda: run_steps(step, nullcontext))
        # Blamed is only what differs every time, from a step that repeats there: noise does not.
        for _ in range(AGAIN):
            found, peak_bytes = self._compared(step, segments, reference)
            if not found:
                break
        else:
            return Checked(faults=tuple(self._faults(step, segments)), peak_bytes=peak_bytes)
        unchecked = self._repeatability.words() or (
            "the planned step does not repeat itself bit for bit: what it computed differed once from the unmodified "
            "one, and not again"
        )
        return Checked(unchecked=unchecked, peak_bytes=peak_bytes)

    def _compared(self, step: Step, segments: Sequence[PlannedSegment], reference: Results) -> tuple[str, int | None]:
        """Run the planned step; say what differs first, "" where nothing does, and what the step allocated."""
        model = step.model
        try:
            planned = run_steps(step, lambda: apply_segments(model, segments, training=model.training))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines()
            return f"it raises {type(error).__name__}: {lines[0] if lines else 'no message'}", None
        known = self._repeatability
        differs = planned.first_difference(reference) if known is None else known.difference(planned, reference)
        return differs, planned.peak_bytes

    def _differs(self, step: Step, segments: Sequence[PlannedSegment]) -> str:
        # Each against a fresh unmodified step: state out of our sight may have moved with the last planned one.
        return self._compared(step, segments, run_steps(step, nullcontext))[0]

    def _faults(self, step: Step, segments: tuple[PlannedSegment, ...]) -> list[Fault]:
        """Halve the segments until those are found that differ on their own."""
        reason = self._differs(step, segments)
        if not reason:
            return []
        if len(segments) == 1:
            return self._faults_inside(step, segments[0], reason)
        middle = len(segments) // 2
        found = self._faults(step, segments[:middle]) + self._faults(step, segments[middle:])
        return found or [Fault(segments=segments, reason=reason)]

    def _faults_inside(self, step: Step, segment: PlannedSegment, reason: str) -> list[Fault]:
        """Take a segment's members one at a time, and what is nested or kept in it away."""
        if segment.children or segment.save:
            bare = replace(segment, children=(), save=())
            if not self._differs(step, (bare,)):
                return [Fault(segments=(segment,), reason=reason)]
            segment = bare
        if len(segment.members) > 1:
            alone = [replace(segment, members=(member,), crosses_operators=False) for member in segment.members]
            found = [(single, self._differs(step, (single,))) for single in alone]
            faults = [Fault(segments=(single,), reason=why) for single, why in found if why]
            if faults:
                return faults
        return [Fault(segments=(segment,), reason=reason)]
