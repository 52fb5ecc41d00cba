"""`report`: everything about a comparison and one of its plans, in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from platform import platform, python_version
from typing import Any

from jinja2 import Environment
from matplotlib.figure import Figure

from ..budget import format_bytes, parse_budget
from ..compare import Comparison, table_cells, table_header
from ..errors import InfeasibleBudgetError
from ..pictures.frontier import peak_against_overhead
from ..pictures.memory import memory_over_time, module_memory
from ..pictures.strip import plan_strip
from ..pictures.timeline import memory_parts
from ..plan import Plan
from ..verify import Verification, verify
from .factory import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """An image to inline: what it shows, for readers who do not see it, and its bytes as a data address."""

    alt: str
    source: str


def report_html(
    comparison: Comparison,
    *,
    budget: int | str | None = None,
    subject: Subject | None = None,
    progress: Callable[[str], None] | None = None,
) -> str:
    """Return the report as one HTML page: pictures and styles inline, nothing fetched.

    Args:
        comparison: What `compare` returned.
        budget: The budget whose best plan is shown; None takes the middle one of the comparison.
        subject: Model, batch and loss to verify the plan on; None leaves measuring out, and the report says so.
        progress: Called with a few words before each phase.

    Raises:
        BudgetError: The budget cannot be read.
    """
    say: Callable[[str], None] = progress or (lambda _: None)
    plan, refusal, asked = _chosen(comparison, budget)
    verification: Verification | None = None
    if subject is not None:
        say("verifying the plan")
        verification = verify(subject.model, subject.batch, plan, loss=subject.loss, progress=progress)
    say("recording the step with and without the plan")
    planner = comparison.planner
    unplanned, planned = planner.timeline(), planner.timeline(plan)
    say("drawing")
    pictures = {
        "modules": _picture(module_memory(planner.profile), "Bars of memory by module"),
        "frontier": _picture(peak_against_overhead(comparison), "Peak memory against added time, by solver"),
        "memory": _picture(
            memory_over_time(unplanned, planned, budget_bytes=asked), "Memory over the step, without and with the plan"
        ),
        "strip": _picture(plan_strip(planner.profile, plan), "What the plan does to each stage"),
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
        rows=[table_cells(row) for row in comparison.frame.to_dict("records")],
        reasons=_reasons(comparison),
        parts=memory_parts(planner.profile),
        unplanned=unplanned,
        planned=planned,
        pictures=pictures,
        verification=verification,
        versions=_versions(plan),
        format_bytes=format_bytes,
    )


def write_report(
    path: str | os.PathLike[str],
    comparison: Comparison,
    *,
    budget: int | str | None = None,
    subject: Subject | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write the report to a file, whole or not at all; see `report_html`.

    Args:
        path: The HTML file; an existing one is replaced.
        comparison: As for `report_html`.
        budget: As for `report_html`.
        subject: As for `report_html`.
        progress: As for `report_html`.

    Raises:
        BudgetError: The budget cannot be read.
        OSError: The file cannot be written.
    """
    target = Path(path)
    page = report_html(comparison, budget=budget, subject=subject, progress=progress)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _chosen(comparison: Comparison, budget: int | str | None) -> tuple[Plan, str, int]:
    """Return the plan to show, why it misses its budget (empty if it fits), and the budget in bytes."""
    budgets = sorted(comparison.budgets_bytes)
    asked = budgets[len(budgets) // 2] if budget is None else budget
    limit = parse_budget(asked, comparison.unplanned_peak_bytes)
    try:
        return comparison.best(limit), "", limit
    except InfeasibleBudgetError as error:
        return error.plan, str(error), limit


def _picture(figure: Figure, alt: str) -> _Picture:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return _Picture(alt=alt, source="data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())


def _reasons(comparison: Comparison) -> list[str]:
    infeasible = comparison.frame.query("status == 'infeasible'").sort_values(by="least_peak_bytes")
    return [str(note) for note in infeasible.drop_duplicates("budget_bytes")["note"]]


def _versions(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = dict(plan.versions)
    for package in ("numpy", "pulp", "highspy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"Python": python_version(), "platform": platform()}
