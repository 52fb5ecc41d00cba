"""The commands: each loads what it is about, asks the library, and says what came of it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..amounts import format_bytes
from . import options as opt
from .failures import Code, code_of, raised_in_subject
from .terminal import Terminal

if TYPE_CHECKING:
    from remat.planner import Comparison, Plan
    from remat.planner.show.factory import Subject

_BUDGETS = ["80%", "60%", "40%"]
_SOLVERS = ["sqrt", "dp", "ilp"]
_FIGURES = ("predicted_", "unplanned_", "circumstances.")
"""Fields that pricing works out anew; that nothing was searched is no news."""
_TWO_MEASUREMENTS = (
    "The two added times are two measurements, each by a profile of its own: a part of their difference may be the "
    "machine's."
)


def profile(target: opt.Target, step: opt.Step, output: opt.Output, out: opt.ProfileOut = None) -> int:
    """Show where the memory of a training step is."""
    terminal, subject = Terminal(output), _load(target, step)
    from remat.planner import Planner
    from remat.planner.show import as_data, console

    with terminal.progress() as say, _running(target, subject):
        planner = Planner.of(subject.model, subject.batch, loss=subject.loss, progress=say, **_step(step, subject))
    console.print_profile(terminal.tables, planner.profile, rows=terminal.rows)
    terminal.result(lambda: as_data.of_profile(planner.profile, terminal.rows))
    if out is not None:
        planner.profile.save(out)
        terminal.wrote(out)
    return Code.DONE


def plan(
    target: opt.Target,
    budget: opt.Budget,
    step: opt.Step,
    output: opt.Output,
    solver: opt.Solver = "auto",
    out: opt.PlanOut = None,
    headroom: opt.Headroom = 0.0,
    time_limit: opt.TimeLimit = None,
    race: opt.Race = 0,
    batches: opt.Batches = None,
) -> int:
    """Find where to checkpoint so that the step fits a budget, and write the plan."""
    terminal, subject = Terminal(output), _load(target, step)
    from remat.planner import Planner
    from remat.planner.finding.planning import plan as find
    from remat.planner.finding.writing import EVAL_MODE
    from remat.planner.show import as_data, console

    with terminal.progress() as say, _running(target, subject):
        asked: dict[str, Any] = {"solver": solver, "headroom": headroom, "time_limit_s": time_limit, "progress": say}
        known: dict[str, Any] = {"loss": subject.loss, **_step(step, subject)}
        if batches is not None:
            found = find(subject.model, None, budget, batches=target.batches(batches), race=race, **asked, **known)
        else:
            planner = Planner.of(subject.model, subject.batch, progress=say, **known)
            found = planner.plan(budget, race=race, **asked)
            console.print_parts(terminal.tables, planner.profile)
    console.print_plan(terminal.tables, found)
    if not found.training:
        terminal.warn(EVAL_MODE)
    terminal.result(lambda: as_data.of_plan(found))
    _keep(terminal, found, out)
    return Code.DONE


def verify(
    target: opt.Target,
    plan: opt.PlanFile,
    output: opt.Output,
    repeats: opt.Repeats = 3,
    steps: opt.Steps = 1,
) -> int:
    """Run the model with and without a plan and compare; exit code 1 if results differ or it is over budget."""
    from remat.planner import Plan
    from remat.planner import verify as verify_plan
    from remat.planner.show import as_data

    loaded = Plan.load(plan)
    terminal, subject = Terminal(output), _load(target)
    with terminal.progress() as say, _running(target, subject, loaded.circumstances.autocast):
        found = verify_plan(
            subject.model, subject.batch, loaded, loss=subject.loss, steps=steps, repeats=repeats, progress=say
        )
    terminal.tables.print(str(found), markup=False)
    terminal.result(lambda: as_data.of_verification(found))
    return Code.DONE if found.exact and found.within_budget else Code.NOT_CONFIRMED


def price(
    target: opt.Target,
    plan: opt.PlanFile,
    place: opt.Place,
    output: opt.Output,
    repeats: opt.Repeats = 3,
    out: opt.PlanOut = None,
) -> int:
    """Say what a plan costs that was edited by hand: its peak by a dry run, its added time; nothing is searched.

    The step is taken to be what it was when the plan was made, on the same card; a function that shards the model is
    given again. Exit code 1 if the plan is over its budget.
    """
    place.check()
    from remat.planner import Plan
    from remat.planner import diff as diff_plans
    from remat.planner import price as price_plan
    from remat.planner.show import as_data, console

    loaded = Plan.load(plan)
    terminal, subject = Terminal(output), _load(target)
    with terminal.progress() as say, _running(target, subject):
        given: dict[str, Any] = {"repeats": repeats, **place.elsewhere()}
        if subject.loss is not None:
            given["loss"] = subject.loss
        priced = price_plan(subject.model, subject.batch, loaded, progress=say, **given)
    peak_bytes, budget_bytes = priced.predicted_peak_bytes or 0, priced.budget_bytes
    over_bytes = 0 if budget_bytes is None else peak_bytes - budget_bytes
    if budget_bytes is not None and over_bytes > 0:
        over, peak, budget = map(format_bytes, (over_bytes, peak_bytes, budget_bytes))
        terminal.say(f"over the budget by {over} (peak {peak}, budget {budget})")
    console.print_plan(terminal.tables, priced)
    changed = diff_plans(loaded, priced)
    figures = {name: values for name, values in changed.fields.items() if name.startswith(_FIGURES)}
    console.print_differences(terminal.tables, replace(changed, fields=figures), ("as the file says", "as it is"))
    if "predicted_overhead" in figures and "measured" in (loaded.times_from, priced.times_from):
        terminal.say(_TWO_MEASUREMENTS)
    terminal.result(lambda: as_data.of_plan(priced))
    if out is not None:
        _keep(terminal, priced, out)
    return Code.NOT_CONFIRMED if over_bytes > 0 else Code.DONE


def diff(
    first: Annotated[Path, opt.plan_argument("A")],
    second: Annotated[Path, opt.plan_argument("B")],
    output: opt.Output,
) -> int:
    """Say in what two plans differ: segments, promises, circumstances; exit code 1 if they do."""
    from remat.planner import Plan
    from remat.planner import diff as diff_plans
    from remat.planner.show import console

    terminal = Terminal(output)
    found = diff_plans(Plan.load(first), Plan.load(second))
    console.print_differences(terminal.tables, found, (str(first), str(second)))
    terminal.result(found.to_dict)
    return Code.NOT_CONFIRMED if found else Code.DONE


def compare(
    target: opt.Target,
    step: opt.Step,
    output: opt.Output,
    budget: opt.Budgets = _BUDGETS,
    solver: opt.Solvers = _SOLVERS,
    out: opt.CsvOut = None,
    picture: opt.Picture = None,
    measure: opt.Measure = False,
    time_limit: opt.TimeLimit = 20.0,
) -> int:
    """Plan several budgets with several solvers from one profile, and show them side by side."""
    terminal, subject = Terminal(output), _load(target, step)
    from remat.planner.show import as_data, console

    asked: dict[str, Any] = {"budgets": budget, "solvers": solver, "measure": measure, "time_limit_s": time_limit}
    comparison = _compared(terminal, target, subject, step, asked)
    console.print_comparison(terminal.tables, comparison)
    terminal.result(lambda: as_data.of_comparison(comparison))
    if out is not None:
        comparison.frame.to_csv(out, index=False)
        terminal.wrote(out)
    if picture is not None:
        comparison.plot().savefig(picture, dpi=150)
        terminal.wrote(picture)
    return Code.DONE


def largest_batch(
    target: opt.Target,
    budget: opt.Budget,
    step: opt.Step,
    output: opt.Output,
    sizes: opt.Sizes = None,
    solver: opt.Solver = "auto",
    out: opt.PlanOut = None,
    measure: opt.Measure = False,
    time_limit: opt.TimeLimit = 10.0,
) -> int:
    """Find the batch size that trains most samples per second under a budget in bytes.

    In place of a batch the factory returns a function that takes a size to a batch: return model, make_batch
    """
    terminal, subject = Terminal(output), _load(target, step)
    from remat.planner import largest_batch as find
    from remat.planner.show import as_data

    with terminal.progress() as say, _running(target, subject):
        found = find(
            subject.sized,
            budget,
            model=subject.model,
            loss=subject.loss,
            sizes=None if sizes is None else [int(size) for size in sizes.split(",")],
            solver=solver,
            measure=measure,
            time_limit_s=time_limit,
            progress=say,
            **_step(step, subject),
        )
    terminal.tables.print(found.table(), markup=False)
    if found.verification is not None:
        terminal.tables.print(str(found.verification), markup=False)
    terminal.result(lambda: as_data.of_batch_search(found))
    _keep(terminal, found.plan, out)
    return Code.DONE


def report(
    target: opt.Target,
    step: opt.Step,
    output: opt.Output,
    out: opt.ReportOut = Path("report.html"),
    budget: opt.Budgets = _BUDGETS,
    solver: opt.Solvers = _SOLVERS,
    show_budget: Annotated[
        str | None,
        typer.Option(
            "--plan-for", metavar="BYTES", help="The budget whose best plan is shown; default: the middle one."
        ),
    ] = None,
    measure: opt.Measure = False,
    time_limit: opt.TimeLimit = 20.0,
) -> int:
    """Write one HTML file, with everything in it, for a pull request or a colleague."""
    terminal, subject = Terminal(output), _load(target, step)
    from remat.planner.show import as_data
    from remat.planner.show.report import write_report

    asked: dict[str, Any] = {"budgets": budget, "solvers": solver, "time_limit_s": time_limit}
    comparison = _compared(terminal, target, subject, step, asked)
    with terminal.progress() as say, _running(target, subject):
        refusal = write_report(
            out,
            comparison,
            budget=show_budget,
            subject=subject if measure else None,
            command=shlex.join(["remat", *sys.argv[1:]]),
            progress=say,
        )
    terminal.result(lambda: {**as_data.of_comparison(comparison), "report": str(out)})
    terminal.wrote(out)
    if refusal:
        terminal.warn(f"the budget is not met: {refusal}")
    return Code.INFEASIBLE if refusal else Code.DONE


def calibrate(
    output: opt.Output,
    out: opt.CardOut,
    device: Annotated[opt.Device, typer.Option("--device", help="What to measure.")] = opt.Device.CUDA,
) -> int:
    """Measure a card's memory and rates once, into a file that --card takes in place of a name."""
    terminal = Terminal(output)
    from remat.planner.show import as_data, console
    from remat.profiler.calibrate import calibrate as measure

    with terminal.progress() as say:
        say(f"timing large operators on {device.value}")
        card = measure(device.value)
    card.save(out)
    console.print_card(terminal.tables, card)
    terminal.result(lambda: as_data.of_card(card))
    terminal.wrote(out, f"; plan for it with --card {out}, or device={str(out)!r}")
    return Code.DONE


def demo(
    output: opt.Output,
    out: opt.FolderOut = Path("out"),
    device: opt.OnDevice = None,
    small: Annotated[bool, typer.Option("--small", help="Take a toy model, to see it work in seconds.")] = False,
) -> int:
    """Profile, plan, verify and compare on a small GPT-2."""
    from remat.planner.show.as_data import of_plan
    from remat.planner.show.demo import run_demo

    terminal = Terminal(output)
    with terminal.progress() as say:
        made = run_demo(terminal.tables, out, device=device, small=small, progress=say)
    terminal.result(lambda: of_plan(made))
    return Code.DONE


COMMANDS: Mapping[str, Callable[..., int]] = {
    "profile": profile,
    "plan": plan,
    "verify": verify,
    "price": price,
    "diff": diff,
    "compare": compare,
    "largest-batch": largest_batch,
    "report": report,
    "calibrate": calibrate,
    "demo": demo,
}


def _load(target: opt.Target, step: opt.Step | None = None) -> Subject:
    if step is not None:
        step.check()
    return target.load()


def _step(step: opt.Step, subject: Subject) -> dict[str, Any]:
    return step.keywords(subject.model)


@contextmanager
def _running(target: opt.Target, subject: Subject, planned: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run the model in the precision asked for, else in the one planned for; say where in it an error arose.

    Raises:
        FactoryError: The model or the loss raised; the message names which, and the module.
    """
    from remat.planner.show.factory import FactoryError, autocast

    try:
        with autocast(subject, target.autocast, planned or {}):
            yield
    except Exception as error:
        where = raised_in_subject(error, subject.model) if code_of(error) is Code.INTERNAL else ""
        if not where:
            raise
        raise FactoryError(
            f"{target.spec}: {where} raises {type(error).__name__}: {error}; the batch is {subject.batch_words()}"
        ) from error


def _compared(
    terminal: Terminal, target: opt.Target, subject: Subject, step: opt.Step, asked: dict[str, Any]
) -> Comparison:
    from remat.planner import compare as compare_plans

    if step.alike and asked["solvers"] == _SOLVERS:
        asked = {**asked, "solvers": None}  # sqrt cannot treat blocks alike: `compare` knows what can.
    with terminal.progress() as say, _running(target, subject):
        return compare_plans(
            subject.model, subject.batch, loss=subject.loss, progress=say, **asked, **_step(step, subject)
        )


def _keep(terminal: Terminal, plan: Plan, out: Path | None) -> None:
    if out is None:
        terminal.tables.print("The plan was not written: pass --out plan.json to keep it.")
        return
    kept = _put_aside(out, plan)
    plan.save(out)
    terminal.wrote(out, f"; apply it with remat.apply(model, remat.Plan.load({str(out)!r}))")
    if kept is not None:
        terminal.say(f"what {out} held before, other segments, is {kept} now")


def _put_aside(out: Path, plan: Plan) -> Path | None:
    """Copy a file that is about to be replaced, where it holds other segments, so that no edit by hand is lost."""
    from remat.planner import PlanFileError

    if not out.exists():
        return None
    try:
        if type(plan).load(out).segments == plan.segments:
            return None
    except PlanFileError:
        pass  # What is no plan, or one with a slip in it, is not to be lost either.
    kept = out.with_name(f"{out.name}~")
    shutil.copy2(out, kept)
    return kept
