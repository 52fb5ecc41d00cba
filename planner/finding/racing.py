"""Race plans: time them in turn, correct what operators are taken to cost by it, and search once more.

A profile times an operator where the unplanned step runs it. A replay runs it later, on what is then in caches, and
between other operators; where that makes a kind of operator dearer or cheaper, plans that differ by little may change
their order. So what is promised is settled by what is measured.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from ...profiler.allocator import fits
from ...profiler.results import Arm
from ...profiler.times import Spread
from ...solvers import ALIKE, SOLVERS
from ..applier.apply import apply_segments
from ..phases import Over
from ..plan_words import percent_range
from .calibration import Observation, corrected, factors
from .effort import Effort
from .times_in_turn import UNPLANNED, TimesInTurn, time_in_turn

if TYPE_CHECKING:
    from .planner import Found

ROUNDS = 5
"""How often each plan is timed."""
OTHERS = ("dp", "ilp", "dp_nested", "sqrt")
"""Solvers whose plans are raced beside that of the solver asked for, while there are places."""


def raced(found: Found, limit: int, effort: Effort, *, most: int, check: bool) -> Found:
    """Return the plan that was measured to take the least time, of those that fit.

    Args:
        found: The plan that the search found.
        limit: Bytes that the peak may reach.
        effort: How to solve.
        most: How many plans to time, at least two, besides one that the second search may bring.
        check: Run plans for real before they are timed.
    """
    entrants = _entrants(found, limit, effort, most, check=check)
    heat = _timed({_name(place, one): one for place, one in enumerate(entrants)}, effort)
    observations = heat.observations()
    told = ""
    if observations:
        known = factors(observations)
        planner = found.planner
        told = known.words()
        again = planner.repriced(corrected(planner.profile, known)).find(limit, effort, check=check)
        if again.draft.peak_bytes <= limit and again.draft.segments not in {one.draft.segments for one in entrants}:
            # With the profile's own prices a reader can compare it with the others.
            finalists = {heat.winner_name(): heat.winner(), _name(len(entrants), again): again}
            heat = _timed(finalists, effort).after(heat)
    return heat.told(told)


def _entrants(found: Found, limit: int, effort: Effort, most: int, *, check: bool) -> list[Found]:
    """Return the plan that was found and others that fit, by predicted added time."""
    planner = found.planner
    solvers = ALIKE if planner.bridge.kinds else SOLVERS
    ways = [(planner, name) for name in OTHERS if name != found.draft.solution.solver and name in solvers]
    if any(segment.save for top in found.draft.segments for segment in top.walk()):
        ways.insert(1, (planner.without_save_sets(), "dp"))
    others: dict[object, Found] = {}
    for other, name in ways:
        effort.say(f"looking for a plan of {name} to race")
        one = other.find(limit, replace(effort, solver=name), check=check)
        if one.draft.peak_bytes <= limit and one.draft.segments != found.draft.segments:
            others.setdefault(one.draft.segments, one)
    ranked = sorted(others.values(), key=lambda one: one.draft.solution.added_ns)
    return [found, *ranked[: most - 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heat:
    """Hold plans that were timed in turn, under the names of their arms."""

    entrants: dict[str, Found]
    times: TimesInTurn
    before: tuple[str, ...] = ()

    def _median_ns(self, name: str) -> int:
        return int(median(self.times.rounds[name]))

    def winner_name(self) -> str:
        """Return the name of the plan of the least median time."""
        return min(self.entrants, key=self._median_ns)

    def winner(self) -> Found:
        """Return the plan of the least median time, with what it was measured to add."""
        name = self.winner_name()
        return replace(
            self.entrants[name], overhead=self.times.overhead(name), overhead_range=self.times.overhead_range(name)
        )

    def observations(self) -> list[Observation]:
        """Return what each plan was seen to add to the unplanned step, beside what it replays."""
        plain = self.times.rounds.get(UNPLANNED)
        if plain is None:
            return []
        found: list[Observation] = []
        for name, entrant in self.entrants.items():
            added = [planned - unplanned for planned, unplanned in zip(self.times.rounds[name], plain, strict=True)]
            found.append(Observation.of(entrant.planner.bridge, entrant.draft.solution, added_ns=Spread.of(added)))
        return found

    def after(self, earlier: _Heat) -> _Heat:
        """Return this heat with what an earlier one told."""
        return replace(self, before=earlier.lines())

    def lines(self) -> tuple[str, ...]:
        """Say what each plan was predicted and measured to add."""
        return tuple(
            f"{name}: {_percent(found.draft.solution.added_ns / max(1, found.planner.profile.step_ns))} predicted, "
            f"{_percent(self.times.overhead(name))} measured"
            for name, found in self.entrants.items()
        )

    def told(self, words: str) -> Found:
        """Return the winner, with the race in its notes."""
        best = self.winner()
        heats = [f"{ROUNDS} rounds in turn: {'; '.join(lines)}" for lines in (self.before, self.lines()) if lines]
        measured = percent_range(best.overhead, best.overhead_range, unknown="not known")
        race = f"raced, {'. Then '.join(heats)}. Taken: {self.winner_name()}, measured {measured}"
        return replace(best, notes=(*best.notes, race, words))


def _timed(entrants: dict[str, Found], effort: Effort) -> _Heat:
    planner = next(iter(entrants.values())).planner
    session, model = planner.session, planner.session.step.model
    arms: dict[str, Arm] = {
        name: partial(apply_segments, model, found.draft.segments, training=model.training)
        for name, found in entrants.items()
    }
    if fits(planner.search.dry_runs.whole_step_bytes(), session.device):
        arms[UNPLANNED] = nullcontext
    times = time_in_turn(session.step, arms, session.device, ROUNDS, effort.say)
    effort.say(Over("timed"))
    return _Heat(entrants=entrants, times=times)


def _name(place: int, found: Found) -> str:
    return f"plan {place + 1} of {found.draft.solution.solver}"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"
