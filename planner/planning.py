"""`plan`: profile, solve, dry-run the plan, tighten, until the dry run fits the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from ..profiler import BatchError, Profile, Session, open_session, profile
from ..profiler.allocator import allocated_peak_bytes, collected
from ..profiler.optimizer import optimizer_bytes
from ..profiler.preserve import preserved
from ..profiler.recorder import Recording
from ..profiler.step import Loss
from ..solvers import SOLVERS, BudgetTooSmallError, Segment, Solution
from .apply import apply_segments, unplanned
from .budget import BudgetError, check_share, format_bytes, parse_budget
from .errors import InfeasibleBudgetError
from .explain import explain_peak
from .fingerprint import Fingerprint
from .host import host_costs
from .plan import BatchTensor, Call, Plan, PlannedSegment, SavedOperator
from .problem import Bridge
from .sharding import Sharding
from .trial import Fault, Trials

ROUNDS = 8
"""Most rounds of solving and dry-running."""
CHECKS = 12
"""Most times to plan again without the segments whose replay computed something else."""
REMEMBERED = 16
"""Dry runs kept: solvers often come to the same plan."""
UNSEEN = 0.01
"""Where the allocator gave out this share of the peak more than was recorded, planned steps are measured for real."""
CLOSE = 0.002
"""A memory model that overstated a plan by less than this share of the budget is not asked again."""


def plan(
    model: nn.Module,
    batch: object,
    budget: int | str,
    *,
    solver: str = "auto",
    loss: Loss | None = None,
    optimizer: Optimizer | str | None = None,
    accumulation: bool = False,
    headroom: float = 0.0,
    save_sets: bool = True,
    cross_operators: bool = True,
    units: Iterable[nn.Module] = (),
    ranks: int = 1,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    planner: Planner | None = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Find where to checkpoint so that the step fits the budget and the added time is least.

    The model is left as it was; nothing is applied.

    Args:
        model: The model, on the device it is trained on.
        batch: A mapping is passed as keyword arguments, a tuple or list as positional ones, a tensor alone as one.
        budget: Most bytes at the peak of the whole step: an int, "8GiB", or "60%" of the unplanned peak.
        solver: A name from `SOLVERS`: "auto", "dp", "ilp", "sqrt", ...
        loss: Takes the model's output to a scalar; default `output.loss`, else the mean of floating-point outputs.
        optimizer: An instance or a name such as "adamw"; its state and step count in the peak.
        accumulation: Count gradients as alive throughout.
        headroom: Share of the budget to keep free.
        save_sets: Let segments keep some operators' outputs (selective checkpointing).
        cross_operators: Let segments run across a container's own operators; not possible under torch.compile.
        units: Modules that will be sharded on their own (`fully_shard`), the root around them: their parameters are
            there only during their own calls, so a segment holds such a call whole or lies within it.
        ranks: Processes that `fully_shard` will divide the model over. With more than one, the budget and all peaks are
            those of one rank: shards of parameters, gradients and optimizer state, and what is gathered and reduced
            meanwhile (`gathering` says how that is counted). 1 counts the whole model, as under DDP, whose gradient
            buckets are not counted.
        time_limit_s: Seconds for each solve; None lets a solver finish, but for "auto" (20 s).
        gap: Share of the added time that a plan may be away from the optimum.
        planner: What `Planner.of` returned, to plan several budgets from one profile.
        check: Run the planned and the unmodified step once for real, and plan again without the segments whose replay
            computes something else.
        progress: Called with a few words before each phase.

    Raises:
        InfeasibleBudgetError: No plan fits; it carries the smallest reachable peak, its plan, and what holds it there.
        BudgetError: The budget, the headroom or the solver's name cannot be read.
        BatchError: The batch, `units` or `ranks` cannot be used.
    """
    check_share("headroom", headroom)
    check_solver(solver)
    check_effort(time_limit_s, gap)
    parse_budget(budget, 1 << 40)
    if planner is None:
        planner = Planner.of(
            model,
            batch,
            loss=loss,
            optimizer=optimizer,
            accumulation=accumulation,
            save_sets=save_sets,
            cross_operators=cross_operators,
            units=units,
            ranks=ranks,
            progress=progress,
        )
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


@dataclass(frozen=True, slots=True)
class Trial:
    """Hold a solution, the segments it names on the model, and their dry run.

    Attributes:
        solution: The solver's answer.
        segments: Its segments by name.
        recording: What was recorded, one rank's part of it where the model will be sharded.
        alive_bytes: The most that is alive in it.
        whole_bytes: The same of the whole model: what a real run here is compared with.
        peak_bytes: The step's peak, the optimizer's own step included.
    """

    solution: Solution
    segments: tuple[PlannedSegment, ...]
    recording: Recording
    alive_bytes: int
    whole_bytes: int
    peak_bytes: int


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


def _check_ranks(ranks: object) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise BatchError(
            f"ranks must be a positive int, got {ranks!r}: pass the number of processes that share the model's shards, "
            "torch.distributed.get_world_size() for one"
        )


def _paths(model: nn.Module, units: Iterable[object]) -> list[str]:
    """Return the paths of a model's modules.

    Raises:
        BatchError: One is not a module of the model.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    given = list(units)
    for unit in given:
        if id(unit) not in paths:
            raise BatchError(f"units must be modules of the model, got a {type(unit).__name__}: pass model.layers, say")
    return [paths[id(unit)] for unit in given]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _DryRunFailedError(Exception):
    """Carry the segments under which a step failed that runs without them."""

    def __init__(self, segments: tuple[PlannedSegment, ...], cause: Exception) -> None:
        super().__init__(str(cause))
        self.segments = segments
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Planner:
    """Hold one profiled step, from which any number of budgets can be planned.

    Attributes:
        profile: The recorded step, one rank's part of it where there are several.
        whole: The recorded step of the whole model.
        bridge: Its stages and candidates.
        session: Records the planned steps as the unplanned one was recorded.
        optimizer: Name of the optimizer counted, or "".
        trials: Runs plans for real to see that they compute the same.
        units: Paths of the modules that are sharded on their own.
        sharding: Who holds what; None where the model is not sharded.
    """

    profile: Profile
    whole: Profile
    bridge: Bridge
    session: Session
    optimizer: str
    trials: Trials
    units: tuple[str, ...] = ()
    sharding: Sharding | None = None
    _dry_runs: dict[tuple[PlannedSegment, ...], tuple[Recording, int, int]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        model: nn.Module,
        batch: object,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | str | None = None,
        accumulation: bool = False,
        save_sets: bool = True,
        cross_operators: bool = True,
        units: Iterable[nn.Module] = (),
        ranks: int = 1,
        repeats: int = 3,
        progress: Callable[[str], None] | None = None,
    ) -> Planner:
        """Profile a step; the arguments are those of `plan`."""
        _check_ranks(ranks)
        # Shards of gradients that stay from batch to batch are added by the sharding; whole gradients do not stay.
        kept_whole = accumulation and ranks == 1
        session = open_session(model, batch, loss, accumulation=kept_whole)
        paths = _paths(model, units)
        sharding = None
        if ranks > 1:
            round_to = session.round_to
            sharding = Sharding.of(model, paths, ranks, accumulation=accumulation, round_to=round_to)
        with unplanned(model):
            whole = profile(
                model,
                batch,
                loss=loss,
                optimizer=optimizer,
                accumulation=kept_whole,
                repeats=repeats,
                session=session,
                progress=progress,
            )
            recorded = whole
            if sharding is not None:
                sizes = {"round_to": session.round_to, "ranks": ranks}
                kept = None if optimizer is None else optimizer_bytes(session.step, optimizer, **sizes)
                recorded = sharding.of_profile(whole, kept)
        bridge = Bridge(
            recorded, host_costs(session.device), cross_operators=cross_operators, save_sets=save_sets, units=paths
        )
        name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__ if optimizer else ""
        trials = Trials(session.reference)
        return Planner(recorded, whole, bridge, session, name, trials, units=tuple(paths), sharding=sharding)

    @property
    def ranks(self) -> int:
        """Return the processes that the model will be sharded over; 1 where it will not."""
        return 1 if self.sharding is None else self.sharding.ranks

    def on_rank(self, recording: Recording) -> Recording:
        """Return one rank's part of a recorded step of the whole model."""
        return recording if self.sharding is None else self.sharding.of_recording(recording)

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
        asked = parse_budget(budget, self.profile.peak_bytes())
        limit = int(asked * (1 - check_share("headroom", headroom)))
        say = progress or silent
        target = limit
        for _ in range(CHECKS):
            found = self._search_or_failure(target, solver, time_limit_s, gap, say)
            faults = self._faults(found.segments, say) if check else []
            for fault in faults:
                self._refuse(fault)
            if faults:
                continue
            if isinstance(found, Trial):
                dry_run_peak, found = found.peak_bytes, self._as_measured(found)
                if dry_run_peak <= target and found.peak_bytes > limit:
                    target -= found.peak_bytes - limit
                    continue
            break
        else:
            found = self._unplanned_trial()
        if isinstance(found, _DryRunFailedError):
            raise found.cause
        if found.peak_bytes <= limit:
            return self._plan_of(found, asked, headroom)
        raise self._infeasible(found, asked, limit, headroom, "" if solver == "auto" else f"{solver} ")

    def _faults(self, segments: tuple[PlannedSegment, ...], say: Callable[[str], None]) -> list[Fault]:
        say(f"running {len(segments)} segments against the unmodified step")
        return self.trials.check(self.session.step, segments, self._whole_step_bytes())

    def _whole_step_bytes(self) -> int:
        """Return what the unmodified step of the whole model allocates."""
        return self.whole.peak_bytes() - self.whole.fixed_bytes()

    def _as_measured(self, trial: Trial) -> Trial:
        """Raise a trial's peak by what the allocator gave out beyond the dry run, where the planned step was run."""
        if self.trials.peak_bytes is None or self.whole.accumulation:
            return trial
        missed = max(0, self._with_entry(self.trials.peak_bytes) - trial.whole_bytes)
        return replace(trial, peak_bytes=max(trial.peak_bytes, trial.alive_bytes + missed))

    def _with_entry(self, allocated: int) -> int:
        """Return the peak of a step by what the allocator gave out in it: nothing unseen is left to add."""
        return allocated + self.whole.fixed_bytes() - self.whole.unseen_bytes

    def _refuse(self, fault: Fault) -> None:
        members = [call for segment in fault.segments for call in segment.members]
        name = ", ".join(str(segment) for segment in fault.segments)
        reason = f"computes something else in a replay ({fault.reason})"
        self.bridge.refuse([(call.module, call.index) for call in members], name, reason)

    def _unplanned_trial(self) -> Trial:
        return self.trial(SOLVERS["none"](self.bridge.problem(self.profile.peak_bytes())))

    def _search_or_failure(
        self, limit: int, solver: str, time_limit_s: float | None, gap: float, say: Callable[[str], None]
    ) -> Trial | _DryRunFailedError:
        try:
            return self._search(limit, solver, time_limit_s, gap, say)
        except _DryRunFailedError as failed:
            return failed

    def _search(
        self, limit: int, solver: str, time_limit_s: float | None, gap: float, say: Callable[[str], None]
    ) -> Trial:
        """Solve and dry-run until a plan fits the limit; else return the trial of least peak."""
        best: Trial | None = None
        least: Trial | None = None
        target, ceiling, infeasible = limit, None, False
        tried: set[tuple[Segment, ...]] = set()
        for round_number in range(1, ROUNDS + 1):
            say(f"{solver}, round {round_number}: solving for {format_bytes(target)}")
            try:
                problem = self.bridge.problem(max(1, target))
                solution = SOLVERS[solver](problem, time_limit_s=time_limit_s, gap=gap)
                infeasible = False
            except BudgetTooSmallError as error:
                solution, infeasible = error.solution, True
            if solution.segments in tried:
                break
            tried.add(solution.segments)
            say(f"{solver}, round {round_number}: dry run of {solution.count_segments()} segments")
            trial = self.trial(solution)
            if least is None or trial.peak_bytes < least.peak_bytes:
                least = trial
            if trial.peak_bytes <= limit:
                if best is None or trial.solution.added_ns < best.solution.added_ns:
                    best = trial
                overstated = solution.peak_bytes - trial.peak_bytes
                raised = target + overstated
                if ceiling is not None:
                    raised = min(raised, (target + ceiling) // 2)
                if infeasible or solution.added_ns == 0 or raised <= target + CLOSE * limit:
                    break
                target = raised
            elif infeasible:
                break
            else:
                # Below this plan's own simulated peak, or a solver may well answer with the same plan again.
                ceiling = solution.peak_bytes if ceiling is None else min(ceiling, solution.peak_bytes)
                target = solution.peak_bytes - max(trial.peak_bytes - limit, 1)
        if best is not None:
            return best
        assert least is not None
        names = {"sqrt"} if infeasible else {solver, "sqrt"}
        found = [least, self._unplanned_trial(), *(self._least(name, time_limit_s) for name in sorted(names))]
        return min(found, key=lambda trial: trial.peak_bytes)

    def _least(self, solver: str, time_limit_s: float | None) -> Trial:
        """Return the trial of a solver's plan of least peak."""
        try:
            solution = SOLVERS[solver](self.bridge.problem(1), time_limit_s=time_limit_s)
        except BudgetTooSmallError as error:
            solution = error.solution
        return self.trial(solution)

    def trial(self, solution: Solution) -> Trial:
        """Apply a solution's segments, record the planned step, and take them off again."""
        segments = tuple(self.planned_segment(segment) for segment in solution.segments)
        if segments not in self._dry_runs:
            if len(self._dry_runs) >= REMEMBERED:
                del self._dry_runs[next(iter(self._dry_runs))]
            self._dry_runs[segments] = self._dry_run(segments)
        recording, alive, whole = self._dry_runs[segments]
        peak = max(alive, self.profile.parts.optimizer_step_peak)
        return Trial(solution, segments, recording, alive, whole, peak)

    def _dry_run(self, segments: tuple[PlannedSegment, ...]) -> tuple[Recording, int, int]:
        """Return the recording, and the most bytes alive in it and in that of the whole model."""
        model = self.session.step.model
        try:
            with unplanned(model), apply_segments(model, segments, training=model.training):
                recording = self.session.record(self.profile.bytes_from, planned=True)
                measured = self._measured_bytes()
        except Exception as error:
            raise _DryRunFailedError(segments, error) from error
        recorded = recording.peak_bytes() + self.whole.parts.optimizer
        unseen = max(0, measured - recorded) if measured else self.unseen_bytes(segments)
        recording = self.on_rank(recording)
        alive = recording.peak_bytes() + self.profile.parts.optimizer + unseen
        return recording, alive, recorded + unseen

    def _measured_bytes(self) -> int:
        """Return the allocator's peak of the step as the model is now, where a recording does not tell it; else 0.

        That is where fake tensors could not be used, or where the unplanned step allocated more than was recorded: what
        depends on data, or is hidden inside a library (recurrent layers), is then not guessed.
        """
        profile, session = self.whole, self.session
        told = profile.bytes_from == "dry run" and profile.unseen_bytes <= UNSEEN * profile.peak_bytes()
        if told or profile.accumulation:
            return 0
        with preserved(session.step.model, written_parameters=session.step.written):
            return self._with_entry(allocated_peak_bytes(session.step.train, session.device))

    def unseen_bytes(self, segments: tuple[PlannedSegment, ...]) -> int:
        """Return what a planned step holds beyond its dry run, counted as alive throughout.

        Besides what the profile missed, that is what torch's checkpoint keeps of the random state, which is no
        operator's output: once per region, once more in a replay. It lies in the CPU's memory whatever the device.
        """
        if self.session.device.type != "cpu":
            return self.profile.unseen_bytes
        regions = sum(1 for segment in segments for _ in segment.walk())
        random_state = (regions + 1) * torch.get_rng_state().nbytes if regions else 0
        return self.profile.unseen_bytes + random_state

    def planned_segment(self, segment: Segment) -> PlannedSegment:
        """Name a chosen segment by its module calls."""
        bridge, calls = self.bridge, self.profile.calls
        first, end = bridge.span(segment.start, segment.stop)
        members = self._members_around(segment)
        return PlannedSegment(
            members=tuple(Call(module=calls[index].module, index=calls[index].index) for index in members),
            save=tuple(
                SavedOperator(operator=name, index=index)
                for name, index in (bridge.saved_operator(operator, segment.start) for operator in segment.keep)
            ),
            children=tuple(self.planned_segment(child) for child in segment.children),
            early_stop=not bridge.replays_whole(segment.start, segment.stop),
            restored_buffers=bridge.restored_buffers(segment.start, segment.stop),
            crosses_operators=sum(calls[index].stop - calls[index].start for index in members) < end - first,
        )

    def _members_around(self, segment: Segment) -> list[int]:
        """Return a segment's members: the largest calls inside it that no segment nested in it begins or ends within.

        A nested segment may lie inside one member. If it began in one and ended in another, a replay that makes each
        member's call as one step could not see it end; such members give way to the calls that they make.
        """
        bridge, calls = self.bridge, self.profile.calls
        nested = [bridge.span(inner.start, inner.stop) for inner in segment.walk() if inner is not segment]
        members: list[int] = []
        waiting = bridge.members(segment.start, segment.stop)[::-1]
        while waiting:
            index = waiting.pop()
            start, stop = calls[index].start, calls[index].stop
            if any(a < start < b < stop or start < a < stop < b for a, b in nested):
                made = [k for k, call in enumerate(calls) if call.parent == index and call.stop > call.start]
                waiting += made[::-1]
            else:
                members.append(index)
        return members

    def _plan_of(self, trial: Trial, asked: int, headroom: float) -> Plan:
        recorded, solution = self.profile, trial.solution
        step_ns = max(1, recorded.step_ns)
        model = self.session.step.model
        source: Literal["measured", "estimated"] = (
            "estimated" if "estimate" in recorded.times_from + recorded.step_time_from else "measured"
        )
        mode = "" if model.training else "made in eval mode, acts in eval mode only: to train, call model.train() first"
        refusals = [f"not replayed: {words}" for words in self._refusals()]
        return Plan(
            segments=trial.segments,
            training=model.training,
            ranks=self.ranks,
            units=self.units,
            budget_bytes=asked,
            predicted_peak_bytes=trial.peak_bytes,
            predicted_overhead=solution.added_ns / step_ns,
            unplanned_peak_bytes=recorded.peak_bytes(),
            lower_bound_overhead=solution.lower_bound_ns / step_ns,
            gap=solution.gap,
            solver=solution.solver,
            status=str(solution.status.value),
            step={
                "accumulation": recorded.accumulation,
                "optimizer": self.optimizer,
                "optimizer_bytes": recorded.parts.optimizer,
                "optimizer_step_peak_bytes": recorded.parts.optimizer_step_peak,
                "headroom": headroom,
                **({"whole_step_bytes": self._whole_step_bytes()} if self.ranks > 1 else {}),
            },
            bytes_from="measured",
            times_from=source,
            fingerprint=Fingerprint.of(model, calls=tuple(call.module for call in recorded.calls)),
            batch=_batch_tensors(self.session),
            versions=_versions(),
            notes=tuple(
                dict.fromkeys(
                    note for note in (mode, *recorded.notes, solution.note, self.trials.unchecked, *refusals) if note
                )
            ),
        )

    def _refusals(self) -> list[str]:
        """Say which modules no segment holds, grouped by reason."""
        reasons: dict[str, list[str]] = {}
        for item in self.bridge.refusals():
            reasons.setdefault(item.reason, []).append(item.module)
        return [f"{_listed(modules)}, because it {reason}" for reason, modules in reasons.items()]

    def _infeasible(self, least: Trial, asked: int, limit: int, headroom: float, kind: str) -> InfeasibleBudgetError:
        plan = self._plan_of(least, least.peak_bytes, 0.0)
        reserved = f" ({format_bytes(limit)} after {headroom:.0%} headroom)" if headroom else ""
        holders = explain_peak(least.recording, self.profile, least.peak_bytes)
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        refused = self._refusals()
        because = f" Not replayable: {'; '.join(refused[:3])}." if refused else ""
        return InfeasibleBudgetError(
            f"no {kind}plan fits {format_bytes(asked)}{reserved}{each}: the smallest reachable peak is "
            f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), at the {holders}.{because} Raise the budget "
            "to that, make the batch smaller, or shorten what holds it (for logits: a chunked loss).",
            least_peak_bytes=least.peak_bytes,
            plan=plan,
        )


def _listed(modules: list[str]) -> str:
    """Name the first few modules."""
    more = len(modules) - 3
    return ", ".join(modules[:3]) + (f" and {more} more" if more > 0 else "")


def silent(_: str) -> None:
    """Take progress and say nothing."""


def _batch_tensors(session: Session) -> tuple[BatchTensor, ...]:
    step = session.step
    named: list[tuple[str, Any]] = [(str(position), value) for position, value in enumerate(step.args)]
    named += list(step.kwargs.items())
    return tuple(
        BatchTensor(name=name, shape=tuple(value.shape), dtype=str(value.dtype), device=str(value.device))
        for name, value in named
        if hasattr(value, "shape") and hasattr(value, "dtype")
    )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("remat", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
