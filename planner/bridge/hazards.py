"""What forbids a replay: each hazard by name, with what it is about and how an interval of operators is asked.

A replay runs the operators [first, end) once more, when backward comes to them. It must compute the same again and
leave nothing else changed. Everything is indexed once, so that asking costs little however long the model is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ...profiler.records import Profile
from ...profiler.step_record import Storage
from .calls import CallIndex
from .scope import EVERYWHERE, Scope

HOOKED = (
    "carries forward hooks, which the replay of a segment around it would run again (where they only compute, "
    "name them in repeatable_hooks=)"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Name a module call that cannot be replayed, and why.

    Attributes:
        module: What to call it in a report.
        reason: Continues "it".
    """

    module: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedCalls:
    """Hold calls whose replay was seen to go wrong: no segment may hold them all.

    Attributes:
        calls: Module and call index of each.
        refusal: What to say of them.
    """

    calls: frozenset[tuple[str, int]]
    refusal: Refusal


class Hazards:
    """Say of intervals of operators whether they can be replayed."""

    def __init__(self, profile: Profile, calls: CallIndex, units: frozenset[str], scope: Scope = EVERYWHERE) -> None:
        self.profile = profile
        self.calls = calls
        self._scope = scope
        made = [call for call in profile.calls if call.stop > call.start]
        self._unreplayable = _Spans((c.start, c.stop) for c in made if c.findings)
        self._hooked = [(c.start, c.stop) for c in made if c.hooked]
        self._excluded = _Spans((c.start, c.stop) for c in made if scope.excludes(c.module))
        self._units = [(c.start, c.stop) for c in made if c.module in units]
        self._several_calls = any(call.index != 0 for call in profile.calls)
        self._called = {call.module for call in profile.calls}
        forward = range(profile.loss_stop)
        operators, storages = profile.operators, profile.storages
        self._unrepeatable = [
            k
            for k in forward
            if operators[k].private_generator or any(_is_not_restored(storages[s]) for s in operators[k].writes)
        ]
        self._writes = _Events(
            (k, storages[s].born, 0)
            for k in forward
            for s in operators[k].writes
            if storages[s].kind in ("activation", "batch")
        )
        last_write = {s: k for k in forward for s in operators[k].writes if storages[s].kind in ("activation", "batch")}
        last_write |= {s: max(t.written_by) for s, t in enumerate(storages) if t.written_by and _is_not_restored(t)}
        self._overwritten_reads = _Events(
            (k, storages[s].born, last) for s, last in last_write.items() for k in storages[s].read_by
        )
        self._functions = [k for k in forward if operators[k].in_function]
        self._changing = sorted(
            {
                k
                for storage in storages
                if storage.kind == "buffer" and storage.written_by
                for k in (*storage.written_by, *(k for k in storage.read_by if k < storage.written_by[-1]))
                if k < profile.loss_stop
            }
        )

    def refusals(self) -> list[Refusal]:
        """List the module calls that no segment holds, with the reasons."""
        calls = [call for call in self.profile.calls if call.parent >= 0]
        found = [Refusal(call.module, finding) for call in calls for finding in call.findings]
        hooked = [Refusal(call.module, HOOKED) for call in calls if call.hooked]
        return list(dict.fromkeys(found + hooked))

    def allow(self, first: int, end: int) -> bool:
        """Say whether none of the hazards below forbids a replay of the operators [first, end)."""
        return not (
            self._excluded.any_inside(first, end)
            or self._holds_what_changes_itself(first, end)
            or self._holds_what_cannot_be_repeated(first, end)
            or self._holds_hooked_call(first, end)
            or self._cuts_unit(first, end)
            or self._changes_its_input(first, end)
            or self._reads_what_is_overwritten_later(first, end)
        )

    def allow_members(self, members: list[int], first: int, end: int) -> bool:
        """Say whether the calls of [first, end) can be made again, and what ran between them can be repeated."""
        return not (
            self._is_out_of_scope(members)
            or self._members_overlap(members)
            or self._outlasts_its_loop(members)
            or self._changes_between(members, first, end)
            or self._runs_a_function_between(members, first, end)
        )

    def bars_nesting(self, cut: Iterable[int], members: list[int]) -> bool:
        """Say whether a segment that cuts some calls in two can be nested in none that holds them whole.

        A segment around them names the pieces of the calls that are cut. This fails where the pieces are of a module
        that is called several times; where what such a call runs itself uses a buffer that changes; and where a member
        is called from outside its own module, so that the segment around does not contain it by name.
        """
        calls = self.profile.calls
        for index in cut:
            own = self.calls.runs_own_operators(index)
            if self._several_calls or any(_any_within(self._changing, part.start, part.stop) for part in own):
                return True
        for member in members:
            path = calls[member].module
            for around in self.calls.around(member):
                outer = calls[around].module
                if outer and path != outer and not path.startswith(f"{outer}."):
                    return True
        return False

    def _outlasts_its_loop(self, members: list[int]) -> bool:
        """Members in two calls of the container that holds them all by name: the run ends when the first call does."""
        if len(members) < 2 or not self._several_calls:
            return False
        calls = self.profile.calls
        parts = zip(*(calls[member].module.split(".")[:-1] for member in members), strict=False)
        common = [first for first, *_ in takewhile(lambda same: len(set(same)) == 1, parts)]
        while common and ".".join(common) not in self._called:
            common = common[:-1]
        name = ".".join(common)
        around = {next((k for k in self.calls.around(m) if calls[k].module == name), -1) for m in members}
        return bool(name) and len(around) > 1

    def _holds_what_changes_itself(self, first: int, end: int) -> bool:
        """A call with findings (a counter, a cache, Python's random numbers): a replay would change it again."""
        return self._unreplayable.any_inside(first, end)

    def _holds_what_cannot_be_repeated(self, first: int, end: int) -> bool:
        """A generator of its own, or a write to a parameter or nameless buffer: a replay could not put it back."""
        return _any_within(self._unrepeatable, first, end)

    def _holds_hooked_call(self, first: int, end: int) -> bool:
        """A call with the user's forward hooks, unless it is the segment: a replay would run them again."""
        return any(first <= a and b <= end and (a, b) != (first, end) for a, b in self._hooked)

    def _cuts_unit(self, first: int, end: int) -> bool:
        """A unit that is sharded on its own: its parameters are there only during its own call."""
        return any(a < first < b < end or first < a < end < b for a, b in self._units)

    def _changes_its_input(self, first: int, end: int) -> bool:
        """A write in place to what was made before: a replay would start from the changed values."""
        born, _ = self._writes.within(first, end)
        return bool((born < first).any())

    def _reads_what_is_overwritten_later(self, first: int, end: int) -> bool:
        """An input that something behind the interval changes in place: a replay would read the changed values."""
        born, written = self._overwritten_reads.within(first, end)
        return bool(((born < first) & (written >= end)).any())

    def _is_out_of_scope(self, members: list[int]) -> bool:
        """A member that the user did not name where only some modules were asked for."""
        return not all(self._scope.admits(self.profile.calls[member].module) for member in members)

    def _members_overlap(self, members: list[int]) -> bool:
        """One member is part of another: a looped module, and a piece of a later call of it."""
        if not self._several_calls:
            return False
        paths = {self.profile.calls[member].module for member in members}
        return any(path != other and path.startswith(f"{other}.") for path in paths for other in paths)

    def _changes_between(self, members: list[int], first: int, end: int) -> bool:
        """An operator between the members uses a buffer that is written then or later.

        A replay calls members with their buffers put back, but repeats what ran between them from a record, which
        holds the buffers themselves.
        """
        return self._any_between(self._changing, members, first, end)

    def _runs_a_function_between(self, members: list[int], first: int, end: int) -> bool:
        """A custom autograd function between the members: the record of what is called there does not see it."""
        return self._any_between(self._functions, members, first, end)

    def _any_between(self, operators: list[int], members: list[int], first: int, end: int) -> bool:
        """Say whether one of some operators, in order, is within [first, end) and in none of the members' calls."""
        touched = operators[bisect_left(operators, first) : bisect_left(operators, end)]
        spans = [(self.profile.calls[m].start, self.profile.calls[m].stop) for m in members] if touched else []
        return any(not any(a <= k < b for a, b in spans) for k in touched)


class _Spans:
    """Spans of operators, asked whether one lies inside an interval."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(spans)
        self._starts = [start for start, _ in ordered]
        stops = np.array([stop for _, stop in ordered], dtype=np.int64)
        self._least_stop = np.minimum.accumulate(stops[::-1])[::-1]  # Of the spans from each one on.

    def any_inside(self, first: int, end: int) -> bool:
        place = bisect_left(self._starts, first)
        return place < len(self._starts) and bool(self._least_stop[place] <= end)


class _Events:
    """Pairs of numbers at operators, found by interval."""

    def __init__(self, events: Iterable[tuple[int, int, int]]) -> None:
        table = np.array(sorted(events), dtype=np.int64).reshape(-1, 3)
        self._operators, self._first, self._second = table.T

    def within(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.searchsorted(self._operators, (first, end))
        return self._first[a:b], self._second[a:b]


def _any_within(ordered: list[int], first: int, end: int) -> bool:
    place = bisect_left(ordered, first)
    return place < len(ordered) and ordered[place] < end


def _is_not_restored(storage: Storage) -> bool:
    """Say whether a replay could not put this storage back: a parameter, or a tensor that is no registered buffer."""
    return storage.kind == "parameter" or (storage.kind == "buffer" and not storage.name)
