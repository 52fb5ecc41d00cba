"""Plan for several batches: solve for the one that binds, dry-run the plan on all, go round where another one binds.

Where one batch needs segments in one part of the model and another in another, what was found for each is put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeGuard

import torch
from torch import nn

from ...profiler.step import BatchError, Step, raised_in_loss
from ..applier.apply import unplanned
from ..bridge.hazards import Refusal, RefusedCalls
from ..budget import check_share, parse_budget
from ..errors import PlanError
from ..options import StepKeywords
from ..plan import Call, Plan, PlannedBatch, PlannedSegment, shape_words
from .checking import Checked
from .effort import Effort
from .planner import Found, Planner
from .pricing import drafted
from .search import Draft
from .writing import batch_tensors, infeasible, plan_of

ROUNDS = 16
"""Most times to solve: for each batch that binds, and again for less where its plan is too large for another."""


def plan_for_several(
    model: nn.Module,
    batches: object,
    budget: int | str,
    effort: Effort,
    *,
    headroom: float,
    check: bool,
    step: StepKeywords,
) -> Plan:
    """Find one plan whose peak is under the budget with every batch, and the added time least with the one that binds.

    Args:
        model: The model.
        batches: The batches; they differ in sizes alone.
        budget: As for `plan`; a share is one of the largest unplanned peak.
        effort: How to solve.
        headroom: As for `plan`.
        check: As for `plan`, with every batch.
        step: As for `plan`.

    Raises:
        InfeasibleBudgetError: No plan fits with every batch.
        BatchError: The batches cannot be used together.
        PlanError: With one batch the model runs other operators than with another, and the plan cannot be priced.
    """
    options: StepKeywords = {"loss": None, **step}
    several = _Several.of(model, _checked(model, batches, options), effort, check=check, step=step)
    asked = parse_budget(budget, max(several.unplanned_bytes()))
    return several.plan(budget, asked, headroom)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Hold what came of solving for one batch.

    Attributes:
        binding: The number of the batch that was solved for.
        found: What was found for it.
        planners: For every batch, its planner.
        drafts: For every batch, the segments with their peak and price.
        is_joined: The segments were put together from those for several batches.
    """

    binding: int
    found: Found
    planners: tuple[Planner, ...]
    drafts: tuple[Draft, ...]
    is_joined: bool

    @property
    def worst(self) -> int:
        """Return the number of the batch with the largest peak; of equal ones the one that was solved for."""
        order = (self.binding, *range(len(self.drafts)))
        return max(order, key=lambda number: self.drafts[number].peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the largest peak."""
        return self.drafts[self.worst].peak_bytes

    def found_with_worst(self) -> Found:
        """Return what was found as with the batch of the largest peak."""
        return replace(self.found, planner=self.planners[self.worst], draft=self.drafts[self.worst])


class _Several:
    """Hold a planner for each batch, and what of each may be in a segment."""

    def __init__(self, planners: Sequence[Planner], effort: Effort, *, check: bool) -> None:
        self._planners, self._effort, self._check = [*planners], effort, check
        self._leave_out_other_calls()

    @classmethod
    def of(
        cls, model: nn.Module, batches: Sequence[object], effort: Effort, *, check: bool, step: StepKeywords
    ) -> _Several:
        """Profile the step with each batch.

        Raises:
            BatchError: The model or the loss fails with one.
        """
        planners: list[Planner] = []
        for number, batch in enumerate(batches):
            effort.say(f"profiling with batch {number + 1} of {len(batches)}")
            try:
                planners.append(Planner.of(model, batch, progress=effort.say, **step))
            except (BatchError, PlanError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                words = f"batch {number + 1} ({shape_words(batch_tensors(Step.of(model, batch)))})"
                raise BatchError(f"the step fails with {words}: {_cause_words(error)}") from error
        return cls(planners, effort, check=check)

    def unplanned_bytes(self) -> list[int]:
        """Return the unplanned peak with each batch."""
        return [planner.search.dry_runs.unplanned_peak_bytes() for planner in self._planners]

    def plan(self, budget: int | str, budget_bytes: int, headroom: float) -> Plan:
        """Return the plan for a budget.

        Raises:
            InfeasibleBudgetError: None fits; it carries the plan whose largest peak is the least found.
        """
        limit = int(budget_bytes * (1 - check_share("headroom", headroom)))
        best = self._search(limit)
        if best.peak_bytes > limit:
            raise infeasible(
                best.found_with_worst(),
                budget=budget,
                budget_bytes=budget_bytes,
                headroom=headroom,
                effort=self._effort,
                of=f"with {self._words(best.worst)} ",
            )
        return self._written(best, budget_bytes, headroom)

    def _search(self, limit: int) -> _Round:
        """Solve until a plan fits with every batch, else return the one of the least largest peak."""
        unplanned_bytes = self.unplanned_bytes()
        binding = unplanned_bytes.index(max(unplanned_bytes))
        aims = [limit] * len(self._planners)
        solved: dict[int, _Round] = {}
        rounds: list[_Round] = []
        for _ in range(ROUNDS):
            done = self._round(binding, aims[binding])
            if done is None:
                continue  # With another batch a replay computed something else: solved again without it.
            rounds.append(done)
            solved[binding] = done
            if done.peak_bytes <= limit or done.drafts[binding].peak_bytes > aims[binding]:
                break
            if done.worst not in solved:
                binding = done.worst
                continue
            joined = self._joined(solved, binding) or done
            rounds.append(joined)
            if joined.peak_bytes <= limit:
                break
            binding = joined.worst
            aims[binding] -= joined.peak_bytes - limit
        if not rounds:
            raise PlanError(
                f"after {ROUNDS} rounds a replay still computes something else with one of the batches: plan each "
                "batch alone with plan(model, batch, ...), which says what differs, and leave it out by exclude="
            )
        return min(rounds, key=lambda entry: entry.peak_bytes)

    def _round(self, binding: int, limit: int) -> _Round | None:
        """Solve for one batch and try the plan with every other; None where a replay computes something else there."""
        planner = self._planners[binding]
        with unplanned(planner.session.step.model), planner.session.step.guard.undisturbed():
            found = planner.find(limit, self._effort, check=self._check)
        self._planners[binding] = found.planner
        return self._over_all(binding, found)

    def _joined(self, solved: Mapping[int, _Round], binding: int) -> _Round | None:
        """Put together what was found for each batch, in the order that has the least peak; None if in vain."""
        found, rounds = solved[binding].found, list[_Round]()
        for first in solved:
            order = [first, *(number for number in solved if number != first)]
            segments = self._put_together([solved[number].found.draft.segments for number in order])
            try:
                draft = drafted(self._planners[binding], segments)
            except PlanError:
                continue  # What is left of a segment beside another may be nothing that can be replayed.
            done = self._over_all(binding, replace(found, draft=draft), is_joined=True)
            rounds += [done] if done is not None else []
        return min(rounds, key=lambda entry: entry.peak_bytes, default=None)

    def _put_together(self, plans: Sequence[tuple[PlannedSegment, ...]]) -> tuple[PlannedSegment, ...]:
        """Return the segments of several plans; of one that overlaps an earlier plan's, the members beside it."""
        calls = {(call.module, call.index): call for call in self._planners[0].profile.calls}
        taken: dict[tuple[int, int], PlannedSegment] = {}

        def is_free(member: Call) -> bool:
            call = calls[member.module, member.index]
            return all(stop <= call.start or call.stop <= start for start, stop in taken)

        for segment in (segment for plan in plans for segment in plan):
            runs = [[*run] for free, run in groupby(segment.members, is_free) if free]
            for run in runs:
                is_whole = len(run) == len(segment.members)
                part = segment if is_whole else replace(segment, members=tuple(run), save=(), children=())
                ends = calls[run[0].module, run[0].index].start, calls[run[-1].module, run[-1].index].stop
                taken[ends] = part
        return tuple(taken[ends] for ends in sorted(taken))

    def _over_all(self, binding: int, found: Found, *, is_joined: bool = False) -> _Round | None:
        segments = found.draft.segments
        drafts = [found.draft] * len(self._planners)
        for number, other in enumerate(self._planners):
            if number == binding and not is_joined:
                continue
            draft = self._drafted(number, segments)
            checked = self._tried(other, segments)
            if checked.faults:
                self._planners[binding] = found.planner.without(checked.faults)
                return None
            missed = other.search.dry_runs.missed_bytes(draft.dry_run, checked.peak_bytes)
            drafts[number] = draft.with_missed(missed)
        planners = tuple(self._planners)
        return _Round(binding=binding, found=found, planners=planners, drafts=tuple(drafts), is_joined=is_joined)

    def _drafted(self, number: int, segments: tuple[PlannedSegment, ...]) -> Draft:
        planner = self._planners[number]
        self._effort.say(f"dry run of {len(segments)} segments with {self._words(number)}")
        try:
            return drafted(planner, segments)
        except PlanError as error:
            raise PlanError(
                f"with {self._words(number)} the model runs other operators than with another one, and a plan for "
                f"that does not fit it ({error}): pass save_sets=False, leave the part out by exclude=, or plan each "
                "batch alone"
            ) from error

    def _tried(self, planner: Planner, segments: tuple[PlannedSegment, ...]) -> Checked:
        if not self._check:
            return Checked()
        with unplanned(planner.session.step.model), planner.session.step.guard.undisturbed():
            return planner.tried(segments, self._effort)

    def _leave_out_other_calls(self) -> None:
        """Offer no segment around calls that are not made with every batch."""
        made = [{(c.module, c.index) for c in p.profile.calls if c.index >= 0} for p in self._planners]
        common = set.intersection(*made)
        for number, planner in enumerate(self._planners):
            bridge = planner.bridge
            for module, index in sorted(made[number] - common):
                refusal = Refusal(module, "is not called with every batch")
                bridge = bridge.without(RefusedCalls(calls=frozenset({(module, index)}), refusal=refusal))
            self._planners[number] = planner.with_bridge(bridge)

    def _words(self, number: int) -> str:
        return f"batch {number + 1} ({shape_words(batch_tensors(self._planners[number].session.step))})"

    def _written(self, best: _Round, budget_bytes: int, headroom: float) -> Plan:
        plan = plan_of(best.found_with_worst(), budget_bytes=budget_bytes, headroom=headroom)
        if best.is_joined or best.worst != best.binding:
            solver = best.found.draft.solution.solver
            plan = replace(plan, solver=solver, status="feasible", lower_bound_overhead=None, gap=None)
        entries = zip(self._planners, best.drafts, strict=True)
        return replace(
            plan,
            batches=tuple(
                PlannedBatch(
                    tensors=batch_tensors(planner.session.step),
                    predicted_peak_bytes=draft.peak_bytes,
                    unplanned_peak_bytes=planner.search.dry_runs.unplanned_peak_bytes(),
                    predicted_overhead=draft.solution.added_ns / max(1, planner.profile.step_ns),
                )
                for planner, draft in entries
            ),
        )


def _cause_words(error: Exception) -> str:
    """Say what failed in a user's step, and what to do where that is the loss."""
    cause = f"{type(error).__name__}: {error}"
    if not raised_in_loss(error):
        return f"{cause}. Leave that batch out, or mend the model for it"
    return (
        f"the loss raises {cause}. One loss serves all batches, so it cannot have one batch's targets bound: it must "
        "make its targets from the output (of zeros, say, in the output's shape: a plan does not depend on their "
        "values), or the batch must hold them and the model take them"
    )


def _checked(model: nn.Module, batches: object, step: StepKeywords) -> Sequence[object]:
    """Check that batches differ in sizes alone.

    Raises:
        BatchError: They do not, or are none.
    """
    if not _is_several(batches):
        raise BatchError(f"batches must be a list of batches, got {type(batches).__name__}: pass [small, large], say")
    if not batches:
        raise BatchError("batches is empty: pass the batches to plan for, the largest of every kind that comes")
    tensors = [batch_tensors(Step.of(model, batch, step.get("loss"))) for batch in batches]
    kinds = [{(t.name, t.dtype, t.device, len(t.shape)) for t in found} for found in tensors]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise BatchError(
                f"batches differ in more than sizes: batches[0] is {shape_words(tensors[0])}, and batches[{number}] is "
                f"{shape_words(tensors[number])}; plan those that are alike together"
            )
    return batches


def _is_several(batches: object) -> TypeGuard[Sequence[object]]:
    return isinstance(batches, Sequence) and not isinstance(batches, (str, Mapping))
