"""`report`: everything about a comparison and one of its plans, in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment
from markupsafe import Markup
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs
from remat.whole_file import write_whole

from ...profiler.session import silent
from ..budget import format_bytes, parse_budget
from ..compare import Comparison, table_cells, table_header
from ..errors import InfeasibleBudgetError
from ..pictures.interactive import memory_over_time, module_memory, peak_against_overhead, plan_strip
from ..plan import Plan
from ..plan_words import percent_range
from ..verify import Verification, verify
from .factory import Subject
from .machine import machine_words, versions

SECTIONS = {
    "memory": "Where the memory is",
    "peak": "What the peak is",
    "solvers": "Solvers compared",
    "plan": "The plan",
    "verification": "Verification",
    "numbers": "How the numbers were obtained",
}
"""What a report holds: the name that a link ends with, and the heading."""
_SORTED_BY = (
    "solver",
    "budget_bytes",
    "predicted_peak_bytes",
    "predicted_overhead",
    "lower_bound_overhead",
    "segments",
    "solve_seconds",
    "status",
)
"""What the columns of the table of solvers are sorted by."""


def report_html(
    comparison: Comparison,
    *,
    budget: int | str | None = None,
    subject: Subject | None = None,
    command: str = "",
    progress: Callable[[str], None] | None = None,
) -> str:
    """Return the report as one HTML page: pictures, styles and what draws them inline, nothing fetched.

    Args:
        comparison: What `compare` returned.
        budget: The budget whose best plan is shown; None takes the middle one of the comparison.
        subject: Model, batch and loss to verify the plan on; None leaves measuring out, and the report says so.
        command: How it was asked for, for whoever wants to do it again.
        progress: Called with a few words before each phase.

    Raises:
        BudgetError: The budget cannot be read.
    """
    say: Callable[[str], None] = progress or silent
    plan, refusal, asked = _chosen(comparison, budget)
    verification: Verification | None = None
    if subject is not None:
        say("verifying the plan")
        verification = verify(subject.model, subject.batch, plan, loss=subject.loss, progress=progress)
    say("recording the step with and without the plan")
    planner = comparison.planner
    unplanned, planned = planner.timeline(), planner.timeline(plan)
    say("drawing")
    figures = {
        "modules": module_memory(planner.profile),
        "frontier": peak_against_overhead(comparison),
        "memory": memory_over_time([("without checkpoints", unplanned), ("with the plan", planned)], asked),
        "strip": plan_strip(planner.profile, plan),
    }
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    )
    return template.render(
        profile=planner.profile,
        plan=plan,
        refusal=refusal,
        asked=format_bytes(asked),
        comparison=comparison,
        header=table_header(),
        rows=_rows(comparison),
        reasons=_reasons(comparison),
        parts=unplanned.parts(),
        unplanned=unplanned,
        planned=planned,
        figures={name: _as_data(figure) for name, figure in figures.items()},
        plotly=Markup(get_plotlyjs()),
        sections=SECTIONS.items(),
        titles=SECTIONS,
        plan_data=base64.b64encode(plan.to_json().encode()).decode(),
        verification=verification,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
        machine=machine_words(),
        versions=versions(),
        format_bytes=format_bytes,
        percent_range=percent_range,
    )


def write_report(
    path: str | os.PathLike[str],
    comparison: Comparison,
    *,
    budget: int | str | None = None,
    subject: Subject | None = None,
    command: str = "",
    progress: Callable[[str], None] | None = None,
) -> str:
    """Write the report to a file, whole or not at all; see `report_html`.

    Returns:
        Why the plan that is shown misses its budget; "" where it fits.

    Args:
        path: The HTML file; an existing one is replaced.
        comparison: As for `report_html`.
        budget: As for `report_html`.
        subject: As for `report_html`.
        command: As for `report_html`.
        progress: As for `report_html`.

    Raises:
        BudgetError: The budget cannot be read.
        OSError: The file cannot be written.
    """
    page = report_html(comparison, budget=budget, subject=subject, command=command, progress=progress)
    write_whole(Path(path), page)
    return _chosen(comparison, budget)[1]


def _chosen(comparison: Comparison, budget: int | str | None) -> tuple[Plan, str, int]:
    """Return the plan to show, why it misses its budget (empty if it fits), and the budget in bytes."""
    budgets = sorted(comparison.budgets_bytes)
    asked = budgets[len(budgets) // 2] if budget is None else budget
    limit = parse_budget(asked, comparison.unplanned_peak_bytes)
    try:
        return comparison.best(limit), "", limit
    except InfeasibleBudgetError as error:
        return error.plan, str(error), limit


def _as_data(figure: Figure) -> Markup:
    """Return a figure as JSON that can stand in a script element."""
    figure.update_layout(template="none")
    return Markup((figure.to_json() or "").replace("</", "<\\/"))


def _rows(comparison: Comparison) -> list[list[tuple[str, Any]]]:
    """Return the rows of the table of solvers: each cell for people, with what it is sorted by."""
    records = comparison.frame.to_dict("records")
    for record in records:
        if record["status"] == "infeasible":
            record["predicted_peak_bytes"] = record["least_peak_bytes"]
    values = [[record[name] for name in _SORTED_BY] for record in records]
    known = [["" if pd.isna(value) else value for value in row] for row in values]
    cells = [table_cells(row) for row in comparison.frame.to_dict("records")]
    return [list(zip(row, row_values, strict=True)) for row, row_values in zip(cells, known, strict=True)]


def _reasons(comparison: Comparison) -> list[str]:
    infeasible = comparison.frame.query("status == 'infeasible'").sort_values(by="least_peak_bytes")
    return [str(note) for note in infeasible.drop_duplicates("budget_bytes")["note"]]
