"""`plan`: profile, search, and try what was found on a real step before it is handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack

from torch import nn

from ...profiler import Profile, Session, open_session, profile
from ...profiler.allocator import collected
from ...profiler.host import HostCosts, host_costs
from ...profiler.step import Step
from ...solvers import SOLVERS
from ..applier.apply import unplanned
from ..bridge.bridge import Bridge
from ..bridge.hazards import Refusal, RefusedCalls
from ..bridge.scope import Scope
from ..budget import BudgetError, check_share, format_bytes, parse_budget
from ..circumstances import Circumstances, autocast_now
from ..errors import InfeasibleBudgetError, PlanError
from ..fingerprint import Fingerprint
from ..options import StepKeywords, StepOptions
from ..pictures.timeline import Timeline
from ..plan import BatchTensor, Plan, PlannedSegment
from .explain import explain_peak, held_output
from .search import DryRunFailedError, Search, Trial
from .trial import Fault, Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKS = 12
"""Most times to plan again without the segments whose replay computed something else."""


def plan(
    model: nn.Module,
    batch: object,
    budget: int | str,
    *,
    solver: str = "auto",
    headroom: float = 0.0,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    planner: Planner | None = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
    **step: Unpack[StepKeywords],
) -> Plan:
    """Find where to checkpoint so that the step fits the budget and the added time is least.

    The model is left as it was; nothing is applied.

    Args:
        model: The model, on the device it is trained on.
        batch: A mapping is passed as keyword arguments, a tuple or list as positional ones, a tensor alone as one.
        budget: Most bytes at the peak of the whole step: an int, "8GiB", or "60%" of the unplanned peak.
        solver: A name from `SOLVERS`: "auto", "dp", "ilp", "sqrt", ...
        headroom: Share of the budget to keep free.
        time_limit_s: Seconds for each solve; None stands for 20. A plan that was cut short says so, with its bound.
        gap: Share of the added time that a plan may be away from the optimum.
        planner: What `Planner.of` returned, to plan several budgets from one profile.
        check: Run the planned and the unmodified step once for real, and plan again without the segments whose replay
            computes something else.
        progress: Called with a few words before each phase.
        step: What else the step is: loss, optimizer, accumulation, save_sets, units, ranks, ...; see `StepOptions`.

    Raises:
        InfeasibleBudgetError: No plan fits; it carries the smallest peak found, its plan, and what holds it there.
        BudgetError: The budget, the headroom or the solver's name cannot be read.
        BatchError: The batch, `units` or `ranks` cannot be used.
        PlanError: `planner` was made for another model, batch or step than the one given.
    """
    check_share("headroom", headroom)
    check_solver(solver)
    check_effort(time_limit_s, gap)
    parse_budget(budget, 1 << 40)
    if planner is None:
        planner = Planner.of(model, batch, progress=progress, **step)
    else:
        planner.check_given(model, batch, step)
    return planner.plan(
        budget,
        solver=solver,
        headroom=headroom,
        time_limit_s=time_limit_s,
        gap=gap,
        check=check,
        progress=progress,
    )


def check_solver(solver: str) -> None:
    """Check a solver's name.

    Raises:
        BudgetError: There is no such solver.
    """
    if not isinstance(solver, str) or solver not in SOLVERS:
        raise BudgetError(f"unknown solver {solver!r}: choose one of {', '.join(SOLVERS)}")


def check_effort(time_limit_s: object, gap: object) -> None:
    """Check how long and how closely to solve.

    Raises:
        BudgetError: The time limit is not a positive number of seconds, or the gap no share in [0, 1).
    """
    if time_limit_s is not None and not (_is_number(time_limit_s) and time_limit_s > 0):
        raise BudgetError(
            f"time_limit_s must be a positive number of seconds or None, got {time_limit_s!r}: 60 gives a minute"
        )
    if not (_is_number(gap) and 0 <= gap < 1):
        raise BudgetError(f"gap must be a share in [0, 1), got {gap!r}: 0.01 accepts one per cent more added time")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, repr=False)
class Planner:
    """Hold one profiled step, from which any number of budgets can be planned.

    Attributes:
        search: The profiled step, and what finds plans for it.
        trials: Runs plans for real to see that they compute the same.
        options: What the step is besides its model and batch.
        units: Paths of the modules that are sharded on their own.
        autocast: What autocast was set to, as in `Circumstances`.
    """

    search: Search
    trials: Trials
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
            # What a host pays that is not here hides behind its card's work, as far as is known.
            HostCosts(0, 0) if session.card is not None else host_costs(session.device),
            cross_operators=options.cross_operators,
            save_sets=options.save_sets,
            units=paths,
            scope=scope,
        )
        search = Search(recorded, whole or recorded, bridge, session)
        return Planner(search, Trials(session.reference), options, paths, autocast_now(session.device.type))

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
        known, given = _batch_tensors(self.session.step), _batch_tensors(Step.of(model, batch, self.options.loss))
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
        return self.search.whole

    @property
    def bridge(self) -> Bridge:
        """Return the step's stages and candidates."""
        return self.search.bridge

    @property
    def session(self) -> Session:
        """Return the step, ready to be recorded."""
        return self.search.session

    @property
    def ranks(self) -> int:
        """Return the processes that the model will be sharded over; 1 where it will not."""
        return self.options.ranks

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
        progress: Callable[[str], None] | None = None,
    ) -> Plan:
        """Plan for one budget; see `plan`."""
        check_solver(solver)
        check_effort(time_limit_s, gap)
        asked = parse_budget(budget, self.search.unplanned_peak_bytes())
        limit = int(asked * (1 - check_share("headroom", headroom)))
        say = progress or silent
        with unplanned(self.session.step.model), self.session.step.guard.undisturbed():
            planner, found = self._found(limit, solver, time_limit_s, gap, say, check=check)
        if isinstance(found, DryRunFailedError):
            raise found.cause
        if found.peak_bytes <= limit:
            return planner.plan_of(found, asked, headroom)
        raise planner._infeasible(found, asked, limit, headroom, "" if solver == "auto" else f"{solver} ")

    def _found(
        self,
        limit: int,
        solver: str,
        time_limit_s: float | None,
        gap: float,
        say: Callable[[str], None],
        *,
        check: bool,
    ) -> tuple[Planner, Trial | DryRunFailedError]:
        """Search until a plan fits that computes the same, as far as `check` lets it be seen.

        Returns also the planner that found it: it offers none of the segments that were seen to fail.
        """
        target, planner = limit, self
        for _ in range(CHECKS):
            found = planner.search.best_or_failure(target, solver, time_limit_s, gap, say)
            faults = planner._faults(found.segments, say) if check else []
            for fault in faults:
                planner = planner._without(fault)
            if faults:
                continue
            if isinstance(found, DryRunFailedError) and found.segments:
                # No real step told which of them it is: dry runs do.
                for failure in planner.search.guilty(found):
                    planner = planner._without(Fault(segments=failure.segments, reason=f"it raises {failure}"))
                continue
            if isinstance(found, Trial):
                dry_run_peak, found = found.peak_bytes, planner._as_measured(found)
                if dry_run_peak <= target and found.peak_bytes > limit:
                    target -= found.peak_bytes - limit
                    continue
            return planner, found
        return planner, planner.search.unplanned_trial()

    def timeline(self, plan: Plan | None = None) -> Timeline:
        """Return the memory over the step, without a plan or with one: what the plan's own dry run saw.

        Where the plan promises more than the dry run saw, because it was run for real and the allocator gave out more,
        that is in the timeline as well; its peak is the plan's.

        Args:
            plan: A plan of this planner's; None takes the unplanned step.
        """
        profile = self.profile
        if plan is None:
            beside = self.search.unplanned_peak_bytes() - profile.peak_bytes()
            alive_bytes = int(profile.live_bytes().max(initial=0)) + beside
            timeline = Timeline.of(profile, profile, alive_bytes=alive_bytes, step_ns=profile.step_ns)
            return replace(timeline, peak_words=explain_peak(profile, profile, timeline.peak_bytes))
        record, alive_bytes, _ = self.search.dry_run(plan.segments)
        promised = plan.predicted_peak_bytes or 0
        if promised > profile.parts.optimizer_step_peak:
            alive_bytes = max(alive_bytes, promised)
        step_ns = profile.step_ns * (1 + (plan.predicted_overhead or 0.0))
        timeline = Timeline.of(record, profile, alive_bytes=alive_bytes, step_ns=step_ns)
        return replace(timeline, peak_words=explain_peak(record, profile, timeline.peak_bytes))

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

    def _faults(self, segments: tuple[PlannedSegment, ...], say: Callable[[str], None]) -> list[Fault]:
        card = self.session.card
        if card is not None:
            self.trials.unchecked = f"the plan was not tried on a real step: it was made for {card.name} without one"
            return []
        say(f"running {len(segments)} segments against the unmodified step")
        return self.trials.check(self.session.step, segments, self._whole_step_bytes())

    def _whole_step_bytes(self) -> int:
        """Return what the unmodified step of the whole model allocates."""
        return self.whole.peak_bytes() - self.whole.fixed_bytes()

    def _as_measured(self, trial: Trial) -> Trial:
        """Raise a trial's peak by what the allocator gave out beyond the dry run, where the planned step was run.

        The whole model is run, so that one rank's peak is left as it is.
        """
        if self.trials.peak_bytes is None or self.whole.accumulation or self.session.ranks is not None:
            return trial
        missed = max(0, self.search.with_entry(self.trials.peak_bytes) - trial.alive_bytes)
        return replace(trial, peak_bytes=max(trial.peak_bytes, trial.alive_bytes + trial.beside_bytes + missed))

    def _without(self, fault: Fault) -> Planner:
        """Return a planner of the same step that offers no segment around the faulty ones any more."""
        calls = frozenset((c.module, c.index) for segment in fault.segments for c in segment.members)
        name = ", ".join(str(segment) for segment in fault.segments)
        refusal = Refusal(name, f"computes something else in a replay ({fault.reason})")
        bridge = self.bridge.without(RefusedCalls(calls=calls, refusal=refusal))
        return replace(self, search=replace(self.search, bridge=bridge))

    def plan_of(self, trial: Trial, asked: int, headroom: float) -> Plan:
        """Return a trial as a plan, with all that was promised about it and the circumstances it holds for."""
        recorded, solution, card = self.profile, trial.solution, self.session.card
        step_ns = max(1, recorded.step_ns)
        model = self.session.step.model
        is_estimate = recorded.times_from.is_estimate or recorded.step_time_from.is_estimate
        mode = "" if model.training else "made in eval mode, acts in eval mode only: to train, call model.train() first"
        beside = trial.beside_bytes
        reserved = (
            f"budget and peaks are what the card reserves: {format_bytes(beside)} beside what tensors take, "
            f"{format_bytes(self.session.place.context_bytes())} of it for the context"
            if beside
            else ""
        )
        refusals = [f"not replayed: {words}" for words in self._refusals()]
        return Plan(
            segments=trial.segments,
            training=model.training,
            ranks=self.ranks,
            units=self.units,
            budget_bytes=asked,
            predicted_peak_bytes=trial.peak_bytes,
            predicted_overhead=solution.added_ns / step_ns,
            predicted_overhead_range=_overhead_range(recorded, solution.added_ns),
            unplanned_peak_bytes=self.search.unplanned_peak_bytes(),
            lower_bound_overhead=solution.lower_bound_ns / step_ns,
            gap=solution.gap,
            solver=solution.solver,
            status=str(solution.status.value),
            circumstances=Circumstances(
                autocast=self.autocast,
                device=self.session.place.words if card is None else f"cuda ({card.name}, not there: predicted)",
                accumulation=recorded.accumulation,
                holds_output=self.options.holds_output,
                optimizer=self.options.optimizer_name,
                optimizer_bytes=recorded.parts.optimizer,
                optimizer_step_peak_bytes=recorded.parts.optimizer_step_peak,
                library_bytes=recorded.library_bytes,
                whole_step_bytes=self._whole_step_bytes(),
                headroom=headroom,
                exclude=self.options.exclude,
                only=self.options.only,
            ),
            bytes_from="measured" if card is None else "estimated",
            times_from="estimated" if is_estimate else "measured",
            fingerprint=Fingerprint.of(model, calls=tuple(call.module for call in recorded.calls)),
            batch=_batch_tensors(self.session.step),
            versions=_versions(),
            notes=tuple(
                dict.fromkeys(
                    note
                    for note in (
                        mode,
                        reserved,
                        *recorded.notes,
                        self._held_output(),
                        *self.bridge.scope.notes(),
                        solution.note,
                        self.trials.unchecked,
                        *refusals,
                    )
                    if note
                )
            ),
        )

    def _held_output(self) -> str:
        return held_output(self.profile) if self.options.holds_output else ""

    def _refusals(self) -> list[str]:
        """Say which modules no segment holds, grouped by reason."""
        reasons: dict[str, list[str]] = {}
        for item in self.bridge.refusals():
            reasons.setdefault(item.reason, []).append(item.module)
        return [f"{_listed(modules)}, because it {reason}" for reason, modules in reasons.items()]

    def _infeasible(self, least: Trial, asked: int, limit: int, headroom: float, kind: str) -> InfeasibleBudgetError:
        plan = self.plan_of(least, least.peak_bytes, 0.0)
        reserved = f" ({format_bytes(limit)} after {headroom:.0%} headroom)" if headroom else ""
        holders = explain_peak(least.recording, self.profile, least.peak_bytes)
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        refused = self._refusals()
        because = f" Not replayable: {'; '.join(refused[:3])}." if refused else ""
        remarks = [words for words in (*self.bridge.scope.notes(), self._held_output()) if words]
        because += "".join(f" {words[0].upper()}{words[1:]}." for words in remarks)
        return InfeasibleBudgetError(
            f"no {kind}plan fits {format_bytes(asked)}{reserved}{each}: the smallest peak found is "
            f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), at the {holders}.{because} Raise the budget "
            "to that, make the batch smaller, or shorten what holds it (for logits: a chunked loss).",
            least_peak_bytes=least.peak_bytes,
            plan=plan,
        )


def _overhead_range(recorded: Profile, added_ns: int) -> tuple[float, float]:
    """Return an overhead's range: replays spread as the forward does, over a step as long or short as it was seen."""
    forward, step = recorded.forward, recorded.step
    if recorded.step_time_from.is_estimate:
        # Both are one measurement: they vary together.
        return added_ns / max(1, step.median_ns), added_ns / max(1, step.median_ns)
    share = added_ns / max(1, forward.median_ns)
    return share * forward.low_ns / max(1, step.high_ns), share * forward.high_ns / max(1, step.low_ns)


def _listed(modules: list[str]) -> str:
    """Name the first few modules."""
    more = len(modules) - 3
    return ", ".join(modules[:3]) + (f" and {more} more" if more > 0 else "")


def silent(_: str) -> None:
    """Take progress and say nothing."""


def _batch_tensors(step: Step) -> tuple[BatchTensor, ...]:
    named: list[tuple[str, Any]] = [(str(position), value) for position, value in enumerate(step.args)]
    named += list(step.kwargs.items())
    return tuple(
        BatchTensor(name=name, shape=tuple(value.shape), dtype=str(value.dtype), device=str(value.device))
        for name, value in named
        if hasattr(value, "shape") and hasattr(value, "dtype")
    )


def _shapes(tensors: tuple[BatchTensor, ...]) -> str:
    return ", ".join(f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}" for tensor in tensors)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("remat", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
