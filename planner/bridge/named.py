"""Segments that were named by hand, as intervals of operators: what `names` does, the other way round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from ...profiler.records import Profile, StageSpan
from ...solvers.problem import Segment
from ..errors import PlanError
from ..plan import Call, PlannedSegment, SavedOperator
from .save_rules import may_be_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSegment:
    """Hold what a named segment is in a profile.

    Attributes:
        name: What to call it.
        first: Its first operator.
        end: One past its last.
        kept: The operators of its save set, ascending.
        children: What is nested in it.
    """

    name: str
    first: int
    end: int
    kept: tuple[int, ...]
    children: tuple[NamedSegment, ...]


class NamedSegments:
    """Find named segments in a profile.

    Args:
        profile: The recorded step.
        segments: The segments.

    Attributes:
        profile: The step, cut into stages also where these segments begin and end.
        kept: The operators of all save sets, ascending.

    Raises:
        PlanError: A segment names a call or an operator that the step has not, or that cannot be kept.
    """

    def __init__(self, profile: Profile, segments: Iterable[PlannedSegment]) -> None:
        self._recorded = profile
        self._calls = {Call(module=c.module, index=c.index): c for c in profile.calls if c.index >= 0}
        self._runs_of = defaultdict[str, list[int]](list)
        for k, operator in enumerate(profile.operators[: profile.loss_stop]):
            self._runs_of[operator.operator].append(k)
        self._top = self._level(segments)
        every = [item for segment in self._top for item in _walk(segment)]
        self.kept = sorted({k for item in every for k in item.kept})
        bounds = sorted({bound for item in every for bound in (item.first, item.end)})
        stages = tuple(piece for span in profile.stages for piece in _cut(span, bounds))
        self.profile = replace(profile, stages=stages)
        self._position = {span.start: position for position, span in enumerate(stages)}
        self._position[profile.loss_stop] = len(stages)

    def intervals(self) -> list[tuple[str, int, int]]:
        """Return every segment's name, first stage, and one past its last."""
        every = [item for segment in self._top for item in _walk(segment)]
        return [(item.name, self._position[item.first], self._position[item.end]) for item in every]

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments as solvers know them."""
        return tuple(self._segment(item) for item in self._top)

    def _segment(self, item: NamedSegment) -> Segment:
        return Segment(
            start=self._position[item.first],
            stop=self._position[item.end],
            keep=tuple(self.kept.index(k) for k in item.kept),
            children=tuple(self._segment(child) for child in item.children),
        )

    def _level(self, segments: Iterable[PlannedSegment]) -> tuple[NamedSegment, ...]:
        """Return segments side by side, in order."""
        found = sorted((self._found(segment) for segment in segments), key=lambda item: item.first)
        for one, other in pairwise(found):
            if other.first < one.end:
                raise PlanError(f"{one.name} and {other.name} overlap: take one out, or narrow it")
        return tuple(found)

    def _found(self, segment: PlannedSegment) -> NamedSegment:
        missing = [str(member) for member in segment.members if member not in self._calls]
        if missing:
            raise PlanError(f"{segment}: the step makes no call of {missing[0]}; check the name")
        first, end = self._calls[segment.members[0]].start, self._calls[segment.members[-1]].stop
        if end <= first:
            raise PlanError(f"{segment}: it runs no operators; take it out")
        children = self._level(segment.children)
        for child in children:
            if not first <= child.first < child.end <= end or (child.first, child.end) == (first, end):
                raise PlanError(f"{child.name} is not a part of {segment}, and cannot be inside it")
        return NamedSegment(
            name=str(segment),
            first=first,
            end=end,
            kept=tuple(sorted(self._kept(saved, segment, first, end) for saved in segment.save)),
            children=children,
        )

    def _kept(self, saved: SavedOperator, segment: PlannedSegment, first: int, end: int) -> int:
        inside = [k for k in self._runs_of[saved.operator] if first <= k < end]
        if not inside:
            raise PlanError(
                f"{segment}: it is to keep {saved.operator}, which it never runs; it runs {self._runs(first, end)}"
            )
        if saved.index >= len(inside):
            raise PlanError(
                f"{segment}: it is to keep {saved.operator}#{saved.index}, and runs {len(inside)} of them, counted "
                "from #0"
            )
        k = inside[saved.index]
        if not may_be_kept(self._recorded, self._recorded.operators[k]):
            raise PlanError(
                f"{segment}: the output of {saved.operator}#{saved.index} cannot be kept: it makes nothing new, is "
                "random, or is changed in place"
            )
        return k

    def _runs(self, first: int, end: int) -> str:
        """Name the operators in [first, end) that can be kept, each with how often it runs."""
        record = self._recorded
        kept = (o.operator for o in record.operators[first:end] if may_be_kept(record, o))
        return ", ".join(f"{name} ({count})" for name, count in Counter(kept).items()) or "none that can be kept"


def _walk(item: NamedSegment) -> list[NamedSegment]:
    return [item, *(inner for child in item.children for inner in _walk(child))]


def _cut(span: StageSpan, bounds: list[int]) -> list[StageSpan]:
    inside = [bound for bound in bounds if span.start < bound < span.stop]
    if not inside:
        return [span]
    edges = [span.start, *inside, span.stop]
    return [replace(span, start=start, stop=stop, is_call=False) for start, stop in pairwise(edges)]
