"""Which intervals of stages are offered as segments, and what a replay of each costs."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

import numpy as np

from ...profiler.records import Profile
from ...profiler.step_record import BETWEEN_RANKS
from ...solvers.problem import Candidate, Operator, Tensor
from ..errors import PlanError
from .calls import CallIndex
from .hazards import Hazards
from .host_costs import HostTimes
from .memory import StageTimes
from .named import NamedSegments

WORTHWHILE = 1e-3
"""A candidate that frees less than this share of the saved bytes is not offered."""
WINDOWS = (1000, 18, 6)
MOST_INTERVALS = 1200
"""The widest window with which at most so many intervals are offered is taken: see `_Candidates._narrowness`."""


def candidates_of(
    profile: Profile,
    stages: StageTimes,
    calls: CallIndex,
    hazards: Hazards,
    tensors: tuple[Tensor, ...],
    operators: tuple[Operator, ...],
    savable: list[int],
    host: HostTimes,
    *,
    cross_operators: bool,
    named: NamedSegments | None = None,
) -> tuple[Candidate, ...]:
    """List the intervals that begin and end at module calls, can be replayed, and free enough to be worth it.

    Raises:
        PlanError: One of those that were named by hand cannot be replayed.
    """
    found = _Candidates(profile, stages, calls, hazards, tensors, operators, savable, host, cross_operators)
    return found.all() if named is None else tuple(found.named(*interval) for interval in named.intervals())


class Replays:
    """Say how far replays run: torch's checkpoint stops early, at the last tensor that backward asks for."""

    def __init__(self, profile: Profile) -> None:
        stops: dict[int, int] = {}
        for storage in profile.storages:
            for k in storage.saved_by:
                # Autograd saves an operator's inputs before it runs: a replay may stop there, without running it.
                stops[k] = max(stops.get(k, k), k + 1 if storage.born == k else k)
        self._saving = sorted(stops)
        self._stops = stops
        self._filling = [k for k, operator in enumerate(profile.operators) if operator.fills_argument]

    def whole(self, first: int, end: int) -> bool:
        """Say whether early stop would cut off an operator that still fills what was saved (RReLU's noise)."""
        place = bisect_left(self._filling, first)
        return place < len(self._filling) and self._filling[place] < end

    def stop(self, first: int, end: int) -> int:
        """Return one past the last operator that a replay of [first, end) runs: `first` where nothing is replayed."""
        place = bisect_left(self._saving, end) - 1
        if place < 0 or self._saving[place] < first:
            return first  # Nothing inside is saved, so backward never asks for a replay.
        return end if self.whole(first, end) else self._stops[self._saving[place]]


class _Candidates:
    def __init__(
        self,
        profile: Profile,
        stages: StageTimes,
        calls: CallIndex,
        hazards: Hazards,
        tensors: tuple[Tensor, ...],
        operators: tuple[Operator, ...],
        savable: list[int],
        host: HostTimes,
        cross_operators: bool,
    ) -> None:
        self.profile = profile
        self.stages = stages
        self.calls = calls
        self.hazards = hazards
        self.tensors = tensors
        self.savable = savable
        self.host = host
        self.cross_operators = cross_operators
        self.blocks = _blocks(profile)
        self.replays = Replays(profile)
        self.between_ranks = [
            k for k, operator in enumerate(profile.operators) if operator.operator.startswith(BETWEEN_RANKS)
        ]
        self.position = {bound: position for position, bound in enumerate(stages.bounds)}
        self.operators_of = defaultdict[int, list[int]](list)
        for index, operator in enumerate(operators):
            self.operators_of[operator.stage].append(index)

    def all(self) -> tuple[Candidate, ...]:
        bounds, n = self.stages.bounds, len(self.stages.bounds) - 1
        narrow_start, narrow_stop = self._narrowness()
        least = WORTHWHILE * sum(tensor.nbytes for tensor in self.tensors if tensor.holders)
        freed = [np.zeros(n, dtype=np.int64) for _ in range(n)]
        for tensor in self.tensors:
            if tensor.holders and tensor.producer >= 0:
                freed[tensor.producer][tensor.holders[0]] += tensor.nbytes
        found: list[Candidate] = []
        for start in range(n):
            first = bounds[start]
            # By stop: what is made from `start` on and held first before the stop.
            frees = np.cumsum(np.sum(freed[start:], axis=0))
            for stop in range(start + 1, n + 1):
                end = bounds[stop]
                is_block = (first, end) in self.blocks
                if stop - start > min(narrow_start[start], narrow_stop[stop]) and not is_block:
                    continue
                if not self.calls.begins_and_ends(first, end) or (frees[stop - 1] < least and not is_block):
                    continue
                if self._can_be_replayed(first, end):
                    found.append(self._candidate(start, stop, is_block=is_block))
        return tuple(found)

    def named(self, name: str, start: int, stop: int) -> Candidate:
        """Return an interval that was named by hand.

        Raises:
            PlanError: It cannot be replayed.
        """
        first, end = self.stages.bounds[start], self.stages.bounds[stop]
        if not self._can_be_replayed(first, end):
            inside = {
                self.profile.calls[k].module for k in range(len(self.profile.calls)) if self._is_in(k, first, end)
            }
            reasons = [f"{r.module} {r.reason}" for r in self.hazards.refusals() if r.module in inside]
            because = (
                reasons[0]
                if reasons
                else ("it changes what it was given, reads what is changed later, or cuts a unit in two")
            )
            raise PlanError(f"{name}: it cannot be replayed exactly: {because}; take it out, or narrow it")
        return self._candidate(start, stop, is_block=False)

    def _is_in(self, index: int, first: int, end: int) -> bool:
        call = self.profile.calls[index]
        return first <= call.start and call.stop <= end

    def _can_be_replayed(self, first: int, end: int) -> bool:
        if not self.hazards.allow(first, end):
            return False
        members = self.calls.members(first, end)
        if not self.cross_operators and not self._is_plain(members, first, end):
            return False
        return self.hazards.allow_members(members, first, end)

    def _candidate(self, start: int, stop: int, *, is_block: bool) -> Candidate:
        first, end = self.stages.bounds[start], self.stages.bounds[stop]
        replay_stop = self.replays.stop(first, end)
        # A replay may find gathered what forward had to gather, or the other way round, and selective checkpointing
        # refuses a replay that runs other operators.
        communicates = bisect_left(self.between_ranks, first) < bisect_left(self.between_ranks, end)
        replayed_ns = int(self.stages.before_ns[replay_stop] - self.stages.before_ns[first])
        return Candidate(
            start=start,
            stop=stop,
            block=is_block,
            replay_ns=replayed_ns + self.host.replay_ns(first, replay_stop),
            selective_ns=self.host.selective_ns(first, end),
            operators=tuple(
                index
                for stage in range(start, stop)
                for index in self.operators_of.get(stage, ())
                if self.savable[index] < replay_stop and not communicates
            ),
            never_within=self._never_within(start, stop),
        )

    def _never_within(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the boundaries where no segment around this interval may end.

        A segment is named by its members, from the beginning of the first to the end of the last. If one nested in it
        cuts a member in two, the calls that this member makes are named instead, and what the member runs itself before
        the first of them or behind the last would fall out of the segment.
        """
        first, end = self.stages.bounds[start], self.stages.bounds[stop]
        everywhere = tuple(range(stop, len(self.stages.bounds)))
        cut = self.calls.cut(first, end)
        if cut and not self.cross_operators:
            return everywhere
        if self.hazards.bars_nesting(cut, self.calls.members(first, end)):
            return everywhere
        stops: set[int] = set()
        for index in cut:
            call = self.profile.calls[index]
            if call.start < first and not self.calls.begins_with_its_first_call(index):
                return everywhere
            if call.stop > end and not self.calls.ends_with_its_last_call(index) and call.stop in self.position:
                stops.add(self.position[call.stop])
        return tuple(sorted(stops))

    def _narrowness(self) -> tuple[list[int], list[int]]:
        """Return, per position, how long a segment may be that begins (ends) there; 0 where no module call does.

        A long segment should begin and end where little travels: a position serves lengths up to a window times its
        distance to the nearest position where less does. Lengths beyond cost time to solve; where there are few stages
        this does not matter, and the skips of a U-Net need them (7 % of the added time, 5 % of the least peak).
        """
        n = len(self.stages.bounds) - 1
        travels = np.zeros(n + 2, dtype=np.int64)
        for tensor in self.tensors:
            if tensor.consumers:
                travels[tensor.producer + 1] += tensor.nbytes
                travels[tensor.consumers[-1] + 1] -= tensor.nbytes
        travels = np.cumsum(travels)[: n + 1]
        starts = [bound in self.calls.shortest_from for bound in self.stages.bounds]
        stops = [bound in self.calls.shortest_to for bound in self.stages.bounds]
        travels_after = travels.copy()
        for position in reversed(range(n)):
            if not starts[position]:
                travels_after[position] = min(travels[position], travels_after[position + 1])

        def distances(weights: np.ndarray, allowed: list[bool]) -> np.ndarray:
            places = [position for position in range(n + 1) if allowed[position]]
            found = np.zeros(n + 1, dtype=np.int64)
            for position in places:
                nearer = [abs(other - position) for other in places if weights[other] < weights[position]]
                found[position] = min(nearer, default=n)
            return found

        of_start, of_stop = distances(travels, starts), distances(travels_after, stops)
        lengths = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
        least_window = lengths / np.maximum(np.minimum(of_start[:, None], of_stop[None, :]), 0.5 / n)
        least_window = least_window[lengths > 0]
        window = next((w for w in WINDOWS if (least_window <= w).sum() <= MOST_INTERVALS), WINDOWS[-1])
        return (window * of_start).tolist(), (window * of_stop).tolist()

    def _is_plain(self, members: list[int], first: int, end: int) -> bool:
        """Say whether an interval is one call, or a loop `x = member(x)` that torch.compile can take as one.

        The compiled form runs the members one on the other's output, and shows only the last one's: so each may read
        nothing but the output of the one before, and nobody else may read that.
        """
        if self.calls.between(members, first, end):
            return False
        storages, calls = self.profile.storages, self.profile.calls
        for before, after in pairwise([calls[member] for member in members]):
            for storage in storages:
                made_before = before.start <= storage.born < before.stop
                read_after = any(after.start <= k < after.stop for k in storage.read_by)
                foreign = storage.kind in ("activation", "batch") and storage.born < after.start
                if read_after and foreign and not made_before:
                    return False
                if made_before and any(k >= after.stop for k in storage.read_by):
                    return False
        return True


def _blocks(profile: Profile) -> set[tuple[int, int]]:
    """Return the operators of what a user would wrap by hand: the outermost calls of modules kept in a list."""
    inside: set[int] = set()
    blocks: set[tuple[int, int]] = set()
    for index, call in enumerate(profile.calls):
        if call.parent in inside:
            inside.add(index)
        elif call.module.rpartition(".")[2].isdigit():
            inside.add(index)
            blocks.add((call.start, call.stop))
    return blocks
