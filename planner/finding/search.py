"""Solve, dry-run the plan, tighten, until the dry run fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...profiler import Profile
from ...solvers import ALIKE, DRY_RUN_WITH, LEAST_OF_ALL, SOLVERS, BudgetTooSmallError, Segment, Solution
from ...solvers.solution import limit_in_force
from ..bridge.bridge import Bridge
from ..budget import format_bytes
from ..phases import Bounded
from ..segments import PlannedSegment
from .dry_runs import DryRun, DryRuns
from .effort import Effort

ROUNDS = 8
"""Most rounds of solving and dry-running."""
CLOSE = 0.002
"""A memory model that overstated a plan by less than this share of the budget is not asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Hold a solution, the segments it names on the model, and their dry run.

    Attributes:
        solution: The solver's answer.
        segments: Its segments by name.
        dry_run: The dry run.
        peak_bytes: The step's peak, the optimizer's own step included; on a card with what is reserved beside it.
        is_least: The solver was asked for less than it reaches: no plan of its space has a lower peak.
    """

    solution: Solution
    segments: tuple[PlannedSegment, ...]
    dry_run: DryRun
    peak_bytes: int
    is_least: bool = False

    def with_missed(self, nbytes: int) -> Draft:
        """Return the draft with bytes that a real step allocated beyond the dry run, alive throughout."""
        alive = self.dry_run.alive_bytes + self.dry_run.beside_bytes + nbytes
        return replace(self, peak_bytes=max(self.peak_bytes, alive))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aim:
    """Hold what the solver is asked for next: what the drafts before told of how its memory model errs.

    Attributes:
        target_bytes: The budget to solve for.
        floor_bytes: The largest budget at which the dry run fitted; None where none has.
        ceiling_bytes: The smallest at which it went over the limit; None where none has.
    """

    target_bytes: int
    floor_bytes: int | None = None
    ceiling_bytes: int | None = None

    def next(self, draft: Draft, limit: int) -> _Aim | None:
        """Return what to ask for after a draft; None where nothing better is to be expected."""
        told, floor, ceiling = draft.solution.peak_bytes, self.floor_bytes, self.ceiling_bytes
        fits = draft.peak_bytes <= limit
        if draft.solution.added_ns == 0 if fits else draft.is_least:
            return None
        if fits:
            reached = told if draft.is_least else self.target_bytes
            floor = reached if floor is None else max(floor, reached)
        else:
            # Below this plan's own simulated peak, or a solver may well answer with the same plan again.
            ceiling = told if ceiling is None else min(ceiling, told)
        # As if the next plan were foreseen as wrongly, and as much reserved beside its tensors.
        target = told + limit - draft.peak_bytes
        if floor is not None and ceiling is not None:
            middle = (floor + ceiling) // 2
            target = min(target, middle) if fits and target > floor else middle
        if floor is not None and target <= floor + CLOSE * limit:
            return None
        return _Aim(target_bytes=target, floor_bytes=floor, ceiling_bytes=ceiling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Find plans for one profiled step.

    Attributes:
        bridge: The step's stages and candidates.
        dry_runs: Says what a plan really holds.
    """

    bridge: Bridge
    dry_runs: DryRuns

    @property
    def profile(self) -> Profile:
        """Return the recorded step that plans are priced by."""
        return self.bridge.profile

    def best(self, limit: int, effort: Effort) -> Draft:
        """Return the cheapest draft that fits a limit, else that of least peak.

        Raises:
            DryRunFailedError: A step fails under a plan that a solver found.
        """
        found = [self._best_of(effort.solver, limit, effort)]
        for name in DRY_RUN_WITH.get(effort.solver, ()):
            if found[0].solution.solver != name or self.dry_runs.session.budget_on == "reserved":
                found.append(self._best_of(name, limit, effort))
        return min(found, key=lambda draft: order(draft, limit))

    def _best_of(self, solver: str, limit: int, effort: Effort) -> Draft:
        drafts = list(self._drafts(solver, limit, effort))
        best = min(drafts, key=lambda draft: order(draft, limit))
        if best.segments and best.solution.added_ns == 0 and self.dry_runs.unplanned_peak_bytes() <= limit:
            return self.unplanned()
        if best.peak_bytes <= limit:
            return best
        short = "all" if self.bridge.kinds else LEAST_OF_ALL
        names = {short} if drafts[-1].is_least else {solver, short}
        others = [self.unplanned(), *(self._least(name, effort) for name in sorted(names))]
        return min([best, *others], key=lambda draft: draft.peak_bytes)

    def _drafts(self, solver: str, limit: int, effort: Effort) -> Iterator[Draft]:
        """Solve and dry-run for less where the dry run was above the limit, and for more where it was below."""
        aim = _Aim(target_bytes=limit - self.dry_runs.beside_bytes(self.profile))
        tried: dict[tuple[Segment, ...], Draft] = {}
        for number in range(1, ROUNDS + 1):
            words = f"{solver}, round {number} of at most {ROUNDS}: solving for {format_bytes(aim.target_bytes)}"
            effort.say(Bounded(words, limit_in_force(effort.time_limit_s)))
            solution, is_least = self._solve(solver, aim.target_bytes, effort)
            draft = tried.get(solution.segments)
            if draft is None:
                segments = f"{solution.count_segments()} segments"
                effort.say(f"{solver}, round {number} of at most {ROUNDS}: dry run of {segments}")
                draft = tried[solution.segments] = self.draft(solution, is_least=is_least)
                yield draft
            following = aim.next(draft, limit)
            if following is None:
                return
            aim = following

    def _solve(self, solver: str, target_bytes: int, effort: Effort) -> tuple[Solution, bool]:
        """Return a solver's answer, and whether it is its plan of least peak, above the target."""
        problem = self.bridge.problem(max(1, target_bytes))
        solvers = ALIKE if problem.kinds else SOLVERS
        try:
            return solvers[solver](problem, time_limit_s=effort.time_limit_s, gap=effort.gap), False
        except BudgetTooSmallError as error:
            return error.solution, True

    def _least(self, solver: str, effort: Effort) -> Draft:
        """Return the draft of a solver's plan of least peak."""
        return self.draft(self._solve(solver, 1, effort)[0])

    def unplanned(self) -> Draft:
        """Return the draft of no segments."""
        return self.draft(SOLVERS["none"](self.bridge.problem(self.profile.peak_bytes())))

    def draft(self, solution: Solution, *, is_least: bool = False) -> Draft:
        """Name a solution's segments on the model, and dry-run them."""
        segments = tuple(self.bridge.planned(segment) for segment in solution.segments)
        run = self.dry_runs.of(segments)
        peak = max(run.alive_bytes, self.profile.parts.optimizer_step_peak) + run.beside_bytes
        return Draft(solution=solution, segments=segments, dry_run=run, peak_bytes=peak, is_least=is_least)


def order(draft: Draft, limit: int) -> tuple[bool, int]:
    """Order drafts: those that fit by added time, then the others by peak."""
    fits = draft.peak_bytes <= limit
    return not fits, draft.solution.added_ns if fits else draft.peak_bytes
