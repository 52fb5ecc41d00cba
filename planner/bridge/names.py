"""What was chosen, by name: intervals of stages as module calls, operators of save sets as they are counted."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from ...profiler.records import Profile
from ...solvers.problem import Segment
from ..plan import Call, PlannedSegment, SavedOperator
from .calls import CallIndex
from .candidates import Replays
from .memory import StageTimes


class Names:
    """Name segments of one profiled step."""

    def __init__(self, profile: Profile, stages: StageTimes, calls: CallIndex, savable: list[int]) -> None:
        self._profile = profile
        self._bounds = stages.bounds
        self._calls = calls
        self._savable = savable
        self._replays = Replays(profile)
        self._runs_of = defaultdict[str, list[int]](list)
        for k, operator in enumerate(profile.operators[: profile.loss_stop]):
            if operator.counted:
                self._runs_of[operator.operator].append(k)
        self._written_buffers = [
            (storage.name, sorted(storage.written_by), sorted(storage.read_by))
            for storage in profile.storages
            if storage.kind == "buffer" and storage.name and storage.written_by
        ]

    def planned(self, segment: Segment) -> PlannedSegment:
        """Name a segment and all that is nested in it."""
        first, end = self._bounds[segment.start], self._bounds[segment.stop]
        calls, members = self._profile.calls, self._members_around(segment)
        # What is nested only cuts members that it may cut (`Candidate.never_within`).
        assert calls[members[0]].start == first
        assert calls[members[-1]].stop == end
        return PlannedSegment(
            members=tuple(Call(module=calls[index].module, index=calls[index].index) for index in members),
            save=tuple(self._saved(operator, first) for operator in segment.keep),
            children=tuple(self.planned(child) for child in segment.children),
            early_stop=not self._replays.whole(first, end),
            restored_buffers=self._restored_buffers(first, end),
            crosses_operators=self._calls.between(members, first, end),
        )

    def _saved(self, operator: int, first: int) -> SavedOperator:
        """Name an operator as selective checkpointing counts it in a segment that begins at `first`."""
        index = self._savable[operator]
        name = self._profile.operators[index].operator
        runs = self._runs_of[name]
        return SavedOperator(operator=name, index=bisect_left(runs, index) - bisect_left(runs, first))

    def _members_around(self, segment: Segment) -> list[int]:
        """Return a segment's members: the largest calls inside it that no segment nested in it begins or ends within.

        A nested segment may lie inside one member. If it began in one and ended in another, a replay that makes each
        member's call as one step could not see it end; such members give way to the calls that they make.
        """
        bounds, calls = self._bounds, self._profile.calls
        nested = [(bounds[i.start], bounds[i.stop]) for i in segment.walk() if i is not segment]
        members: list[int] = []
        waiting = self._calls.members(bounds[segment.start], bounds[segment.stop])[::-1]
        while waiting:
            index = waiting.pop()
            start, stop = calls[index].start, calls[index].stop
            if any(a < start < b < stop or start < a < stop < b for a, b in nested):
                waiting += self._calls.made_by[index][::-1]
            else:
                members.append(index)
        return members

    def _restored_buffers(self, first: int, end: int) -> tuple[str, ...]:
        """Name the buffers whose values a replay must see as they were: read or written inside, written since.

        Those of the members' own that others write count too: a replay that finds any changed refuses to run.
        """
        calls = self._profile.calls
        own = tuple(f"{calls[m].module}." if calls[m].module else "" for m in self._calls.members(first, end))
        return tuple(
            sorted(
                {
                    name
                    for name, written, read in self._written_buffers
                    if name.startswith(own)
                    or _within(written, first, end)
                    or (_within(read, first, end) and written[-1] >= end)
                }
            )
        )


def _within(ordered: list[int], first: int, end: int) -> bool:
    place = bisect_left(ordered, first)
    return place < len(ordered) and ordered[place] < end
