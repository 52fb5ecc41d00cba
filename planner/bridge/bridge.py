"""The one bridge from a Profile to a Problem, and from a chosen Segment to module calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial

from ...profiler.records import Profile
from ...solvers.problem import Candidate, Operator, Problem, Segment
from ..plan import PlannedSegment
from .calls import CallIndex
from .candidates import Replays, candidates_of
from .hazards import Hazards, Refusal, RefusedCalls
from .host_costs import HostCostsByCache, HostTimes
from .kinds import kinds_in
from .memory import StageTimes, stages_of, tensors_of
from .named import NamedSegments
from .names import Names
from .save_rules import savable
from .scope import EVERYWHERE, Scope


class Bridge:
    """Turn a profile into problems, and chosen intervals back into operators and calls.

    Nothing changes a bridge: what is learnt later makes a new one, by `without`.

    Args:
        profile: The recorded step.
        host: Host costs of the device.
        cross_operators: Offer segments across a container's own operators (not possible under torch.compile).
        save_sets: Offer operators whose outputs a segment may keep.
        units: Paths of modules whose calls a segment holds whole, or lies within.
        scope: Modules that segments may hold calls of.
        alike: Say which blocks are built alike.
        named: Segments that were named by hand: they alone are offered, each as it stands, however little it frees.

    Attributes:
        profile: The recorded step.
        scope: Modules that segments may hold calls of.
        bounds: The first operator of each stage, and one past the last of all.
        stages: The stages as solvers see them.
        tensors: What plans can keep or free.
        operators: What save sets may name.
        candidates: The intervals that can be segments.
        kinds: Blocks that are built alike; empty unless asked for.
        refused: Calls whose replay was seen to go wrong.
    """

    def __init__(
        self,
        profile: Profile,
        host: HostCostsByCache,
        *,
        cross_operators: bool = True,
        save_sets: bool = True,
        units: Iterable[str] = (),
        scope: Scope = EVERYWHERE,
        alike: bool = False,
        named: NamedSegments | None = None,
    ) -> None:
        self.profile = profile
        self.scope = scope
        units = frozenset(units)
        self._again = partial(
            Bridge,
            host=host,
            cross_operators=cross_operators,
            save_sets=save_sets,
            units=units,
            scope=scope,
            alike=alike,
        )
        stages, calls = StageTimes(profile), CallIndex(profile)
        kept = named.kept if named is not None else savable(profile) if save_sets else []
        self.bounds = stages.bounds
        self.tensors, tensor_of = tensors_of(profile, stages, kept)
        self.operators = tuple(
            Operator(
                stage=int(stages.of[k]),
                forward_ns=profile.operators[k].forward_ns,
                outputs=tuple(sorted(tensor_of[s] for s in profile.operators[k].produces)),
            )
            for k in kept
        )
        self.stages = stages_of(profile, stages, self.tensors)
        self._calls = calls
        self._hazards = Hazards(profile, calls, units, scope)
        self._names = Names(profile, stages, calls, kept)
        self.candidates: tuple[Candidate, ...] = candidates_of(
            profile,
            stages,
            calls,
            self._hazards,
            self.tensors,
            self.operators,
            kept,
            HostTimes(profile, host),
            cross_operators=cross_operators,
            named=named,
        )
        self.kinds = kinds_in(profile, self.bounds, kept, scope) if alike and named is None else ()
        self.refused: tuple[RefusedCalls, ...] = ()
        self._kept = kept
        self._replays = Replays(profile)

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
            kinds=self.kinds,
        )

    def refusals(self) -> list[Refusal]:
        """List the module calls that no segment holds, with the reasons, each continuing "it"."""
        return self._hazards.refusals() + [refused.refusal for refused in self.refused]

    def without(self, refused: RefusedCalls) -> Bridge:
        """Return a bridge without the segments that hold all of some calls; it shares everything else with this one."""
        spans = [(c.start, c.stop) for c in self.profile.calls if (c.module, c.index) in refused.calls]
        assert spans
        first, end = min(start for start, _ in spans), max(stop for _, stop in spans)
        other = copy(self)
        other.refused = (*self.refused, refused)
        other.candidates = tuple(
            candidate
            for candidate in self.candidates
            if not (self.bounds[candidate.start] <= first and end <= self.bounds[candidate.stop])
        )
        return other

    def repriced(self, profile: Profile) -> Bridge:
        """Return a bridge of the same step by other times, which offers as much."""
        other = self._again(profile)
        for refused in self.refused:
            other = other.without(refused)
        return other

    def of_named(self, named: NamedSegments) -> Bridge:
        """Return a bridge of the same step that offers segments named by hand and nothing else."""
        return self._again(named.profile, named=named)

    def without_save_sets(self) -> Bridge:
        """Return a bridge that lets segments keep nothing; it shares everything else with this one."""
        other = copy(self)
        other.candidates = tuple(replace(candidate, operators=()) for candidate in self.candidates)
        return other

    def replayed(self, segments: Iterable[Segment]) -> Iterator[int]:
        """Yield the operators that replays of segments run, those of nested ones on their own account."""
        for top in segments:
            for segment in top.walk():
                first, end = self.span(segment.start, segment.stop)
                kept = {self._kept[index] for index in segment.keep}
                yield from (k for k in range(first, self._replays.stop(first, end)) if k not in kept)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the operators of an interval of stages, half open."""
        return self.bounds[start], self.bounds[stop]

    def members(self, start: int, stop: int) -> list[int]:
        """Return the largest module calls inside an interval of stages, in order: indices into the profile's calls."""
        return self._calls.members(*self.span(start, stop))

    def name(self, start: int, stop: int) -> str:
        """Return the path of the call that an interval of stages is."""
        (member,) = self.members(start, stop)
        return self.profile.calls[member].module

    def planned(self, segment: Segment) -> PlannedSegment:
        """Name a chosen segment, and all that is nested in it, by module calls."""
        return self._names.planned(segment)
