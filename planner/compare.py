"""`compare`: every solver at every budget from one profile, as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import pandas as pd
from torch import nn

from ..profiler.step import Loss
from .applier.apply import unplanned
from .budget import BudgetError, format_bytes, parse_budget
from .errors import InfeasibleBudgetError
from .finding.effort import check_solver
from .finding.planner import Planner
from .options import StepKeywords, check_keywords, own_parameters
from .phases import Phase, as_a_part
from .pictures.tables import html_table
from .plan import Plan
from .plan_words import percent_range
from .verify import verify

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BYTES = ("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "least_peak_bytes", "segments")
_SHARES = (
    "predicted_overhead",
    "predicted_overhead_low",
    "predicted_overhead_high",
    "measured_overhead",
    "measured_overhead_low",
    "measured_overhead_high",
    "lower_bound_overhead",
    "gap",
    "solve_seconds",
)
COLUMNS = (
    "solver",
    "budget_bytes",
    "predicted_peak_bytes",
    "predicted_overhead",
    "predicted_overhead_low",
    "predicted_overhead_high",
    "measured_peak_bytes",
    "measured_overhead",
    "measured_overhead_low",
    "measured_overhead_high",
    "segments",
    "lower_bound_overhead",
    "gap",
    "solve_seconds",
    "status",
    "note",
    "least_peak_bytes",
)
"""Columns of `Comparison.frame`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Hold what every solver found at every budget.

    Attributes:
        frame: One row per solver and budget, columns `COLUMNS`. Bytes are peaks of the whole step; overheads are shares
            of the unplanned step's time, low and high what they range over in the repeats of the profile or of the
            measurement; `solve_seconds` counts solving and the dry runs. Where no plan fits, `status` is "infeasible",
            `note` says why and `least_peak_bytes` is the smallest peak the solver reaches.
        plans: The plans, by solver and budget in bytes; a solver without a plan under a budget has no entry there.
        least: By solver, the plan with the smallest peak of all that were seen, infeasible budgets included.
        planner: The profile all of it was planned from.
    """

    frame: pd.DataFrame
    plans: Mapping[tuple[str, int], Plan]
    least: Mapping[str, Plan]
    planner: Planner

    @property
    def unplanned_peak_bytes(self) -> int:
        """Return the peak of the step without a plan."""
        return self.planner.search.dry_runs.unplanned_peak_bytes()

    @property
    def solvers(self) -> tuple[str, ...]:
        """Return the solvers compared, in the order asked for."""
        return tuple(dict.fromkeys(self.frame["solver"]))

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """Return the budgets compared, in the order asked for."""
        return tuple(int(budget) for budget in dict.fromkeys(self.frame["budget_bytes"]))

    def feasible(self) -> pd.DataFrame:
        """Return the rows that have a plan."""
        return self.frame.query("status != 'infeasible'")

    def frontier(self, solver: str) -> pd.DataFrame:
        """Return the rows of a solver that none of its others beats in peak and overhead, by ascending peak.

        Raises:
            BudgetError: The solver was not compared.
        """
        if solver not in self.solvers:
            raise BudgetError(f"solver {solver!r} was not compared: choose one of {', '.join(self.solvers)}")
        rows = self.feasible().query("solver == @solver")
        rows = rows.sort_values(by=["predicted_peak_bytes", "predicted_overhead"])
        rows = rows.assign(earlier=rows["predicted_overhead"].cummin().shift(fill_value=float("inf")))
        return rows.query("predicted_overhead < earlier").drop(columns="earlier").reset_index(drop=True)

    def lower_bounds(self) -> dict[int, float]:
        """Return, by ascending budget in bytes, the added time that a solver proved its plans to need, as a share.

        Each solver's bound is about its own plans, so where another solver's plan beats it, that plan's is returned.
        Budgets for which nothing is proven are left out.
        """
        bounds: dict[int, float] = {}
        for budget in sorted(self.budgets_bytes):
            plans = [plan for (_, planned), plan in self.plans.items() if planned == budget]
            proven = max((plan.lower_bound_overhead or 0.0 for plan in plans), default=0.0)
            if proven > 0:
                bounds[budget] = min(proven, *(plan.predicted_overhead or 0.0 for plan in plans))
        return bounds

    def best(self, budget: int | str) -> Plan:
        """Return the plan of least predicted overhead that fits a budget; among equals the one of smaller peak.

        Args:
            budget: Bytes, "8GiB", or "60%" of the unplanned peak; need not be one of those compared.

        Raises:
            InfeasibleBudgetError: No plan of the comparison fits.
        """
        limit = parse_budget(budget, self.unplanned_peak_bytes)
        fitting = [plan for plan in self.plans.values() if (plan.predicted_peak_bytes or 0) <= limit]
        if fitting:

            def rank(plan: Plan) -> tuple[float, int, int]:
                # Several budgets can have the same plan: then the one made for a budget nearest this one is meant.
                missed = abs((plan.budget_bytes or 0) - limit)
                return plan.predicted_overhead or 0.0, plan.predicted_peak_bytes or 0, missed

            return min(fitting, key=rank)
        known = [*self.plans.values(), *self.least.values()]
        least = min(known, key=lambda plan: plan.predicted_peak_bytes or 0)
        reached = least.predicted_peak_bytes or 0
        raise InfeasibleBudgetError(
            f"no plan of the comparison fits {format_bytes(limit)}: the smallest peak is {format_bytes(reached)} "
            f"({least.solver}). Raise the budget to {format_bytes(reached)} ({reached} bytes), or make the batch "
            "smaller.",
            least_peak_bytes=reached,
            plan=least,
        )

    def to_frame(self) -> pd.DataFrame:
        """Return `frame`."""
        return self.frame

    def plot(self, *, title: str = "") -> Figure:
        """Draw peak against added time; see `peak_against_overhead`."""
        from .pictures.frontier import peak_against_overhead

        return peak_against_overhead(self, title=title)

    def __repr__(self) -> str:
        asked = f"{', '.join(self.solvers)} at {len(self.budgets_bytes)} budgets"
        peak = format_bytes(self.unplanned_peak_bytes)
        return f"<Comparison of {asked}: {len(self.plans)} plans, unplanned peak {peak}>"

    def _repr_html_(self) -> str:
        rows = [table_cells(row) for row in self.frame.to_dict("records")]
        title = f"Solvers by budget (unplanned peak {format_bytes(self.unplanned_peak_bytes)})"
        return html_table(title, table_header(), rows)

    def table(self) -> str:
        """Return the comparison as text for people."""
        rows = [_HEADER, *(table_cells(row) for row in self.frame.to_dict("records"))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)


_HEADER = ("solver", "budget", "peak", "added", "bound", "segments", "took", "status")


def table_cells(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return a row of `Comparison.frame` as cells for people, one for each of `table_header`."""
    seconds = f"{row['solve_seconds']:.1f} s"
    if row["status"] == "infeasible":
        least = f"≥ {format_bytes(int(row['least_peak_bytes']))}"
        return (row["solver"], format_bytes(row["budget_bytes"]), least, "-", "-", "-", seconds, "infeasible")
    peak = format_bytes(int(row["predicted_peak_bytes"]))
    added = _with_range(row, "predicted_overhead")
    if pd.notna(row["measured_peak_bytes"]):
        peak += f" (measured {format_bytes(int(row['measured_peak_bytes']))})"
    if pd.notna(row["measured_overhead"]):
        added += f", measured {_with_range(row, 'measured_overhead')}"
    bound = f"{row['lower_bound_overhead']:.1%}" if row["lower_bound_overhead"] > 0 or row["gap"] == 0 else "none"
    segments, status = str(row["segments"]), str(row["status"]).replace("_", " ")
    return (row["solver"], format_bytes(row["budget_bytes"]), peak, added, bound, segments, seconds, status)


def _with_range(row: Mapping[Any, Any], column: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return percent_range(row[column], None if pd.isna(low) else (low, high))


def table_header() -> tuple[str, ...]:
    """Return the column titles of `Comparison.table`."""
    return _HEADER


def compare(
    model: nn.Module,
    batch: object,
    *,
    budgets: Sequence[int | str] = ("80%", "60%", "40%"),
    solvers: Sequence[str] | None = None,
    measure: bool = False,
    planner: Planner | None = None,
    time_limit_s: float | None = 20.0,
    gap: float = 0.0,
    progress: Callable[[str], None] | None = None,
    **step: Unpack[StepKeywords],
) -> Comparison:
    """Plan every budget with every solver from one profile.

    The plans are dry-run, but not run for real as `plan` does with its own; `verify` the one you use, or `measure` all.

    The model is left as it was; nothing is applied.

    Args:
        model: The model, on the device it is trained on.
        batch: As for `plan`.
        budgets: Peaks of the whole step: bytes, "8GiB", or "60%" of the unplanned peak.
        solvers: Names from `SOLVERS`; None takes sqrt, dp and ilp, or with `alike` all, dp and ilp.
        measure: Run every plan through `verify` as well and fill in the measured columns; this trains for real. One
            rank's peak cannot be measured so: with several, that column stays empty.
        planner: What `Planner.of` returned for this model and batch; then nothing is profiled.
        time_limit_s: Seconds for each solve; a plan may take several.
        gap: As for `plan`.
        progress: Called with a few words before each phase.
        step: As for `plan`; see `StepOptions`. With several ranks all bytes are one rank's.

    Raises:
        BudgetError: A budget or a solver's name cannot be read, or there is none.
        BatchError: The batch cannot be used.
    """
    check_keywords(step, own_parameters(compare))
    alike = planner.options.alike if planner is not None else step.get("alike", False)
    if solvers is None:
        solvers = ("all" if alike else "sqrt", "dp", "ilp")
    for name, given in (("budgets", budgets), ("solvers", solvers)):
        if isinstance(given, (str, int)):
            raise BudgetError(f"{name} takes a list, got {given!r}: pass {name}=[{given!r}]")
    if not budgets or not solvers:
        raise BudgetError("nothing to compare: pass at least one budget and one solver")
    for solver in solvers:
        check_solver(solver, alike=alike)
    for budget in budgets:
        parse_budget(budget, 1 << 40)
    if planner is None:
        planner = Planner.of(model, batch, progress=progress, **step)
    else:
        planner.check_given(model, batch, step)
    run = _Run(planner, {"time_limit_s": time_limit_s, "gap": gap, "progress": progress})
    asked = [(solver, budget) for budget in budgets for solver in solvers]
    with unplanned(model), planner.session.step.guard.undisturbed():
        for done, (solver, budget) in enumerate(asked):
            if progress is not None:
                progress(Phase(f"{solver} at {budget}", done, len(asked)))
            run.plan(solver, budget)
    if measure:
        run.measure(model, batch, planner.options.loss)
    return run.comparison()


def _low_and_high(column: str, around: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = around if around is not None else (None, None)
    return {f"{column}_low": low, f"{column}_high": high}


class _Run:
    """Collect rows and plans."""

    def __init__(self, planner: Planner, options: dict[str, Any]) -> None:
        self.planner, self.options = planner, options
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        self.plans: dict[tuple[str, int], Plan] = {}
        self.least: dict[str, Plan] = {}

    def plan(self, solver: str, budget: int | str) -> None:
        started, budget_bytes = time.perf_counter(), self.planner.budget_bytes(budget)
        row: dict[str, Any] = {"solver": solver, "budget_bytes": budget_bytes}
        try:
            plan = self.planner.plan(budget, solver=solver, check=False, **self.options)
        except InfeasibleBudgetError as error:
            plan = error.plan
            row |= {"status": "infeasible", "note": str(error), "least_peak_bytes": error.least_peak_bytes}
        else:
            self.plans[solver, budget_bytes] = plan
            row |= {
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "predicted_overhead": plan.predicted_overhead,
                **_low_and_high("predicted_overhead", plan.predicted_overhead_range),
                "segments": len(plan.segments),
                "lower_bound_overhead": plan.lower_bound_overhead,
                "gap": plan.gap,
                "status": plan.status,
                "note": "; ".join(plan.notes),
            }
        row["solve_seconds"] = time.perf_counter() - started
        self.rows[solver, budget_bytes] = row
        known = self.least.get(solver)
        if known is None or (plan.predicted_peak_bytes or 0) < (known.predicted_peak_bytes or 0):
            self.least[solver] = plan

    def measure(self, model: nn.Module, batch: object, loss: Loss | None) -> None:
        progress = self.options["progress"]
        for done, ((solver, budget_bytes), plan) in enumerate(self.plans.items()):
            if progress is not None:
                progress(Phase(f"measuring {solver} at {format_bytes(budget_bytes)}", done, len(self.plans)))
            found = verify(model, batch, plan, loss=loss, repeats=2, progress=as_a_part(progress))
            self.rows[solver, budget_bytes] |= {
                "measured_peak_bytes": found.measured_peak_bytes if found.ranks == 1 else None,
                "measured_overhead": found.measured_overhead,
                **_low_and_high("measured_overhead", found.measured_overhead_range),
            }

    def comparison(self) -> Comparison:
        frame = pd.DataFrame(list(self.rows.values()), columns=list(COLUMNS))
        frame = frame.astype(dict.fromkeys(_BYTES, "Int64") | dict.fromkeys(_SHARES, "float64"))
        return Comparison(frame=frame, plans=self.plans, least=self.least, planner=self.planner)
