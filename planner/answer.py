"""`answer`: does it fit, how, how fast, what sets the limit and what was left out, on one page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

from torch import nn

from ..profiler.times import Origin
from .budget import format_bytes, parse_budget
from .errors import InfeasibleBudgetError
from .finding.planner import Planner
from .finding.writing import cache_words
from .options import StepKeywords, check_keywords, own_parameters
from .plan import Plan
from .plan_words import percent_range, rate_words

_INTEGERS = ("torch.int64", "torch.int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Say whether a step fits a budget, and what the figures to decide on are; `str` is the page, in Markdown.

    Attributes:
        model: Class name of the model.
        device: What the figures are for; it says so where the device is not there.
        fits: Whether the plan's peak is within the budget.
        budget_bytes: The budget, per rank.
        plan: The plan; where nothing fits, the one of the least peak.
        step_ns: Time of the unplanned step (forward, loss, backward), nanoseconds.
        step_time_from: Where it is from.
        optimizer_ns: How long the optimizer's step after it should take, nanoseconds; as in `Profile`.
        peak_words: Where the planned peak is, and what is alive there.
        cache_words: That a key-value cache keeps blocks from being replayed, and how to do without; "" where none does.
    """

    model: str
    device: str
    fits: bool
    budget_bytes: int
    plan: Plan
    step_ns: int
    step_time_from: Origin
    peak_words: str
    cache_words: str = ""
    optimizer_ns: int | None = None

    @property
    def parameters(self) -> int:
        """Return how many parameters the whole model has."""
        known = self.plan.fingerprint.parameters.values() if self.plan.fingerprint else ()
        return sum(math.prod(fact.shape) for fact in known)

    @property
    def precision(self) -> str:
        """Return the dtypes of the parameters, most bytes first, and what autocast or a policy makes of them."""
        known, held = self.plan.circumstances, Counter[str]()
        for fact in self.plan.fingerprint.parameters.values() if self.plan.fingerprint else ():
            held[_short(fact.dtype)] += math.prod(fact.shape)
        dtypes = " and ".join(dtype for dtype, _ in held.most_common())
        return ", ".join(filter(None, (f"{dtypes} parameters", known.precision, known.sharding_words)))

    @property
    def counted(self) -> tuple[int, str]:
        """Return how much a rank's batch is, and of what: tokens where it holds ids in two dimensions, else samples."""
        ids = [tensor.shape for tensor in self.plan.batch if tensor.dtype in _INTEGERS and len(tensor.shape) == 2]
        if ids:
            return max(map(math.prod, ids)), "tokens"
        return max((tensor.shape[0] for tensor in self.plan.batch if tensor.shape), default=1), "samples"

    @property
    def per_second(self) -> float:
        """Return how many tokens or samples a rank trains in a second, without what `left_out` names."""
        return self.counted[0] / (max(1, self.planned_step_ns + (self.optimizer_ns or 0)) * 1e-9)

    @property
    def left_out(self) -> str:
        """Name what a step of a training run takes that is in no time here."""
        left = ["the optimizer's step"] if self.optimizer_ns is None else []
        if self.plan.ranks > 1:
            left.append("collectives")
        if self.plan.circumstances.card:
            left.append("launching kernels")
        return ", ".join(left)

    @property
    def planned_step_ns(self) -> int:
        """Return the time of the planned step, nanoseconds."""
        return round(self.step_ns * (1 + (self.plan.predicted_overhead or 0.0)))

    @property
    def _kind(self) -> str:
        if self.plan.circumstances.card:
            return "All figures are predicted; nothing was run."
        if self.step_time_from.is_estimate:
            return "All figures are predicted, times by an estimate."
        return (
            "The time of the step without a plan was measured on this machine; peaks, and what the plan adds, are "
            "predicted."
        )

    @property
    def _step_words(self) -> str:
        """Say where the planned step's time is from."""
        if self.step_time_from.is_estimate or not self.plan.segments:
            return str(self.step_time_from)
        return f"without the plan {self.step_ns / 1e9:.3g} s, {self.step_time_from}; the added time is predicted"

    def __str__(self) -> str:
        plan, (count, unit) = self.plan, self.counted
        each = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
        so = f", {self.cache_words}; this is the least peak found so" if self.cache_words else ""
        verdict = "**Yes**" if self.fits else f"**No**{so or ': this is the least peak found'}"
        added = percent_range(plan.predicted_overhead, plan.predicted_overhead_range)
        shapes = ", ".join(f"{tensor.name} {list(tensor.shape)} {_short(tensor.dtype)}" for tensor in plan.batch)
        optimizer: list[tuple[str, str]] = []
        if self.optimizer_ns is not None:
            optimizer = [("the optimizer's step", f"{self.optimizer_ns / 1e9:.3g} s, by the bytes that it moves")]
        rows = [
            ("batch of a rank" if plan.ranks > 1 else "batch", f"{shapes}: {count:,} {unit}"),
            ("precision", self.precision),
            ("peak", f"{_bytes(plan.predicted_peak_bytes)} of {format_bytes(self.budget_bytes)}{each}"),
            ("without a plan", _bytes(plan.unplanned_peak_bytes)),
            ("added time", added),
            ("step with the plan", f"{self.planned_step_ns / 1e9:.3g} s of forward and backward ({self._step_words})"),
            *optimizer,
            ("speed with the plan", f"{rate_words(self.per_second)} {unit}/s{each}; left out: {self.left_out}"),
            ("what sets the limit", self.peak_words),
            ("solver", f"{plan.solver or 'none'}, {plan.status}"),
        ]
        segments = [line for line in plan.describe().splitlines()[1:] if not line.startswith("note: ")]
        return "\n".join(
            [
                f"# {self.model}, {_count(self.parameters)} parameters, on {self.device}",
                "",
                f"Does it fit {format_bytes(self.budget_bytes)}{each}? {verdict}. {self._kind}",
                "",
                "| | |",
                "| --- | --- |",
                *(f"| {name} | {value} |" for name, value in rows),
                "",
                "## The plan",
                "",
                *(segments or ["Nothing is checkpointed."]),
                "",
                "## What to know of these figures",
                "",
                *(f"- {note}" for note in plan.notes),
            ]
        )

    def _repr_markdown_(self) -> str:
        """Return the page, which notebooks show."""
        return str(self)


def answer(
    model: nn.Module,
    batch: object,
    budget: int | str,
    *,
    solver: str = "auto",
    headroom: float = 0.0,
    time_limit_s: float | None = None,
    planner: Planner | None = None,
    progress: Callable[[str], None] | None = None,
    **step: Unpack[StepKeywords],
) -> Answer:
    """Plan, and sum up what was found, whether it fits or not.

    Args:
        model: As for `plan`; with `device=` it may be on meta.
        batch: As for `plan`.
        budget: As for `plan`.
        solver: As for `plan`.
        headroom: As for `plan`.
        time_limit_s: As for `plan`.
        planner: As for `plan`.
        progress: As for `plan`.
        step: As for `plan`; see `StepOptions`.

    Raises:
        BudgetError: The budget, the headroom or the solver's name cannot be read.
        BatchError: The batch, `units` or `ranks` cannot be used.
        PlanError: `planner` was made for another model, batch or step than the one given.
    """
    check_keywords(step, own_parameters(answer))
    parse_budget(budget, 1 << 40)
    if planner is None:
        planner = Planner.of(model, batch, progress=progress, **step)
    else:
        planner.check_given(model, batch, step)
    profile = planner.profile
    try:
        found = planner.plan(budget, solver=solver, headroom=headroom, time_limit_s=time_limit_s, progress=progress)
        fits = True
    except InfeasibleBudgetError as error:
        found, fits = error.plan, False
    return Answer(
        model=profile.model,
        device=profile.device,
        fits=fits,
        budget_bytes=planner.budget_bytes(budget),
        plan=found,
        step_ns=profile.step_ns,
        step_time_from=profile.step_time_from,
        peak_words=planner.timeline(found).peak_words,
        cache_words=cache_words(planner),
        optimizer_ns=profile.optimizer_ns,
    )


def _bytes(count: int | None) -> str:
    return "not known" if count is None else format_bytes(count)


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def _count(number: int) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
