r"""How much time each solver's plans add, and how far the peak can fall.

    python benchmarks/plan_quality.py --models M4 M5
    python benchmarks/plan_quality.py --tables measured --models M3    # goes on where it was stopped
    python benchmarks/plan_quality.py --tables least --stage-shares 0.02 0.005
    MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_MMAP_THRESHOLD_=4294967296 \
        python benchmarks/plan_quality.py --tables measured

Four tables. `budgets`: added time, as a share of the step, under budgets given as shares of the unplanned peak of the
whole step. `measured`: some of these plans run for real, step times interleaved with the unplanned step's. `trial`: the
same peaks as a first trial of this method reached, and the share of a forward that it recomputed for them. `least`: the
smallest peak within reach. The last two have dropout off and gradients allocated beforehand, count peaks above what is
alive at the step's entry, and keep of the output only the loss (logits are dropped before backward), as the trial did.

With those two variables set the C library keeps the memory that a step gives back, as a card's allocator does; else the
next step takes a part of it from the system again, page by page.
"""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from hand_written import ratio, timed_in_turn
from models import NAMES, Built, build
from remat.planner import InfeasibleBudgetError, Plan, Planner, apply, verify
from remat.planner.bridge.bridge import Bridge
from remat.planner.finding.explain import explain_peak
from remat.planner.finding.host import host_costs
from remat.profiler.stages import SHARE, cut
from remat.profiler.timing import train_once
from remat.solvers import SOLVERS, BudgetTooSmallError, Solution, simulate
from tables import Table, kept_rows, options, publish, scale_note
from torch import nn

COLUMNS = ("all", "uniform", "sqrt", "greedy", "dp", "dp_nested", "ilp")
PLAIN = ("dp", "ilp")
"""Solvers that are run without save sets as well."""
BUDGETS, MEASURED_BUDGETS = (80, 60, 50, 40, 30, 20), (80, 60, 40)
MEASURED = ("M1s", "M1e", "M2", "M3", "M4", "M5")
TRIAL = (
    ("M1s", 0.46, 0.49),
    ("M3", 0.35, 0.44),
    ("M3", 0.32, 0.53),
    ("M4", 0.29, 0.61),
    ("M4", 0.19, 0.88),
    ("M5", 0.70, 0.37),
)
"""Model, peak above entry as a share of the unplanned one, and the share of a forward recomputed for it."""
TIMED = 2
"""Steps timed in each turn."""
TARGETS = {"M1s": 0.175, "M1e": 0.155, "M2": 0.24, "M3": 0.30, "M4": 0.17, "M5": 0.50}
EVERY_BLOCK = {"M1s": 0.194, "M1e": 0.175, "M2": 0.273, "M3": 0.423, "M4": 0.551, "M5": 0.631}


def main() -> None:
    parser = options(__doc__, NAMES, "plan_quality")
    parser.add_argument("--tables", nargs="+", default=["budgets", "measured", "trial", "least"], help="which of them")
    parser.add_argument("--budgets", nargs="+", type=int, help="per cent; default: each table's own")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solve")
    parser.add_argument("--stage-shares", nargs="+", type=float, default=[SHARE], help="how finely stages are cut")
    parser.add_argument("--solvers", nargs="+", default=["sqrt", "dp", "ilp"], help="whose plans are measured")
    parser.add_argument("--rounds", type=int, default=5, help="how often they are timed")
    parser.add_argument("--measure", action="store_true", help="run the plans of the trial's table as well")
    given = parser.parse_args()
    makers = {"budgets": budgets_table, "measured": measured_table, "trial": trial_table, "least": least_table}
    for name in given.tables:
        # A file for each table, so that one can be measured again without the others.
        publish(given.script, [makers[name](given)], given.out, name=f"{given.script}_{name}")


def budgets_table(given) -> Table:
    """Solve every budget with every solver, save sets allowed and not."""
    rows: list[dict] = []
    for name in given.models:
        model, batch, loss = build(name, scale=given.scale)
        planner = Planner.of(model, batch, loss=loss, repeats=1)
        plain = without_save_sets(planner)
        peak = planner.profile.peak_bytes()
        least = least_solution(planner.bridge, "dp").peak_bytes
        started = time.perf_counter()
        for share in (*(given.budgets or BUDGETS), None):
            limit = least if share is None else int(share / 100 * peak)
            label = f"least: {100 * least / peak:.1f} %" if share is None else f"{share} %"
            row = {"model": name, "budget": label}
            row |= {column: cell_of(planner.bridge, column, limit, given.time_limit)[0] for column in COLUMNS[:4]}
            bound = 0.0
            for bridge, suffix in ((plain, " without save sets"), (planner.bridge, "")):
                for column in COLUMNS[4:]:
                    if suffix and column not in PLAIN:
                        continue
                    row[column + suffix], bound = cell_of(bridge, column, limit, given.time_limit)
            row["proven bound of ilp"] = bound
            rows.append(row)
            print(row, f"{time.perf_counter() - started:.0f} s", flush=True)
    text = (
        "Per cent of the step's time added, by the simulator that prices all solvers alike (no dry run); where nothing "
        f"fits, the least peak that the solver reaches, as a share of the unplanned one. At most "
        f"{given.time_limit:g} s a solve; * marks plans cut short by it."
    )
    return Table(name="plan_quality_budgets", title=text, rows=rows, notes=scale_note(given.scale))


def cell_of(bridge: Bridge, solver: str, limit: int, time_limit_s: float) -> tuple[str, float]:
    """Return added per cent and the proven bound, or the least peak as text."""
    step_ns = max(1, bridge.profile.step_ns)
    try:
        solution = SOLVERS[solver](bridge.problem(limit), time_limit_s=time_limit_s)
    except BudgetTooSmallError as error:
        return f"≥ {100 * error.least_peak_bytes / bridge.profile.peak_bytes():.1f} % peak", 0.0
    mark = "*" if solution.status.value == "time_limit" else ""
    return f"{100 * solution.added_ns / step_ns:.2f}{mark}", 100 * solution.lower_bound_ns / step_ns


def measured_table(given) -> Table:
    """Run plans for real: the allocator's peak, and the step's time in turn with the unplanned step's."""
    kept = kept_rows(given, "plan_quality_measured")
    for name in (name for name in given.models if name in MEASURED):
        shares = given.budgets or MEASURED_BUDGETS
        wanted = {(share, solver): f"{name} {share} {solver}" for share in shares for solver in given.solvers}
        if all(kept.has(key) for key in wanted.values()):
            continue
        model, batch, loss = build(name, scale=given.scale)
        planner = Planner.of(model, batch, loss=loss)
        measured: dict[tuple, dict] = {}
        for (share, solver), key in wanted.items():
            kept.row(key, partial(measured_row, given, name, planner, f"{share}%", solver, measured))
    text = (
        "Plans run for real: the allocator's peak, and time over the unplanned step's, medians of "
        f"{given.rounds} turns of {TIMED} steps, each after a step that warms up; CPU time is the process's, steadier "
        "where other programs use the machine; beside the medians, the fastest steps compared"
    )
    rows = kept.all(NAMES)
    return Table(
        name="plan_quality_measured", title=text, rows=rows, notes=[*scale_note(given.scale), *kept_word(rows)]
    )


def measured_row(given, name: str, planner: Planner, budget: str, solver: str, measured: dict[tuple, dict]) -> dict:
    """Plan one budget with one solver, and run the plan, unless it is among those `measured` already."""
    row: dict = {"model": name, "budget": budget, "solver": solver}
    try:
        plan = planner.plan(budget, solver=solver, time_limit_s=given.time_limit)
    except InfeasibleBudgetError as error:
        row["budget"] += f" (least: {100 * error.least_peak_bytes / planner.profile.peak_bytes():.1f} %)"
        return row
    if plan.segments not in measured:
        measured[plan.segments] = measured_cells(given, planner, plan) | {"remark": f"the plan of {solver}"}
    cells = measured[plan.segments]
    low, high = plan.predicted_overhead_range
    cpu, wall = (cells[f"measured added {clock} time, %"] for clock in ("CPU", "wall"))
    row |= {
        "predicted peak, % of unplanned": 100 * plan.predicted_peak_bytes / plan.unplanned_peak_bytes,
        "predicted added time, %": 100 * plan.predicted_overhead,
        "predicted from to": f"{100 * low:.1f} to {100 * high:.1f}",
        "CPU time less predicted, points": cpu - 100 * plan.predicted_overhead,
        "wall time less predicted, points": wall - 100 * plan.predicted_overhead,
    }
    return row | cells | {"remark": "" if cells["remark"].endswith(f" {solver}") else cells["remark"]}


def measured_cells(given, planner: Planner, plan: Plan) -> dict:
    """Run a plan in turn with the unplanned step."""
    step = planner.session.step
    found = verify(step.model, {**step.kwargs} or step.args, plan, loss=step.loss, repeats=0)
    arms = {"plain": nullcontext, "planned": partial(apply, step.model, plan)}
    times = timed_in_turn(partial(train_once, step), arms, given.rounds, warm=True, each=TIMED)
    cpu = [planned / plain - 1 for plain, planned in zip(times["plain"].cpu, times["planned"].cpu, strict=True)]
    return {
        "measured peak, % of unplanned": 100 * found.measured_peak_bytes / plan.unplanned_peak_bytes,
        "measured added CPU time, %": 100 * (ratio({arm: t.cpu for arm, t in times.items()}, "planned", "plain") - 1),
        "measured from to": f"{100 * min(cpu):.1f} to {100 * max(cpu):.1f}",
        "fastest CPU time, %": 100 * (min(times["planned"].cpu) / min(times["plain"].cpu) - 1),
        "measured added wall time, %": 100 * (ratio({arm: t.wall for arm, t in times.items()}, "planned", "plain") - 1),
        "exact": found.exact,
    }


def kept_word(rows: list[dict]) -> list[str]:
    """Say how many rows keep their promise of time."""
    column = "wall time less predicted, points"
    off = [abs(row[column]) for row in rows if column in row]
    near = sum(points <= 3 for points in off)
    if not off:
        return []
    return [
        f"By the clock {near} of {len(off)} plans are within 3 points of predicted; the farthest is {max(off):.1f}."
    ]


def trial_table(given) -> Table:
    """Plan the peaks that the first trial reached."""
    rows: list[dict] = []
    planners: dict[str, tuple] = {}
    for name, share, recomputed in TRIAL:
        if name not in given.models:
            continue
        if name not in planners:
            model, batch, loss = trial_step(name, given.scale)
            planner = Planner.of(model, batch, loss=loss, accumulation=True, repeats=1)
            planners[name] = (model, batch, loss, planner)
        model, batch, loss, planner = planners[name]
        fixed, peak = planner.profile.fixed_bytes(), planner.profile.peak_bytes()
        row: dict = {"model": name, "peak above entry": share, "trial: forward recomputed": recomputed}
        for label, which, solver in (
            ("dp without save sets", without_save_sets(planner), "dp"),
            ("dp", planner.bridge, "dp"),
            ("ilp", planner.bridge, "ilp"),
            ("dp_nested", planner.bridge, "dp_nested"),
        ):
            started = time.perf_counter()
            budget = fixed + int(share * (peak - fixed))
            try:
                chosen = replace_bridge(planner, which)
                plan = chosen.plan(budget, solver=solver, time_limit_s=given.time_limit, check=False)
            except InfeasibleBudgetError as error:
                row[f"{label}: forward recomputed"] = f"≥ {(error.least_peak_bytes - fixed) / (peak - fixed):.3f} peak"
            else:
                row[f"{label}: forward recomputed"] = (
                    plan.predicted_overhead * planner.profile.step_ns / planner.profile.forward_ns
                )
                row[f"{label}: peak"] = (plan.predicted_peak_bytes - fixed) / (peak - fixed)
                if given.measure and label == "ilp":
                    found = verify(model, batch, plan, loss=loss, repeats=0)
                    row["ilp: measured peak"] = (found.measured_peak_bytes - fixed) / (peak - fixed)
            print(row, f"{time.perf_counter() - started:.0f} s", flush=True)
        rows.append(row)
    text = (
        "A first trial's peaks (above the step's entry, as shares of the unplanned one; dropout off, gradients "
        "allocated beforehand), and the share of a forward recomputed for each; replays' own overhead is counted"
    )
    return Table(name="plan_quality_trial", title=text, rows=rows, notes=scale_note(given.scale))


def least_table(given) -> Table:
    """Find the smallest peak within reach; only bytes matter, so nothing is timed."""
    rows: list[dict] = []
    notes: list[str] = []
    for name in given.models:
        model, batch, loss = trial_step(name, given.scale)
        recorded = Planner.of(model, batch, loss=loss, accumulation=True, save_sets=False, repeats=0)
        fixed, peak = recorded.profile.fixed_bytes(), recorded.profile.peak_bytes()
        for stage_share in given.stage_shares:
            planner = recut(recorded, stage_share) if stage_share != SHARE else recorded
            row: dict = {"model": name, "stage share": stage_share, "stages": len(planner.profile.stages)}
            row |= {"candidates": len(planner.bridge.candidates), "target": TARGETS.get(name)}
            row["every block, trial"] = EVERY_BLOCK.get(name)
            for solver in ("all", "dp", "dp_nested"):
                started = time.perf_counter()
                solution = least_solution(planner.bridge, solver)
                row[f"{solver}: simulated"] = (solution.peak_bytes - fixed) / (peak - fixed)
                peak_bytes, words = in_child(lambda planner=planner, solution=solution: dry_run(planner, solution))
                row[f"{solver}: dry run"] = None if peak_bytes is None else (peak_bytes - fixed) / (peak - fixed)
                row[f"{solver}: s"] = time.perf_counter() - started
                if solver != "all":
                    notes.append(f"- {name}, stages of {stage_share:g}, {solver}: {words}")
                    print(notes[-1], flush=True)
            if name in TARGETS:
                reached = [row[f"{solver}: dry run"] for solver in ("dp", "dp_nested")]
                row["target met"] = min(share for share in reached if share is not None) <= TARGETS[name]
            rows.append(row)
            print(row, flush=True)
    text = (
        "The smallest reachable peak above the step's entry, as a share of the unplanned one (dropout off, gradients "
        "allocated beforehand)"
    )
    return Table(name="plan_quality_least", title=text, rows=rows, notes=[*scale_note(given.scale), "\n".join(notes)])


class LossOnly(nn.Module):
    """Return a model's loss and drop the rest of its output."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        """Return the loss."""
        return self.model(**batch).loss


def trial_step(name: str, scale: float) -> Built:
    """Build a model as the first trial ran it."""
    model, batch, loss = build(name, dropout=0.0, scale=scale)
    return (model, batch, loss) if loss is not None else (LossOnly(model).train(), batch, lambda value: value)


def dry_run(planner: Planner, solution: Solution) -> tuple[int, str]:
    """Return the peak of the applied plan's dry run, and what holds it."""
    place = simulate(planner.bridge.problem(1), solution.segments)
    stage = planner.profile.stages[place.stage].name if place.stage >= 0 else "no stage"
    trial = planner.search.draft(solution)
    holders = explain_peak(trial.dry_run.record, planner.profile, trial.peak_bytes, limit=6)
    return trial.peak_bytes, f"simulated peak in {place.phase} of {stage}; dry run: {holders}"


def in_child(function: Callable[[], tuple[int, str]]) -> tuple[int | None, str]:
    """Call a function in a forked process, so that a plan that cannot be applied leaves nothing behind here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send(function())
        except Exception as error:
            sender.send((None, f"the plan cannot be dry-run: {type(error).__name__}: {str(error)[:160]}"))

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = (None, "the dry run ended its process")
    process.join()
    return found


def without_save_sets(planner: Planner) -> Bridge:
    """Return a bridge of the same profile that offers no save sets."""
    return Bridge(planner.profile, host_costs(planner.session.device), save_sets=False)


def replace_bridge(planner: Planner, bridge: Bridge) -> Planner:
    """Return a planner over the same step with another bridge."""
    return planner.with_bridge(bridge)


def recut(planner: Planner, stage_share: float) -> Planner:
    """Return a planner of the same step, its stages cut more or less finely."""
    profile = planner.profile
    stages = cut(profile.calls, profile.storages, profile.loss_stop, stage_share)
    bridge = Bridge(replace(profile, stages=stages), host_costs(planner.session.device), save_sets=False)
    return replace_bridge(planner, bridge)


def least_solution(bridge: Bridge, solver: str) -> Solution:
    """Return the plan of the least peak that a solver reaches, by its model."""
    try:
        return SOLVERS[solver](bridge.problem(1))
    except BudgetTooSmallError as error:
        return error.solution


if __name__ == "__main__":
    main()
