"""`Planner`: one profiled step, and plans for it that were tried on a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from ...profiler import Profile, Session, open_session, profile
from ...profiler.allocator import collected
from ...profiler.session import silent
from ...profiler.step import Step
from ..applier.apply import unplanned
from ..bridge.bridge import Bridge
from ..bridge.hazards import Refusal, RefusedCalls
from ..bridge.host_costs import ASSUMED, HostCostsByCache
from ..bridge.scope import Scope
from ..budget import BudgetError, check_share, parse_budget
from ..circumstances import autocast_now
from ..errors import PlanError
from ..options import StepKeywords, StepOptions
from ..pictures.timeline import Timeline
from ..plan import BatchTensor, Plan, PlannedSegment
from .alike_cost import alike_cost
from .checking import Checked, Checker, Fault
from .dry_runs import DryRunFailedError, DryRuns
from .effort import Effort, check_effort, check_solver
from .explain import explain_peak
from .host import host_costs
from .racing import raced
from .search import Draft, Search
from .writing import batch_tensors, infeasible, plan_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKS = 12
"""Most times to plan again without the segments whose replay computed something else."""


@dataclass(frozen=True, slots=True, repr=False)
class Planner:
    """Hold one profiled step, from which any number of budgets can be planned.

    Attributes:
        search: The profiled step, and what finds plans for it.
        checker: Runs plans for real to see that they compute the same.
        options: What the step is besides its model and batch.
        units: Paths of the modules that are sharded on their own.
        autocast: What autocast was set to, as in `Circumstances`.
    """

    search: Search
    checker: Checker
    options: StepOptions
    units: tuple[str, ...]
    autocast: dict[str, str]

    @staticmethod
    def of(
        model: nn.Module,
        batch: object,
        *,
        progress: Callable[[str], None] | None = None,
        **step: Unpack[StepKeywords],
    ) -> Planner:
        """Profile a step.

        Args:
            model: The model, on the device it is trained on.
            batch: As for `plan`.
            progress: Called with a few words before each phase.
            step: As for `plan`; see `StepOptions`.

        Raises:
            BatchError: The batch, `units` or `ranks` cannot be used.
        """
        options = StepOptions.of(step)
        session = open_session(
            model,
            batch,
            options.loss,
            accumulation=options.accumulation,
            holds_output=options.holds_output,
            repeatable_hooks=options.repeatable_hooks,
            device=options.device,
        )
        paths, ranks = options.unit_paths(model), options.ranks_of(model)
        session.ranks = ranks
        scope = Scope(exclude=options.exclude, only=options.only)
        scope.check(model)
        session.step.guard.also_keep(options.optimizer)
        known: dict[str, Any] = {"optimizer": options.optimizer, "repeats": options.repeats, "progress": progress}
        with unplanned(model), session.step.guard.undisturbed():
            whole = None
            if ranks is not None and session.card is None:
                # The whole model is run here, for times and results; gradients that stay are only ever shards.
                alone = replace(session, ranks=None, accumulation=False)
                whole = profile(model, batch, session=alone, **known)
                session.reference = alone.reference
            recorded = profile(model, batch, session=session, whole=whole, **known)
        bridge = Bridge(
            recorded,
            _host(session, recorded),
            cross_operators=options.cross_operators,
            save_sets=options.save_sets,
            units=paths,
            scope=scope,
            alike=options.alike,
        )
        dry_runs = DryRuns(profile=recorded, whole=whole or recorded, session=session)
        search = Search(bridge=bridge, dry_runs=dry_runs)
        autocast = autocast_now(session.device.type)
        if session.card is not None:
            # The CPU's autocast stands for the card's.
            autocast = {"cuda": autocast["cpu"]} if autocast else {}
        return Planner(search, Checker(session.reference), options, paths, autocast)

    def check_given(self, model: nn.Module, batch: object, step: StepKeywords) -> None:
        """Refuse a model, a batch or options that this planner was not made with: they would be ignored.

        Raises:
            PlanError: One differs; the message names it.
        """
        if model is not self.session.step.model:
            raise PlanError(
                f"planner= was made for another model (a {type(self.session.step.model).__name__}) than the "
                f"{type(model).__name__} given, which would be ignored: pass the model that it was made with"
            )
        known, given = batch_tensors(self.session.step), batch_tensors(Step.of(model, batch, self.options.loss))
        if known != given:
            raise PlanError(
                "planner= was made for a batch of other shapes, dtypes or devices "
                f"({_shapes(known)}) than the one given ({_shapes(given)}): make a planner with it"
            )
        self.options.check_given(step)

    @property
    def profile(self) -> Profile:
        """Return the recorded step, one rank's part of it where there are several."""
        return self.search.profile

    @property
    def whole(self) -> Profile:
        """Return the recorded step of the whole model; one rank's where nothing is run."""
        return self.search.dry_runs.whole

    @property
    def bridge(self) -> Bridge:
        """Return the step's stages and candidates."""
        return self.search.bridge

    @property
    def session(self) -> Session:
        """Return the step, ready to be recorded."""
        return self.search.dry_runs.session

    @property
    def ranks(self) -> int:
        """Return the processes that the model will be sharded over; 1 where it will not."""
        return self.options.ranks

    def budget_bytes(self, budget: int | str) -> int:
        """Return a budget in bytes; a share is one of the unplanned peak.

        Raises:
            BudgetError: It cannot be read.
        """
        return parse_budget(budget, self.search.dry_runs.unplanned_peak_bytes())

    @collected()
    def plan(
        self,
        budget: int | str,
        *,
        solver: str = "auto",
        headroom: float = 0.0,
        time_limit_s: float | None = None,
        gap: float = 0.0,
        check: bool = True,
        race: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> Plan:
        """Plan for one budget; see `plan`."""
        check_solver(solver, alike=self.options.alike)
        check_effort(time_limit_s, gap)
        self._check_race(race)
        asked = self.budget_bytes(budget)
        limit = int(asked * (1 - check_share("headroom", headroom)))
        effort = Effort(solver=solver, time_limit_s=time_limit_s, gap=gap, say=progress or silent)
        with unplanned(self.session.step.model), self.session.step.guard.undisturbed():
            found = self.find(limit, effort, check=check)
            if found.draft.peak_bytes > limit:
                raise infeasible(found, budget=budget, budget_bytes=asked, headroom=headroom, effort=effort)
            if race > 1:
                found = raced(found, limit, effort, most=race, check=check)
            if self.options.alike:
                cost = alike_cost(found.planner.bridge, found.draft, limit, effort)
                found = replace(found, unrestricted=cost.unrestricted, notes=(*cost.words, *found.notes))
        return plan_of(found, budget_bytes=asked, headroom=headroom)

    def find(self, limit: int, effort: Effort, *, check: bool) -> Found:
        """Search until a plan fits that computes the same, as far as `check` lets it be seen.

        What is found carries the planner that found it: one that offers none of the segments that were seen to fail.

        Args:
            limit: Bytes that the peak may reach.
            effort: How to solve.
            check: Run what is found for real.
        """
        target, planner = limit, self
        for _ in range(CHECKS):
            try:
                draft = planner.search.best(target, effort)
            except DryRunFailedError as failed:
                planner = planner.without(planner._faults_of(failed, effort, check=check))
                continue
            checked = planner.tried(draft.segments, effort) if check else Checked()
            if checked.faults:
                planner = planner.without(checked.faults)
                continue
            measured = draft.with_missed(planner.search.dry_runs.missed_bytes(draft.dry_run, checked.peak_bytes))
            if draft.peak_bytes <= target and measured.peak_bytes > limit:
                target -= measured.peak_bytes - limit
                continue
            return Found(planner=planner, draft=measured, notes=(checked.unchecked,))
        return Found(planner=planner, draft=planner.search.unplanned())

    def tried(self, segments: tuple[PlannedSegment, ...], effort: Effort) -> Checked:
        """Run segments for real against the unmodified step, where they can be."""
        card = self.session.card
        if card is not None:
            return Checked(unchecked=f"the plan was not tried on a real step: it was made for {card.name} without one")
        effort.say(f"running {len(segments)} segments against the unmodified step")
        return self.checker.check(self.session.step, segments, self.search.dry_runs.whole_step_bytes())

    def without(self, faults: Sequence[Fault]) -> Planner:
        """Return a planner of the same step that offers no segment around the faulty ones any more."""
        bridge = self.bridge
        for fault in faults:
            calls = frozenset((c.module, c.index) for segment in fault.segments for c in segment.members)
            name = ", ".join(str(segment) for segment in fault.segments)
            refusal = Refusal(name, f"computes something else in a replay ({fault.reason})")
            bridge = bridge.without(RefusedCalls(calls=calls, refusal=refusal))
        return self.with_bridge(bridge)

    def repriced(self, profile: Profile) -> Planner:
        """Return a planner of the same step by other times."""
        return self.with_bridge(self.bridge.repriced(profile))

    def with_bridge(self, bridge: Bridge) -> Planner:
        """Return a planner of the same step that offers what another bridge does."""
        return replace(self, search=replace(self.search, bridge=bridge))

    def without_save_sets(self) -> Planner:
        """Return a planner of the same step that lets segments keep nothing."""
        return self.with_bridge(self.bridge.without_save_sets())

    def timeline(self, plan: Plan | None = None) -> Timeline:
        """Return the memory over the step, without a plan or with one: what the plan's own dry run saw.

        Where the plan promises more than the dry run saw, because it was run for real and the allocator gave out more,
        that is in the timeline as well; its peak is the plan's.

        Args:
            plan: A plan of this planner's; None takes the unplanned step.
        """
        profile, dry_runs = self.profile, self.search.dry_runs
        if plan is None:
            record, step_ns, beside = profile, float(profile.step_ns), dry_runs.beside_bytes(profile)
            alive_bytes, name = int(profile.live_bytes().max(initial=0)), "without checkpoints"
        else:
            run, name = dry_runs.of(plan.segments), "with the plan"
            record, alive_bytes, beside = run.record, run.alive_bytes, run.beside_bytes
            promised = (plan.predicted_peak_bytes or 0) - beside
            if promised > profile.parts.optimizer_step_peak:
                alive_bytes = max(alive_bytes, promised)
            step_ns = profile.step_ns * (1 + (plan.predicted_overhead or 0.0))
        timeline = Timeline.of(record, profile, alive_bytes=alive_bytes, beside_bytes=beside, step_ns=step_ns)
        return replace(timeline, peak_words=explain_peak(record, profile, timeline.peak_bytes), name=name)

    def plot(self, plan: Plan | None = None, *, by: str = "time", title: str = "") -> Figure:
        """Draw the memory over the step without and with a plan; see `memory_over_time`."""
        from ..pictures.memory import memory_over_time

        planned = None if plan is None else self.timeline(plan)
        budget = None if plan is None else plan.budget_bytes
        return memory_over_time(self.timeline(), planned, budget_bytes=budget, by=by, title=title)

    def strip(self, plan: Plan, *, title: str = "") -> Figure:
        """Draw what a plan does to each stage; see `plan_strip`."""
        from ..pictures.strip import plan_strip

        return plan_strip(self.profile, plan, title=title)

    def __repr__(self) -> str:
        return f"<Planner of {self.profile!r}>"

    def _faults_of(self, failed: DryRunFailedError, effort: Effort, *, check: bool) -> Sequence[Fault]:
        """Return the segments to blame for a dry run that failed: as a real step tells, else as dry runs do.

        Raises:
            Exception: What the step failed with, where it fails without segments too.
        """
        if not failed.segments:
            raise failed.cause
        faults = self.tried(failed.segments, effort).faults if check else ()
        return faults or [
            Fault(segments=guilty.segments, reason=f"it raises {guilty}")
            for guilty in self.search.dry_runs.guilty(failed)
        ]

    def _check_race(self, race: object) -> None:
        if not isinstance(race, int) or isinstance(race, bool) or race < 0:
            raise BudgetError(f"race must be a number of plans, got {race!r}: 3 times the three best in turn")
        if race > 1 and (self.session.card is not None or self.ranks > 1):
            elsewhere = "a card that is not there" if self.session.card is not None else f"{self.ranks} ranks"
            raise PlanError(
                f"race={race} times plans in real steps here, which tell nothing of {elsewhere}: leave race= out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold what was found for one budget.

    Attributes:
        planner: The planner that found it.
        draft: The plan's segments, their dry run and their price.
        notes: What a reader of the plan must know; "" is nothing.
        unrestricted: Added time of the best plan found that need not treat blocks alike, as a share; None where that
            was not asked.
        overhead: What the plan was measured to add, as a share of the unplanned step's time; None where it was not.
        overhead_range: The least and the most of it over the rounds.
    """

    planner: Planner
    draft: Draft
    notes: tuple[str, ...] = ()
    unrestricted: float | None = None
    overhead: float | None = None
    overhead_range: tuple[float, float] | None = None


def _host(session: Session, recorded: Profile) -> HostCostsByCache:
    """Return what segments cost the host: measured where operators were, so that estimates are the same each time."""
    if session.card is not None:
        return HostCostsByCache()  # What a host pays hides behind its card's work, as far as is known.
    if recorded.times_from.is_estimate:
        return HostCostsByCache(warm=ASSUMED, cold=ASSUMED)
    return host_costs(session.device)


def _shapes(tensors: tuple[BatchTensor, ...]) -> str:
    return ", ".join(f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}" for tensor in tensors)
