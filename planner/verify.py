"""`verify`: run the unmodified and the planned model on the same batch and seed, and compare everything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import nn

from ..profiler import BatchError
from ..profiler.allocator import collected, fits
from ..profiler.devices import device_of
from ..profiler.entry import read_from_before
from ..profiler.results import Arm, Difference, Results, differing, run_steps
from ..profiler.session import silent
from ..profiler.step import Loss, Step, check_present
from ..profiler.timing import forward_without_saving
from .applier.apply import apply_segments, check_subject, unplanned
from .budget import format_bytes
from .errors import PlanMismatchError
from .finding.times_in_turn import UNPLANNED, TimesInTurn, time_in_turn
from .finding.writing import batch_tensors
from .pictures.tables import html_table
from .plan import Plan
from .plan_words import percent_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification:
    """Hold what `verify` found.

    Attributes:
        exact: Loss, gradients, buffers and random state are bitwise those of the unmodified model, and what was left in
            Python's objects is the same.
        against: What the planned model was compared with: "the unmodified model", or another planned run where the
            unmodified one does not fit.
        loss: Comparison of the losses.
        gradients: Comparison of every parameter's gradient.
        buffers: Comparison of every buffer.
        random_state_equal: Whether torch's, Python's and numpy's random states end the same.
        left_otherwise: What of Python's objects that a step reaches (counters, lists) it left otherwise.
        repeatable: False where results differ, and the unmodified model's differ from its own as well: that proves
            nothing then.
        as_planned: The batch has shapes that the plan was made for. Otherwise its promised peak is a bound for smaller
            ones, and its promised added time is that of other shapes.
        predicted_peak_bytes: The plan's promise; of a plan for several batches, that for this one.
        measured_peak_bytes: The allocator's peak over the planned step, with what was alive before and the
            optimizer's state, which is counted but not executed; of a plan for several ranks, without that state.
        unplanned_measured_peak_bytes: The same of the unmodified model; None where it was not run.
        budget_bytes: The plan's budget.
        ranks: Processes that the plan is for. With several, its prediction and budget are one rank's, and what is
            measured here, on the whole model, is not compared with them.
        predicted_overhead: The plan's promise, as a share of the unplanned step.
        predicted_overhead_range: What the plan says it may range over.
        measured_overhead: Median planned by median unplanned step time less one; None where not measured.
        measured_overhead_range: The least and the most of it over the rounds; None where not measured.
        doubt: Why the measured times are not to be relied on, in words; "" where nothing tells.
        planned_step_ns: Median time of forward, loss and backward, planned; None where not measured.
        samples_per_second: The batch's first dimension by the planned step time; None where not measured.
        missing_loss: Name of the function that the plan was made with as `loss=`, where none was given here; "" else.
    """

    exact: bool
    against: str
    loss: Difference
    gradients: Difference
    buffers: Difference
    random_state_equal: bool
    left_otherwise: tuple[str, ...]
    repeatable: bool
    as_planned: bool
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    unplanned_measured_peak_bytes: int | None
    budget_bytes: int | None
    ranks: int
    predicted_overhead: float | None
    predicted_overhead_range: tuple[float, float] | None
    measured_overhead: float | None
    measured_overhead_range: tuple[float, float] | None
    doubt: str
    planned_step_ns: int | None
    samples_per_second: float | None
    missing_loss: str = ""

    @property
    def within_budget(self) -> bool:
        """Return whether the measured peak is within the plan's budget, if it has one that can be compared."""
        return self.budget_bytes is None or self.ranks > 1 or self.measured_peak_bytes <= self.budget_bytes

    def to_frame(self) -> pd.DataFrame:
        """Return one row a figure: `predicted`, `measured`, `unplanned`; bytes, and shares of the unplanned time."""
        rows = {
            "peak_bytes": (self.predicted_peak_bytes, self.measured_peak_bytes, self.unplanned_measured_peak_bytes),
            "added_time": (self.predicted_overhead, self.measured_overhead, None),
        }
        columns = ["predicted", "measured", "unplanned"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns).astype("Float64")

    def plot(self, *, title: str = "") -> Figure:
        """Draw what was predicted beside what was measured; see `promises_kept`."""
        from .pictures.verified import promises_kept

        return promises_kept(self, title=title)

    def __repr__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        peak, added = _bytes(self.measured_peak_bytes), _share(self.measured_overhead, None)
        wrong = f" ({'; '.join(self._differences())})" if not self.exact else ""
        return f"<Verification: {verdict} against {self.against}{wrong}, peak {peak}, added time {added}>"

    def _repr_html_(self) -> str:
        unplanned = _bytes(self.unplanned_measured_peak_bytes)
        rows = [
            ("peak", _bytes(self.predicted_peak_bytes), _bytes(self.measured_peak_bytes), unplanned),
            (
                "added time",
                _share(self.predicted_overhead, self.predicted_overhead_range),
                _share(self.measured_overhead, self.measured_overhead_range),
                "",
            ),
        ]
        header = ("", "predicted", "measured", "unplanned")
        return html_table(self._verdict(), header, rows, notes=self._remarks())

    def _verdict(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        return (
            f"{verdict} against {self.against}: loss {self.loss}; gradients {self.gradients}; buffers {self.buffers}; "
            f"random state {'equal' if self.random_state_equal else 'differs'}"
        )

    def _differences(self) -> list[str]:
        kinds = {"loss": self.loss, "gradients": self.gradients, "buffers": self.buffers}
        differing_ones = [f"{name}: {found}" for name, found in kinds.items() if found.unequal]
        random_state = [] if self.random_state_equal else ["the random state differs"]
        return differing_ones + random_state + [f"{name} is left otherwise" for name in self.left_otherwise[:3]]

    def _remarks(self) -> list[str]:
        remarks: list[str] = []
        if not self.within_budget:
            measured, budget = _bytes(self.measured_peak_bytes), _bytes(self.budget_bytes)
            remarks.append(f"NOT within the budget: {measured} measured, {budget} allowed")
        if self.left_otherwise:
            remarks.append(f"a planned step leaves otherwise: {', '.join(self.left_otherwise[:3])}")
        if not self.as_planned:
            remarks.append(
                "the batch has other shapes than were planned for: for smaller ones the predicted peak is a bound, the "
                "predicted added time is that of those shapes"
            )
        if self.missing_loss:
            remarks.append(
                f"another step than planned: the plan was made with loss={self.missing_loss}, and none was given"
            )
        if not self.repeatable:
            remarks.append("the unmodified model does not repeat itself bit for bit: differences above prove nothing")
        if self.doubt:
            remarks.append(f"do not rely on the measured time: {self.doubt}")
        return remarks

    def __str__(self) -> str:
        lines = [self._verdict(), *self._remarks()]
        predicted, measured = _bytes(self.predicted_peak_bytes), _bytes(self.measured_peak_bytes)
        unplanned, budget = _bytes(self.unplanned_measured_peak_bytes), _bytes(self.budget_bytes)
        if self.ranks == 1:
            lines.append(f"peak: predicted {predicted}, measured {measured}, unplanned {unplanned}, budget {budget}")
        else:
            lines.append(
                f"peak of the whole model, optimizer left out: measured {measured}, unplanned {unplanned}; not "
                f"compared with the {predicted} predicted and the {budget} allowed on each of {self.ranks} ranks"
            )
        rate = f"; {self.samples_per_second:.1f} samples/s with the plan" if self.samples_per_second else ""
        lines.append(
            f"added time: predicted {_share(self.predicted_overhead, self.predicted_overhead_range)}, measured "
            f"{_share(self.measured_overhead, self.measured_overhead_range)}{rate}"
        )
        return "\n".join(lines)


@collected()
def verify(
    model: nn.Module,
    batch: object,
    plan: Plan,
    *,
    loss: Loss | None = None,
    steps: int = 1,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare the planned with the unmodified model: results bit for bit, peaks by the allocator, times interleaved.

    The model is left as it was; a plan already in force on it is taken off meanwhile and put back.

    Args:
        model: The model, with or without a plan applied.
        batch: The batch, as for `plan`.
        plan: The plan to verify.
        loss: As for `plan`.
        steps: Steps after whose last the results are compared; parameters stay as they are, buffers go on.
        repeats: Timed repeats of each arm, interleaved; 0 measures no time.
        progress: Called with a few words before each phase.

    Raises:
        BatchError: The batch cannot be used, or `steps` or `repeats` is out of range.
        PlanMismatchError: The model differs from the one planned for.
        ApplyError: A segment cannot be applied.
    """
    if steps < 1 or repeats < 0:
        raise BatchError(f"steps must be at least 1 and repeats at least 0, got {steps} and {repeats}")
    step = Step.of(model, batch, loss, holds_output=isinstance(plan, Plan) and plan.circumstances.holds_output)
    check_present(model)
    check_subject(model, plan)
    plan.check(model)
    if model.training != plan.training:
        modes = "eval", "train"
        raise PlanMismatchError(
            f"the plan was made in {modes[plan.training]} mode and the model is in {modes[model.training]} mode, where "
            f"the plan does not act: call model.{modes[plan.training]}() first, or make the plan again"
        )
    with unplanned(model), step.guard.undisturbed():
        return _Bench(step, plan, steps, repeats, progress or silent).run()


class _Bench:
    """Run both arms."""

    def __init__(self, step: Step, plan: Plan, steps: int, repeats: int, say: Callable[[str], None]) -> None:
        self.step, self.plan, self.steps, self.repeats, self.say = step, plan, steps, repeats, say
        self.device = next(step.model.parameters()).device
        known = plan.circumstances
        self.accumulation = known.accumulation
        # With several ranks the plan knows the state over the shards, not the whole model's.
        self.kept_bytes = known.library_bytes + (known.optimizer_bytes if plan.ranks == 1 else 0)
        self.floor_bytes = known.optimizer_step_peak_bytes if plan.ranks == 1 else 0
        self.read: list[torch.Tensor] = []

    def run(self) -> Verification:
        needed = self.plan.circumstances.whole_step_bytes
        if needed is None:
            needed = (self.plan.unplanned_peak_bytes or 0) - self._entry_bytes()
        runs_whole = fits(needed, self.device)
        self._use_once()
        self.say("running the planned step")
        planned = self._run(self._planned)
        self.say("running the unmodified step")
        reference = self._run(nullcontext if runs_whole else self._planned)
        loss, gradients, buffers = planned.differences(reference)
        differs = any(difference.unequal for difference in (loss, gradients, buffers))
        same_random = planned.same_random_states(reference)
        left_otherwise = differing(planned.left, reference.left)
        repeats_itself = True
        if runs_whole and (differs or left_otherwise):
            again = self._run(nullcontext)
            repeats_itself = not (differs and again.first_difference(reference))
            if left_otherwise:
                # What another thread or a clock moves may have moved between two runs by chance.
                varying = differing(again.left, reference.left)
                once_more = differing(self._run(self._planned).left, again.left)
                left_otherwise = [name for name in left_otherwise if name in once_more and name not in varying]
        times = self._times(runs_whole)
        promise = self.plan.promise_for(batch_tensors(self.step)) if self.plan.batch else None
        whole_plan = promise is None or promise.tensors == self.plan.batch
        figures = self.plan if promise is None else promise
        planned_ns = times.median_ns("planned")
        batch_size = max((int(t.shape[0]) for t in self.step.tensors() if t.dim()), default=0)
        return Verification(
            exact=not differs and same_random and not left_otherwise,
            against="the unmodified model"
            if runs_whole
            else "a second planned run (the unmodified model does not fit)",
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            random_state_equal=same_random,
            left_otherwise=tuple(left_otherwise),
            repeatable=repeats_itself,
            as_planned=promise is not None or not self.plan.batch,
            predicted_peak_bytes=figures.predicted_peak_bytes,
            measured_peak_bytes=self._peak(planned),
            unplanned_measured_peak_bytes=self._peak(reference) if runs_whole else None,
            budget_bytes=self.plan.budget_bytes,
            ranks=self.plan.ranks,
            predicted_overhead=figures.predicted_overhead,
            predicted_overhead_range=self.plan.predicted_overhead_range if whole_plan else None,
            measured_overhead=times.overhead("planned"),
            measured_overhead_range=times.overhead_range("planned"),
            doubt=times.doubt,
            planned_step_ns=planned_ns,
            samples_per_second=batch_size / (planned_ns / 1e9) if planned_ns and batch_size else None,
            missing_loss=self.plan.circumstances.loss if self.step.loss is None else "",
        )

    def _use_once(self) -> None:
        """Let there be what a first step makes (masks, tables, the state of an optimizer in hooks), as in training."""
        guard = self.step.guard
        with self._planned():
            self._find_what_is_read()
            if guard.now.stepping_hooks:
                guard.advance(self.step.train)
            elif guard.changes:
                guard.advance(lambda: forward_without_saving(self.step))
            else:
                return
            self._find_what_is_read()

    def _find_what_is_read(self) -> None:
        with self.step.guard.preserved():
            self.read = read_from_before(lambda: forward_without_saving(self.step))

    def _planned(self) -> AbstractContextManager[Any]:
        return apply_segments(self.step.model, self.plan.segments, training=self.plan.training)

    def _entry_bytes(self) -> int:
        """Return what is alive at the step's entry and counted in every peak."""
        model = self.step.model
        tensors = [*model.parameters(), *model.buffers(), *self.step.tensors(), *self.read]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        round_to = device_of(self.device).round_to
        return sum(-(-nbytes // round_to) * round_to for nbytes in storages.values()) + self.kept_bytes

    def _run(self, arm: Arm) -> Results:
        return run_steps(self.step, arm, self.steps, accumulation=self.accumulation)

    def _peak(self, results: Results) -> int:
        place = device_of(self.device)
        beside = results.cached_bytes + place.context_bytes() if place.budget_on == "reserved" else 0
        return max(self.floor_bytes, results.peak_bytes + self._entry_bytes()) + beside

    def _times(self, runs_whole: bool) -> TimesInTurn:
        """Time both arms in turn."""
        arms: dict[str, Arm] = {"planned": self._planned} | ({UNPLANNED: nullcontext} if runs_whole else {})
        return time_in_turn(self.step, arms, self.device, self.repeats, self.say)


def _bytes(count: int | None) -> str:
    return "not known" if count is None else format_bytes(count)


def _share(value: float | None, around: tuple[float, float] | None) -> str:
    return percent_range(value, around, unknown="not measured")
