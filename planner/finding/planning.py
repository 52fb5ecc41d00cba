"""`plan`: profile, search, and try what was found on a real step before it is handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeGuard

from torch import nn
from torch.optim import Optimizer

from ...profiler import BatchError, Profile, Session, open_session, profile
from ...profiler.allocator import collected
from ...profiler.host import host_costs
from ...profiler.optimizer import optimizer_bytes
from ...profiler.step import Loss
from ...solvers import SOLVERS
from ..applier.apply import unplanned
from ..bridge.problem import Bridge
from ..budget import BudgetError, check_share, format_bytes, parse_budget
from ..errors import InfeasibleBudgetError
from ..fingerprint import Fingerprint
from ..plan import BatchTensor, Plan, PlannedSegment
from ..sharding.sharding import Sharding
from .explain import explain_peak
from .search import DryRunFailedError, Search, Trial
from .trial import Fault, Trials

CHECKS = 12
"""Most times to plan again without the segments whose replay computed something else."""


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
        InfeasibleBudgetError: No plan fits; it carries the smallest peak found, its plan, and what holds it there.
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


def _paths(model: nn.Module, units: object) -> list[str]:
    """Return the paths of a model's modules.

    Raises:
        BatchError: One is not a module of the model.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    if not isinstance(units, Iterable):
        raise BatchError(
            f"units must be several modules of the model, got {type(units).__name__}: pass model.layers, say"
        )
    given = list(units)
    for unit in given:
        if id(unit) not in paths:
            raise BatchError(f"units must be modules of the model, got a {type(unit).__name__}: pass model.layers, say")
    return [paths[id(unit)] for unit in given]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Planner:
    """Hold one profiled step, from which any number of budgets can be planned.

    Attributes:
        search: The profiled step, and what finds plans for it.
        optimizer: Name of the optimizer counted, or "".
        trials: Runs plans for real to see that they compute the same.
        units: Paths of the modules that are sharded on their own.
    """

    search: Search
    optimizer: str
    trials: Trials
    units: tuple[str, ...]

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
        search = Search(recorded, whole, bridge, session, sharding)
        return Planner(search, name, trials, tuple(paths))

    @property
    def profile(self) -> Profile:
        """Return the recorded step, one rank's part of it where there are several."""
        return self.search.profile

    @property
    def whole(self) -> Profile:
        """Return the recorded step of the whole model."""
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
        return 1 if self.search.sharding is None else self.search.sharding.ranks

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
            found = self.search.best_or_failure(target, solver, time_limit_s, gap, say)
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
            found = self.search.unplanned_trial()
        if isinstance(found, DryRunFailedError):
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
        missed = max(0, self.search.with_entry(self.trials.peak_bytes) - trial.whole_bytes)
        return replace(trial, peak_bytes=max(trial.peak_bytes, trial.alive_bytes + missed))

    def _refuse(self, fault: Fault) -> None:
        members = [call for segment in fault.segments for call in segment.members]
        name = ", ".join(str(segment) for segment in fault.segments)
        reason = f"computes something else in a replay ({fault.reason})"
        self.bridge.refuse([(call.module, call.index) for call in members], name, reason)

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
            f"no {kind}plan fits {format_bytes(asked)}{reserved}{each}: the smallest peak found is "
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
