"""The command line: `remat profile | plan | compare | verify | report | demo`."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from ..budget import check_share, parse_budget
from ..compare import Comparison, compare
from ..errors import PlanError
from ..finding.planning import Planner, check_solver
from ..pictures.frontier import peak_against_overhead
from ..plan import Plan
from ..verify import verify
from . import console as show
from . import options as opt
from .demo import run_demo
from .factory import Subject, load_subject, modules_named
from .report import write_report

app = typer.Typer(
    help="Find where to checkpoint a PyTorch model so that the training step fits a memory budget and the added time "
    "is least.\n\nStart with: remat plan --model train.py:build --budget 60% --out plan.json",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Rich takes 80 columns where there is no terminal; a file has room for whole tables.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
_out = Console(highlight=False, soft_wrap=True, width=_WIDTH)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        _out.print(f"remat {version_of('remat')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Find where to checkpoint a PyTorch model so that the training step fits a memory budget."""


def main() -> None:
    """Run the command line: what a user can mend is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (ValueError, torch.OutOfMemoryError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'file'}: {error.strerror or error}")
    except Exception as error:
        # Usage errors; typer carries its own copy of click, so their class has no public name.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        words = format_message()
        if not words:  # Without a command, the help was printed.
            sys.exit(2)
        _fail(words)
    sys.exit(code or 0)


def _fail(words: str) -> NoReturn:
    one_line = " ".join(words.split())
    print(f"remat: {one_line}", file=sys.stderr)
    sys.exit(2)


@app.command("profile")
def profile_command(
    model: opt.Model,
    optimizer: opt.Optimizer = None,
    accumulation: opt.Accumulation = False,
    drops_output: opt.DropsOutput = False,
    units: opt.Units = [],  # noqa: B006
    ranks: opt.Ranks = 1,
    device: opt.OnDevice = None,
    repeats: opt.Repeats = 3,
    out: opt.ProfileOut = None,
) -> None:
    """Show where the memory of a training step is."""
    _check_folder(out)
    subject = _load(model, device)
    with show.progress(_err) as say:
        planner = _planner(subject, optimizer, accumulation, drops_output, units, ranks, repeats=repeats, say=say)
    show.print_profile(_out, planner.profile)
    if out is not None:
        planner.profile.save(out)
        _out.print(f"wrote {out}", markup=False)


@app.command("plan")
def plan_command(
    model: opt.Model,
    budget: opt.Budget,
    solver: opt.Solver = "auto",
    out: opt.PlanOut = None,
    optimizer: opt.Optimizer = None,
    accumulation: opt.Accumulation = False,
    drops_output: opt.DropsOutput = False,
    units: opt.Units = [],  # noqa: B006
    ranks: opt.Ranks = 1,
    headroom: opt.Headroom = 0.0,
    device: opt.OnDevice = None,
    no_save_sets: opt.NoSaveSets = False,
    no_cross_operators: opt.NoCrossOperators = False,
    time_limit: opt.TimeLimit = None,
) -> None:
    """Find where to checkpoint so that the step fits a budget, and write the plan."""
    _check_folder(out)
    check_solver(solver)
    check_share("headroom", headroom)
    parse_budget(budget, 1 << 40)
    subject = _load(model, device)
    with show.progress(_err) as say:
        planner = _planner(
            subject,
            optimizer,
            accumulation,
            drops_output,
            units,
            ranks,
            save_sets=not no_save_sets,
            cross=not no_cross_operators,
            say=say,
        )
        plan = planner.plan(budget, solver=solver, headroom=headroom, time_limit_s=time_limit, progress=say)
    show.print_profile(_out, planner.profile)
    show.print_plan(_out, plan)
    if out is not None:
        plan.save(out)
        _out.print(f"wrote {out}; apply it with remat.planner.apply(model, Plan.load({str(out)!r}))", markup=False)
    else:
        _out.print("The plan was not written: pass --out plan.json to keep it.")


@app.command("compare")
def compare_command(
    model: opt.Model,
    budget: opt.Budgets = ["80%", "60%", "40%"],  # noqa: B006
    solver: opt.Solvers = ["sqrt", "dp", "ilp"],  # noqa: B006
    out: opt.CsvOut = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="PATH", help="Draw peak against added time. Example: front.png")
    ] = None,
    optimizer: opt.Optimizer = None,
    accumulation: opt.Accumulation = False,
    drops_output: opt.DropsOutput = False,
    units: opt.Units = [],  # noqa: B006
    ranks: opt.Ranks = 1,
    device: opt.OnDevice = None,
    measure: opt.Measure = False,
    time_limit: opt.TimeLimit = 20.0,
) -> None:
    """Plan several budgets with several solvers from one profile, and show them side by side."""
    _check_folder(out)
    _check_folder(picture)
    subject = _load(model, device)
    comparison = _compare(
        subject, budget, solver, optimizer, accumulation, drops_output, units, ranks, measure, time_limit
    )
    show.print_comparison(_out, comparison)
    if out is not None:
        comparison.frame.to_csv(out, index=False)
        _out.print(f"wrote {out}", markup=False)
    if picture is not None:
        peak_against_overhead(comparison).savefig(picture, dpi=150)
        _out.print(f"wrote {picture}", markup=False)


@app.command("verify")
def verify_command(
    model: opt.Model,
    plan: Annotated[Path, typer.Option("--plan", metavar="PATH", help="What `remat plan` wrote. Example: plan.json")],
    device: opt.OnDevice = None,
    repeats: opt.Repeats = 3,
    steps: Annotated[int, typer.Option("--steps", metavar="COUNT", min=1, help="Steps after which to compare.")] = 1,
) -> None:
    """Run the model with and without a plan and compare; exit code 1 if results differ or it is over budget."""
    loaded = Plan.load(plan)
    subject = _load(model, device)
    with show.progress(_err) as say:
        found = verify(
            subject.model, subject.batch, loaded, loss=subject.loss, steps=steps, repeats=repeats, progress=say
        )
    _out.print(str(found), markup=False)
    if not (found.exact and found.within_budget):
        raise typer.Exit(1)


@app.command("report")
def report_command(
    model: opt.Model,
    out: opt.ReportOut = Path("report.html"),
    budget: opt.Budgets = ["80%", "60%", "40%"],  # noqa: B006
    solver: opt.Solvers = ["sqrt", "dp", "ilp"],  # noqa: B006
    show_budget: Annotated[
        str | None,
        typer.Option(
            "--plan-for", metavar="BYTES", help="The budget whose best plan is shown; default: the middle one."
        ),
    ] = None,
    optimizer: opt.Optimizer = None,
    accumulation: opt.Accumulation = False,
    drops_output: opt.DropsOutput = False,
    units: opt.Units = [],  # noqa: B006
    ranks: opt.Ranks = 1,
    device: opt.OnDevice = None,
    measure: opt.Measure = False,
    time_limit: opt.TimeLimit = 20.0,
) -> None:
    """Write one HTML file, with everything in it, for a pull request or a colleague."""
    _check_folder(out)
    subject = _load(model, device)
    comparison = _compare(
        subject, budget, solver, optimizer, accumulation, drops_output, units, ranks, False, time_limit
    )
    with show.progress(_err) as say:
        command = shlex.join(["remat", *sys.argv[1:]])
        write_report(
            out, comparison, budget=show_budget, subject=subject if measure else None, command=command, progress=say
        )
    _out.print(f"wrote {out}", markup=False)


@app.command("demo")
def demo_command(
    out: opt.FolderOut = Path("out"),
    device: opt.OnDevice = None,
    small: Annotated[bool, typer.Option("--small", help="Take a toy model, to see it work in seconds.")] = False,
) -> None:
    """Profile, compare, apply and verify on a small GPT-2."""
    with show.progress(_err) as say:
        run_demo(_out, out, device=device, small=small, progress=say)


def _load(model: str, device: opt.Device | None) -> Subject:
    return load_subject(model, None if device is None else device.value)


def _planner(
    subject: Subject,
    optimizer: str | None,
    accumulation: bool,
    drops_output: bool,
    units: list[str],
    ranks: int,
    *,
    save_sets: bool = True,
    cross: bool = True,
    repeats: int = 3,
    say: show.Say,
) -> Planner:
    return Planner.of(
        subject.model,
        subject.batch,
        loss=subject.loss,
        optimizer=optimizer,
        accumulation=accumulation,
        holds_output=not drops_output,
        save_sets=save_sets,
        cross_operators=cross,
        units=modules_named(subject.model, units),
        ranks=ranks,
        repeats=repeats,
        progress=say,
    )


def _compare(
    subject: Subject,
    budgets: list[str],
    solvers: list[str],
    optimizer: str | None,
    accumulation: bool,
    drops_output: bool,
    units: list[str],
    ranks: int,
    measure: bool,
    time_limit: float | None,
) -> Comparison:
    with show.progress(_err) as say:
        return compare(
            subject.model,
            subject.batch,
            budgets=budgets,
            solvers=solvers,
            loss=subject.loss,
            optimizer=optimizer,
            accumulation=accumulation,
            holds_output=not drops_output,
            units=modules_named(subject.model, units),
            ranks=ranks,
            measure=measure,
            time_limit_s=time_limit,
            progress=say,
        )


def _check_folder(path: Path | None) -> None:
    """Refuse, before any work, a file that cannot be written in the end."""
    if path is not None and not path.parent.is_dir():
        raise PlanError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path is not None and path.is_dir():
        raise PlanError(f"--out {path}: that is a folder; pass the name of a file")
