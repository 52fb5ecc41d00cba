"""The one bridge from a Profile to a Problem: which intervals can be segments, what each costs, what is fixed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...profiler.host import HostCosts
from ...profiler.records import Profile
from ...profiler.step_record import Storage, alive
from ...solvers.problem import Candidate, Operator, Problem, Stage, Tensor

NEGLIGIBLE = 1e-5
"""Tensors below this share of the unplanned peak are left to the extras of their stage."""
WORTHWHILE = 1e-3
"""A candidate that frees less than this share of the saved bytes is not offered."""
SAVABLE = 5e-4
"""An operator that takes less than this share of the forward is not worth naming in a save set."""
HOOKED = "carries forward hooks, which the replay of a segment around it would run again"
WINDOW = 6
"""See `Bridge._narrowness`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Name a module call that cannot be replayed, and why."""

    module: str
    reason: str


class Bridge:
    """Turn a profile into problems, and chosen intervals back into operators and calls.

    Args:
        profile: The recorded step.
        host: Host costs of the device.
        cross_operators: Offer segments across a container's own operators (not possible under torch.compile).
        save_sets: Offer operators whose outputs a segment may keep.
        units: Paths of modules whose calls a segment holds whole, or lies within.
    """

    def __init__(
        self,
        profile: Profile,
        host: HostCosts,
        *,
        cross_operators: bool = True,
        save_sets: bool = True,
        units: Iterable[str] = (),
    ) -> None:
        self._units = frozenset(units)
        self.profile = profile
        self.cross_operators = cross_operators
        self.host = host
        self.bounds = [span.start for span in profile.stages] + [profile.loss_stop]
        self._stage_of = np.repeat(np.arange(len(profile.stages)), np.diff(self.bounds))
        self._times = np.concatenate([[0], np.cumsum([o.forward_ns for o in profile.operators[: profile.loss_stop]])])
        self._index_hazards()
        self.savable = self._savable() if save_sets else []
        self.tensors, self._tensor_of = self._tensors()
        self.operators = tuple(
            Operator(
                stage=int(self._stage_of[k]),
                forward_ns=profile.operators[k].forward_ns,
                outputs=tuple(sorted(self._tensor_of[s] for s in profile.operators[k].produces)),
            )
            for k in self.savable
        )
        self.stages = self._stages()
        self.candidates = self._candidates()
        self._refused: list[Refusal] = []

    def problem(self, budget_bytes: int) -> Problem:
        """State the problem for a budget in bytes."""
        return Problem(
            stages=self.stages,
            tensors=self.tensors,
            candidates=self.candidates,
            operators=self.operators,
            fixed_bytes=self.profile.fixed_bytes(),
            floor_bytes=self.profile.parts.optimizer_step_peak,
            budget_bytes=budget_bytes,
            step_ns=self.profile.step_ns,
        )

    def refusals(self) -> list[Refusal]:
        """List the module calls that no segment holds, with the reasons, each continuing "it"."""
        calls = [call for call in self.profile.calls if call.parent >= 0]
        found = [Refusal(call.module, finding) for call in calls for finding in call.findings]
        hooked = [Refusal(call.module, HOOKED) for call in calls if call.hooked]
        return list(dict.fromkeys(found + hooked)) + self._refused

    def refuse(self, calls: Iterable[tuple[str, int]], name: str, reason: str) -> None:
        """Offer no segment any more that holds all of these calls, as replaying them was seen to go wrong.

        Args:
            calls: Module and call index of each.
            name: What to call them in a report.
            reason: Continues "it": what the replay did.
        """
        wanted = set(calls)
        spans = [(call.start, call.stop) for call in self.profile.calls if (call.module, call.index) in wanted]
        assert spans
        first, end = min(start for start, _ in spans), max(stop for _, stop in spans)
        self._unreplayable.append((first, end))
        self._refused.append(Refusal(name, reason))
        self.candidates = tuple(
            candidate
            for candidate in self.candidates
            if not (self.bounds[candidate.start] <= first and end <= self.bounds[candidate.stop])
        )

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the operators of an interval of stages, half open."""
        return self.bounds[start], self.bounds[stop]

    def members(self, start: int, stop: int) -> list[int]:
        """Return the largest module calls inside an interval of stages, in order."""
        first, end = self.span(start, stop)
        members: list[int] = []
        position = first
        for index, call in enumerate(self.profile.calls):
            if call.index >= 0 and call.start >= position and call.stop <= end and call.stop > call.start:
                members.append(index)
                position = call.stop
        return members

    def crosses(self, start: int, stop: int) -> bool:
        """Say whether containers run operators of their own between the members of an interval."""
        first, end = self.span(start, stop)
        inside = sum(self.profile.calls[m].stop - self.profile.calls[m].start for m in self.members(start, stop))
        return inside < end - first

    def replays_whole(self, start: int, stop: int) -> bool:
        """Say whether early stop would cut off an operator that still fills what was saved (RReLU's noise)."""
        first, end = self.span(start, stop)
        return any(self.profile.operators[k].fills_argument for k in range(first, end))

    def restored_buffers(self, start: int, stop: int) -> tuple[str, ...]:
        """Name the buffers whose values a replay must see as they were: read or written inside, written since.

        Those of the members' own that others write count too: a replay that finds any changed refuses to run.
        """
        first, end = self.span(start, stop)
        calls = self.profile.calls
        own = tuple(f"{calls[m].module}." if calls[m].module else "" for m in self.members(start, stop))
        names = {
            storage.name
            for storage in self.profile.storages
            if storage.kind == "buffer"
            and storage.name
            and (
                (storage.written_by and storage.name.startswith(own))
                or any(first <= k < end for k in storage.written_by)
                or (any(first <= k < end for k in storage.read_by) and any(k >= end for k in storage.written_by))
            )
        }
        return tuple(sorted(names))

    def saved_operator(self, operator: int, start: int) -> tuple[str, int]:
        """Name an operator of `operators` as selective checkpointing counts it in a segment that begins at `start`."""
        index = self.savable[operator]
        name = self.profile.operators[index].operator
        first = self.bounds[start]
        earlier = sum(self.profile.operators[k].operator == name for k in range(first, index))
        return name, earlier

    def _index_hazards(self) -> None:
        """Note what forbids an interval: calls that cannot be replayed, in-place writes across its edges."""
        profile = self.profile
        stop = profile.loss_stop
        self._blocks = _blocks(profile)
        self._several_calls = any(call.index != 0 for call in profile.calls)
        self._unreplayable = [(c.start, c.stop) for c in profile.calls if c.findings and c.stop > c.start]
        self._hooked = [(c.start, c.stop) for c in profile.calls if c.hooked and c.stop > c.start]
        self._whole = [(c.start, c.stop) for c in profile.calls if c.module in self._units and c.stop > c.start]
        self._forbidden = [
            k
            for k in range(stop)
            if profile.operators[k].private_generator
            or any(_is_not_restored(profile.storages[s]) for s in profile.operators[k].writes)
        ]
        self._changed = [
            (storage.read_by, storage.written_by)
            for storage in profile.storages
            if storage.written_by and _is_not_restored(storage)
        ]
        self._touches_changing = sorted(
            {
                k
                for storage in profile.storages
                if storage.kind == "buffer" and storage.written_by
                for k in (*storage.written_by, *(k for k in storage.read_by if k < storage.written_by[-1]))
                if k < stop
            }
        )
        self._writes = [
            (profile.storages[s].born, k)
            for k in range(stop)
            for s in profile.operators[k].writes
            if profile.storages[s].kind in ("activation", "batch")
        ]
        saving: dict[int, int] = {}
        for storage in profile.storages:
            for k in storage.saved_by:
                # Autograd saves an operator's inputs before it runs: a replay may stop there, without running it.
                saving[k] = max(saving.get(k, k), k + 1 if storage.born == k else k)
        self._saving = sorted(saving)
        self._replay_stops = saving
        self._shortest_from: dict[int, int] = {}
        self._shortest_to: dict[int, int] = {}
        for call in profile.calls:
            if call.stop > call.start and call.index >= 0:
                self._shortest_from[call.start] = min(call.stop, self._shortest_from.get(call.start, call.stop))
                self._shortest_to[call.stop] = max(call.start, self._shortest_to.get(call.stop, call.start))

    def _savable(self) -> list[int]:
        profile = self.profile
        least_ns = SAVABLE * profile.forward_ns
        return [
            k
            for k, operator in enumerate(profile.operators[: profile.loss_stop])
            if operator.produces
            and operator.counted
            and not operator.is_random
            and not operator.writes
            and operator.forward_ns >= least_ns
            and all(not profile.storages[s].written_by for s in operator.produces)
        ]

    def _tensors(self) -> tuple[tuple[Tensor, ...], dict[int, int]]:
        """List the storages some plan could keep or free; those of one fate are merged into one tensor."""
        profile, n = self.profile, len(self.profile.stages)
        kept = {s for k in self.savable for s in profile.operators[k].produces}
        least = NEGLIGIBLE * profile.peak_bytes()
        merged: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, storage in enumerate(profile.storages):
            if storage.kind != "activation" or not 0 <= storage.born < profile.loss_stop:
                continue
            if storage.nbytes < least and index not in kept:
                continue
            producer = int(self._stage_of[storage.born])
            holders = tuple(sorted({int(self._stage_of[k]) for k in storage.saved_by}))
            readers = {int(self._stage_of[k]) for k in storage.read_by} | set(holders)
            consumers = tuple(sorted(stage for stage in readers if stage > producer))
            last = storage.last_unsaved
            last_alive = n if last is None else int(self._stage_of[max(last, storage.born)])
            if not (holders or consumers or last_alive > producer or index in kept):
                continue
            own = index if index in kept else -1
            merged[producer, holders, consumers, last_alive, own].append(index)
        tensors: list[Tensor] = []
        tensor_of: dict[int, int] = {}
        for (producer, holders, consumers, last_alive, _), members in merged.items():
            for index in members:
                tensor_of[index] = len(tensors)
            tensors.append(
                Tensor(
                    nbytes=sum(profile.storages[index].nbytes for index in members),
                    producer=producer,  # pyright: ignore[reportArgumentType]
                    holders=holders,  # pyright: ignore[reportArgumentType]
                    consumers=consumers,  # pyright: ignore[reportArgumentType]
                    last_alive=last_alive,  # pyright: ignore[reportArgumentType]
                )
            )
        return tuple(tensors), tensor_of

    def _stages(self) -> tuple[Stage, ...]:
        """Split what was alive at every moment into the tensors and each stage's extras."""
        profile, n = self.profile, len(self.profile.stages)
        live = profile.live_bytes() - profile.fixed_bytes()
        forward_model = np.zeros(n + 1, dtype=np.int64)
        backward_model = np.zeros(n + 1, dtype=np.int64)
        for tensor in self.tensors:
            until = n if tensor.holders else tensor.last_alive + 1
            forward_model[tensor.producer] += tensor.nbytes
            if until < n:
                forward_model[until] -= tensor.nbytes
            if tensor.last_alive >= n:
                backward_model[0] += tensor.nbytes
            elif tensor.holders:
                backward_model[tensor.holders[0]] += tensor.nbytes
        forward_model, backward_model = np.cumsum(forward_model), np.cumsum(backward_model)
        forward = np.array([int(live[a:b].max()) for a, b in zip(self.bounds, self.bounds[1:], strict=False)])
        backward, entry = self._backward_moments(live)
        return tuple(
            Stage(
                name=profile.stages[i].name,
                forward_ns=int(self._times[self.bounds[i + 1]] - self._times[self.bounds[i]]),
                forward_extra_bytes=int(forward[i] - forward_model[i]),
                backward_extra_bytes=int(backward[i] - backward_model[i]),
                entry_extra_bytes=int(entry[i] - backward_model[i]),
            )
            for i in range(n)
        )

    def _backward_moments(self, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, per stage, the most bytes alive in its backward and the bytes alive just before it."""
        profile, n = self.profile, len(self.profile.stages)
        always = profile.parts.optimizer + profile.unseen_bytes + profile.library_bytes - profile.fixed_bytes()
        # What comes after the last operator (gradients reduced at the end of backward) is no stage's.
        before = alive(profile.storages, len(profile.operators), before=True)[:-1] + always
        worst = np.full(n, -1, dtype=np.int64)
        first: dict[int, int] = {}
        for k in range(profile.loss_stop, len(profile.operators)):
            stage = int(self._stage_of[profile.operators[k].forward_of])
            worst[stage] = max(worst[stage], live[k])
            first.setdefault(stage, k)
        entry = np.zeros(n, dtype=np.int64)
        following = int(before[profile.loss_stop]) if profile.loss_stop < len(before) else 0
        for stage in reversed(range(n)):
            if stage in first:
                following = int(before[first[stage]])
            entry[stage] = following
            if worst[stage] < 0:
                worst[stage] = following
        return worst, entry

    def _candidates(self) -> tuple[Candidate, ...]:
        n = len(self.profile.stages)
        saved = sum(tensor.nbytes for tensor in self.tensors if tensor.holders)
        freed_by_pair: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.holders and tensor.producer >= 0:
                freed_by_pair[tensor.producer].append((tensor.holders[0], tensor.nbytes))
        operators_of = defaultdict[int, list[int]](list)
        for index, operator in enumerate(self.operators):
            operators_of[operator.stage].append(index)
        candidates: list[Candidate] = []
        narrow_start, narrow_stop = self._narrowness()
        for start in range(n):
            first = self.bounds[start]
            for stop in range(start + 1, n + 1):
                end = self.bounds[stop]
                is_block = (first, end) in self._blocks
                if stop - start > min(narrow_start[start], narrow_stop[stop]) and not is_block:
                    continue
                if self._shortest_from.get(first, end + 1) > end or self._shortest_to.get(end, -1) < first:
                    continue
                frees = sum(
                    nbytes
                    for stage in range(start, stop)
                    for holder, nbytes in freed_by_pair.get(stage, ())
                    if holder < stop
                )
                if (frees < WORTHWHILE * saved and not is_block) or not self._allowed(first, end):
                    continue
                if not self.cross_operators and not self._is_plain(start, stop):
                    continue
                if self._members_overlap(start, stop) or self._records_changing_buffer(start, stop):
                    continue
                candidates.append(self._candidate(start, stop, operators_of))
        return tuple(candidates)

    def _narrowness(self) -> tuple[list[int], list[int]]:
        """Return, per position, how long a segment may be that begins (ends) there; 0 where no module call does.

        A long segment should begin and end where little travels: a position serves lengths up to `WINDOW` times its
        distance to the nearest position where less does. Lengths beyond cost time to solve and gain next to nothing.
        """
        n = len(self.profile.stages)
        travels = np.zeros(n + 2, dtype=np.int64)
        for tensor in self.tensors:
            if tensor.consumers:
                travels[tensor.producer + 1] += tensor.nbytes
                travels[tensor.consumers[-1] + 1] -= tensor.nbytes
        travels = np.cumsum(travels)[: n + 1]
        starts = [bound in self._shortest_from for bound in self.bounds]
        stops = [bound in self._shortest_to for bound in self.bounds]
        travels_after = travels.copy()
        for position in reversed(range(n)):
            if not starts[position]:
                travels_after[position] = min(travels[position], travels_after[position + 1])

        def reach(weights: np.ndarray, allowed: list[bool]) -> list[int]:
            places = [position for position in range(n + 1) if allowed[position]]
            reaches = [0] * (n + 1)
            for position in places:
                nearer = [abs(other - position) for other in places if weights[other] < weights[position]]
                reaches[position] = WINDOW * min(nearer, default=n)
            return reaches

        return reach(travels, starts), reach(travels_after, stops)

    def _candidate(self, start: int, stop: int, operators_of: dict[int, list[int]]) -> Candidate:
        first, end = self.span(start, stop)
        replay_stop = self._replay_stop(start, stop)
        return Candidate(
            start=start,
            stop=stop,
            block=(first, end) in self._blocks,
            replay_ns=int(self._times[replay_stop] - self._times[first]) + self.host.region_ns,
            selective_ns=self.host.selective_operator_ns * (end - first),
            operators=tuple(
                index
                for stage in range(start, stop)
                for index in operators_of.get(stage, ())
                if self.savable[index] < replay_stop
            ),
        )

    def _replay_stop(self, start: int, stop: int) -> int:
        """Return one past the last operator that a replay of an interval runs: its first where nothing is replayed."""
        first, end = self.span(start, stop)
        place = bisect_left(self._saving, end) - 1
        if place < 0 or self._saving[place] < first:
            return first  # Nothing inside is saved, so backward never asks for a replay.
        return end if self.replays_whole(start, stop) else self._replay_stops[self._saving[place]]

    def _is_plain(self, start: int, stop: int) -> bool:
        """Say whether an interval is one call, or a loop `x = member(x)` that torch.compile can take as one.

        The compiled form runs the members one on the other's output, and shows only the last one's: so each may read
        nothing but the output of the one before, and nobody else may read that.
        """
        if self.crosses(start, stop):
            return False
        storages, calls = self.profile.storages, self.profile.calls
        members = [calls[member] for member in self.members(start, stop)]
        for before, after in pairwise(members):
            for storage in storages:
                made_before = before.start <= storage.born < before.stop
                read_after = any(after.start <= k < after.stop for k in storage.read_by)
                foreign = storage.kind in ("activation", "batch") and storage.born < after.start
                if read_after and foreign and not made_before:
                    return False
                if made_before and any(k >= after.stop for k in storage.read_by):
                    return False
        return True

    def _members_overlap(self, start: int, stop: int) -> bool:
        """Say whether one member is part of another: a looped module, and a piece of a later call of it."""
        if not self._several_calls:
            return False
        paths = {self.profile.calls[member].module for member in self.members(start, stop)}
        return any(path != other and path.startswith(f"{other}.") for path in paths for other in paths)

    def _records_changing_buffer(self, start: int, stop: int) -> bool:
        """Say whether an operator between the members uses a buffer that is written then or later.

        A replay calls members with their buffers put back, but repeats what ran between them from a record, which
        holds the buffers themselves.
        """
        first, end = self.span(start, stop)
        touched = [k for k in self._touches_changing if first <= k < end]
        if not touched:
            return False
        spans = [(self.profile.calls[m].start, self.profile.calls[m].stop) for m in self.members(start, stop)]
        return any(not any(a <= k < b for a, b in spans) for k in touched)

    def _allowed(self, first: int, end: int) -> bool:
        """Say whether replaying the operators [first, end) computes the same again and disturbs nothing."""
        if _any_inside(self._unreplayable, first, end) or any(first <= k < end for k in self._forbidden):
            return False
        if any(first <= a and b <= end and (a, b) != (first, end) for a, b in self._hooked):
            return False
        if any(a < first < b < end or first < a < end < b for a, b in self._whole):
            return False
        if any(born < first <= k < end for born, k in self._writes):
            return False
        if any(
            any(first <= k < end for k in read_by) and any(k >= end for k in written_by)
            for read_by, written_by in self._changed
        ):
            return False
        return not any(
            born < first and k >= end and self._reads_between(born, k, first, end) for born, k in self._writes
        )

    def _reads_between(self, born: int, writer: int, first: int, end: int) -> bool:
        """Say whether a storage written later by `writer` is an input of the operators [first, end)."""
        return any(
            self.profile.storages[s].born == born and any(first <= k < end for k in self.profile.storages[s].read_by)
            for s in self.profile.operators[writer].writes
        )


def _is_not_restored(storage: Storage) -> bool:
    """Say whether a replay could not put this storage back: a parameter, or a tensor that is no registered buffer."""
    return storage.kind == "parameter" or (storage.kind == "buffer" and not storage.name)


def _any_inside(spans: Iterable[tuple[int, int]], first: int, end: int) -> bool:
    return any(first <= a and b <= end for a, b in spans)


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
