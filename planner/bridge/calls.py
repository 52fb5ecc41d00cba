"""The module calls of a step by where they begin and end: what an interval of operators holds, and what it cuts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from ...profiler.records import Profile


class CallIndex:
    """Find calls by their operators. What runs no operator, or has no name in plans (index -1), is left out."""

    def __init__(self, profile: Profile) -> None:
        self.calls = profile.calls
        self._nonempty = [index for index, call in enumerate(self.calls) if call.stop > call.start and call.index >= 0]
        self._starts = [self.calls[index].start for index in self._nonempty]
        self.made_by: dict[int, list[int]] = {}
        self.shortest_from: dict[int, int] = {}
        self.shortest_to: dict[int, int] = {}
        for index in self._nonempty:
            call = self.calls[index]
            self.made_by.setdefault(call.parent, []).append(index)
            self.shortest_from[call.start] = min(call.stop, self.shortest_from.get(call.start, call.stop))
            self.shortest_to[call.stop] = max(call.start, self.shortest_to.get(call.stop, call.start))

    def begins_and_ends(self, first: int, end: int) -> bool:
        """Say whether a call inside [first, end) begins at `first`, and one ends at `end`: else it cannot be named."""
        starts, stops = self.shortest_from.get(first), self.shortest_to.get(end)
        return starts is not None and stops is not None and starts <= end and stops >= first

    def members(self, first: int, end: int) -> list[int]:
        """Return the largest calls inside the operators [first, end), in order."""
        members: list[int] = []
        place = bisect_left(self._starts, first)
        while place < len(self._starts) and self._starts[place] < end:
            stop = self.calls[self._nonempty[place]].stop
            if stop <= end:
                members.append(self._nonempty[place])
                place = bisect_left(self._starts, stop, lo=place)
            else:
                place += 1
        return members

    def between(self, members: list[int], first: int, end: int) -> bool:
        """Say whether containers run operators of their own between the members of [first, end)."""
        return sum(self.calls[m].stop - self.calls[m].start for m in members) < end - first

    def cut(self, first: int, end: int) -> list[int]:
        """Return the calls that begin before [first, end) and end inside it, or the other way round.

        They are around the calls that begin at `first` and end at `end`, so walking up from these finds them all.
        """
        at_first = self._around(self._shortest(first, self.shortest_from[first]))
        at_end = self._around(self._shortest(self.shortest_to[end], end))
        calls = self.calls
        return [
            *(k for k in at_first if calls[k].start < first < calls[k].stop < end),
            *(k for k in at_end if first < calls[k].start < end < calls[k].stop),
        ]

    def ends_with_its_last_call(self, index: int) -> bool:
        """Say whether a call that makes others runs no operators after the last of them."""
        return self.calls[self.made_by[index][-1]].stop == self.calls[index].stop

    def begins_with_its_first_call(self, index: int) -> bool:
        """Say whether a call that makes others runs no operators before the first of them."""
        return self.calls[self.made_by[index][0]].start == self.calls[index].start

    def runs_own_operators(self, index: int) -> list[range]:
        """Return the operators that a call runs itself, between those of the calls it makes."""
        call = self.calls[index]
        position, own = call.start, list[range]()
        for made in self.made_by.get(index, ()):
            own.append(range(position, self.calls[made].start))
            position = self.calls[made].stop
        own.append(range(position, call.stop))
        return [part for part in own if part]

    def around(self, index: int) -> Iterator[int]:
        """Yield the calls around a call, the nearest first."""
        while (index := self.calls[index].parent) >= 0:
            yield index

    def _around(self, index: int) -> Iterator[int]:
        yield index
        yield from self.around(index)

    def _shortest(self, start: int, stop: int) -> int:
        place = bisect_left(self._starts, start)
        while self.calls[self._nonempty[place]].stop != stop:
            place += 1
        return self._nonempty[place]
