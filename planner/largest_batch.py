"""`largest_batch`: for a memory budget, the batch size with the best predicted throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import pandas as pd
import torch
from torch import nn

from ..profiler.session import silent
from .budget import BudgetError, format_bytes, parse_budget
from .errors import InfeasibleBudgetError
from .finding.effort import check_solver
from .finding.planner import Planner
from .options import StepKeywords, StepOptions, check_keywords, own_parameters
from .pictures.tables import html_table
from .plan import Plan
from .plan_words import rate_words
from .verify import Verification, verify

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 1 << 20
"""Doubling stops here at the latest."""
CLOSE = 8
"""Sizes nearer than an eighth of the best are not told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Say what one batch size costs.

    Attributes:
        size: Samples in the batch.
        unplanned_peak_bytes: Peak of the step without a plan; None where it could not be profiled.
        predicted_peak_bytes: Peak of the planned step; None where no plan fits.
        predicted_overhead: Added time as a share of the unplanned step's; None where no plan fits.
        samples_per_second: Predicted: size by planned step time, on a named card with the optimizer's step; None where
            no plan fits.
        samples_per_second_range: The same by the longest and the shortest step that was timed.
        step_ns: Time of the unplanned step, nanoseconds; None where it could not be profiled.
        step_time_from: How `step_ns` was obtained.
        segments: Top-level segments of the plan; 0 where the step fits as it is.
        least_peak_bytes: Smallest peak reached, where no plan fits.
        note: Why no plan fits; empty where one does.
    """

    size: int
    unplanned_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None
    samples_per_second: float | None = None
    samples_per_second_range: tuple[float, float] | None = None
    step_ns: int | None = None
    step_time_from: str = ""
    segments: int | None = None
    least_peak_bytes: int | None = None
    note: str = ""

    @property
    def fits(self) -> bool:
        """Return whether a plan fits the budget."""
        return self.samples_per_second is not None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BatchSearch:
    """Hold what was found at every batch size tried.

    Attributes:
        budget_bytes: The budget.
        tried: All sizes tried, ascending.
        plans: By size, the best plan; without segments where the step fits as it is.
        verification: What `verify` found at the chosen size; None unless asked for.
    """

    budget_bytes: int
    tried: tuple[BatchSize, ...]
    plans: Mapping[int, Plan]
    verification: Verification | None = None

    @property
    def best(self) -> BatchSize:
        """Return the size with the most samples per second; of equal ones the smallest."""
        return max((entry for entry in self.tried if entry.fits), key=_rate)

    @property
    def size(self) -> int:
        """Return the chosen batch size."""
        return self.best.size

    @property
    def no_worse(self) -> list[int]:
        """Return the other sizes whose ranges reach the chosen one's: which of them is the best is within the noise."""
        low = (self.best.samples_per_second_range or (_rate(self.best),))[0]
        others = (entry for entry in self.tried if entry.fits and entry.size != self.size)
        return [e.size for e in others if (e.samples_per_second_range or (_rate(e),))[-1] >= low]

    @property
    def plan(self) -> Plan:
        """Return the plan for the chosen size."""
        return self.plans[self.size]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per size tried, columns as the attributes of `BatchSize`."""
        names = BatchSize.__dataclass_fields__
        return pd.DataFrame([{name: getattr(entry, name) for name in names} for entry in self.tried])

    def plot(self, *, title: str = "") -> Figure:
        """Draw throughput and peaks by batch size; see `throughput_by_batch`."""
        from .pictures.throughput import throughput_by_batch

        return throughput_by_batch(self, title=title)

    def __repr__(self) -> str:
        best = f"batches of {self.size} train most, {rate_words(_rate(self.best))} samples/s predicted"
        return f"<BatchSearch under {format_bytes(self.budget_bytes)}: {best}; {len(self.tried)} sizes tried>"

    def _repr_html_(self) -> str:
        rows = [_cells(entry, entry.size == self.size) for entry in self.tried]
        return html_table(f"Batch sizes under {format_bytes(self.budget_bytes)}", _HEADER, rows, text=0)

    def table(self) -> str:
        """Return the sizes as text for people; the chosen one is marked, and times that are no measurements."""
        rows = [_HEADER]
        rows += [_cells(entry, entry.size == self.size) for entry in self.tried]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if self.no_worse:
            sizes = ", ".join(map(str, self.no_worse))
            lines.append(f"batches of {sizes} may train as many: their ranges reach that of {self.size}")
        if self.best.step_time_from.startswith("estimated"):
            lines.append(f"step times {self.best.step_time_from}")
        return "\n".join(line.rstrip() for line in lines)


_HEADER: tuple[str, ...] = ("batch", "samples/s", "peak", "added", "segments", "unplanned peak", "")


def _rate(entry: BatchSize) -> float:
    return entry.samples_per_second or 0.0


def _rate_range(entry: BatchSize) -> str:
    around = entry.samples_per_second_range
    spread = "" if around is None or around[0] == around[1] else f" ({' to '.join(map(rate_words, around))})"
    return f"{rate_words(_rate(entry))}{spread}"


def _cells(entry: BatchSize, chosen: bool) -> tuple[str, ...]:
    unplanned = "-" if entry.unplanned_peak_bytes is None else format_bytes(entry.unplanned_peak_bytes)
    if not entry.fits:
        least = "-" if entry.least_peak_bytes is None else f"≥ {format_bytes(entry.least_peak_bytes)}"
        return (str(entry.size), "-", least, "-", "-", unplanned, "does not fit")
    peak = format_bytes(entry.predicted_peak_bytes or 0)
    added = f"{entry.predicted_overhead or 0:.1%}"
    mark = "<- chosen" if chosen else ""
    return (str(entry.size), _rate_range(entry), peak, added, str(entry.segments), unplanned, mark)


def largest_batch(
    make_batch: Callable[[int], object],
    budget: int | str,
    *,
    model: nn.Module,
    sizes: Sequence[int] | None = None,
    solver: str = "auto",
    measure: bool = False,
    time_limit_s: float | None = 10.0,
    progress: Callable[[str], None] | None = None,
    **step: Unpack[StepKeywords],
) -> BatchSearch:
    """Find the batch size that trains most samples per second under a budget.

    Every size is profiled and planned by itself. Throughput is predicted as the size by the planned step's time. Larger
    batches use a device better and need more recomputation; the best size is where the two meet, and may be smaller
    than the largest that fits. Larger sizes than one that does not fit are not tried.

    Args:
        make_batch: Takes a size to a batch, on the model's device.
        budget: Bytes at the peak of the whole step, an int or text such as "8GiB".
        model: The model.
        sizes: Sizes to try, ascending; None doubles from 1 until one does not fit, then looks between the neighbours
            of the best.
        solver: As for `plan`.
        measure: Run the chosen size through `verify`.
        time_limit_s: Seconds for each solve.
        progress: Called with a few words before each phase.
        step: As for `plan`; see `StepOptions`. With `repeats=0` times are estimates, and sizes cannot well be told
            apart.

    Raises:
        InfeasibleBudgetError: Not even the smallest size fits.
        BudgetError: The budget, the solver or the sizes cannot be read.
    """
    check_keywords(step, own_parameters(largest_batch))
    check_solver(solver, alike=step.get("alike", False))
    if isinstance(budget, str) and "%" in budget:
        raise BudgetError(f"budget {budget!r}: a share has no meaning over several batch sizes; pass bytes or '8GiB'")
    if sizes is not None and (not sizes or any(size < 1 for size in sizes)):
        raise BudgetError(f"sizes must be batch sizes of at least 1, got {list(sizes)}")
    limit = parse_budget(budget, 1)
    options = StepOptions.of(step)
    search = _Search(model, make_batch, limit, solver, time_limit_s, step, progress or silent)
    if sizes is not None:
        search.try_in_turn(sorted(set(sizes)))
    else:
        search.double_then_refine()
    found = search.result()
    if not measure:
        return found
    checked = verify(model, make_batch(found.size), found.plan, loss=options.loss, progress=progress)
    return BatchSearch(budget_bytes=limit, tried=found.tried, plans=found.plans, verification=checked)


class _Search:
    """Try sizes and remember them."""

    def __init__(
        self,
        model: nn.Module,
        make_batch: Callable[[int], object],
        budget_bytes: int,
        solver: str,
        time_limit_s: float | None,
        step: StepKeywords,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.make_batch, self.budget_bytes = model, make_batch, budget_bytes
        self.solver, self.time_limit_s, self.step, self.say = solver, time_limit_s, step, say
        self.tried: dict[int, BatchSize] = {}
        self.plans: dict[int, Plan] = {}
        self.refusal: InfeasibleBudgetError | None = None

    def try_in_turn(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            if not self.try_size(size).fits:
                return

    def double_then_refine(self) -> None:
        size = 1
        while size <= LARGEST and self.try_size(size).fits:
            size *= 2
        while any(entry.fits for entry in self.tried.values()):
            best = max((entry for entry in self.tried.values() if entry.fits), key=_rate).size
            below = max((size for size in self.tried if size < best), default=best)
            above = min((size for size in self.tried if size > best), default=best)
            apart = max(1, best // CLOSE)
            between = [(a + b) // 2 for a, b in ((best, above), (below, best)) if b - a > apart]
            if not between:
                return
            for size in between:
                self.try_size(size)

    def try_size(self, size: int) -> BatchSize:
        self.say(f"batch size {size}")
        try:
            entry = self._plan(size)
        except torch.OutOfMemoryError:
            entry = BatchSize(size=size, note="the device's memory ran out while profiling")
        self.tried[size] = entry
        return entry

    def _plan(self, size: int) -> BatchSize:
        planner = Planner.of(self.model, self.make_batch(size), **self.step)
        profile, unplanned_bytes = planner.profile, planner.search.dry_runs.unplanned_peak_bytes()
        known: dict[str, Any] = {
            "size": size,
            "unplanned_peak_bytes": unplanned_bytes,
            "step_ns": profile.step_ns,
            "step_time_from": str(profile.step_time_from),
        }
        solver = "none" if unplanned_bytes <= self.budget_bytes else self.solver
        try:
            plan = planner.plan(self.budget_bytes, solver=solver, time_limit_s=self.time_limit_s)
        except InfeasibleBudgetError as error:
            self.refusal = error
            return BatchSize(**known, least_peak_bytes=error.least_peak_bytes, note=str(error))
        self.plans[size] = plan
        overhead = plan.predicted_overhead or 0.0
        median, slowest, fastest = (
            size / ((max(1, step_ns) * (1 + overhead) + (profile.optimizer_ns or 0)) * 1e-9)
            for step_ns in (profile.step_ns, profile.step.high_ns, profile.step.low_ns)
        )
        return BatchSize(
            **known,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            predicted_overhead=overhead,
            samples_per_second=median,
            samples_per_second_range=(slowest, fastest),
            segments=len(plan.segments),
        )

    def result(self) -> BatchSearch:
        if not self.plans:
            if self.refusal is not None:
                raise self.refusal
            raise BudgetError("the device's memory ran out while profiling the smallest batch size: free some first")
        tried = tuple(self.tried[size] for size in sorted(self.tried))
        return BatchSearch(budget_bytes=self.budget_bytes, tried=tried, plans=self.plans)
