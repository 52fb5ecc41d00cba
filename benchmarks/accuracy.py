"""Whether plans keep their promises: predicted against measured peaks, budgets, and bitwise equal results.

    python benchmarks/accuracy.py --models M1s M4

Peaks are of the whole step, parameters and gradients included; measured is the allocator's own figure. Dropout is on
where the model has any. Where no plan fits the budget, the least peak that the solver reaches becomes the budget.
"""

import time

from models import build
from remat.planner import InfeasibleBudgetError, Plan, Planner, Verification, verify
from tables import Table, mib, options, publish, scale_note

SHARES = (80, 60, 40)
SOLVERS = ("sqrt", "dp", "ilp")


def main() -> None:
    parser = options(__doc__, ("M1s", "M1e", "M2", "M3", "M4", "M5"), "accuracy")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each solve")
    parser.add_argument("--budgets", nargs="+", type=int, default=SHARES, help="per cent of the unplanned peak")
    parser.add_argument("--solvers", nargs="+", default=SOLVERS)
    parser.add_argument("--name", default="accuracy", help="file name of the tables")
    given = parser.parse_args()
    rows = []
    for name in given.models:
        started = time.perf_counter()
        rows += check(name, given)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        table = Table(name=given.name, title=title(rows), rows=rows, notes=notes(rows, given))
        publish(given.script, [table], given.out, name=given.name)


def check(name: str, given) -> list[dict]:
    """Plan and verify one model at every budget with every solver."""
    model, batch, loss = build(name, scale=given.scale)
    planner = Planner.of(model, batch, loss=loss, repeats=1)
    unplanned = planner.profile.peak_bytes()
    rows: list[dict] = []
    seen: dict[tuple, tuple[Plan, Verification]] = {}
    exhausted: set[str] = set()
    for share in given.budgets:
        for solver in given.solvers:
            if solver in exhausted:
                continue
            fits, plan = True, None
            try:
                plan = planner.plan(f"{share}%", solver=solver, time_limit_s=given.time_limit, check=False)
            except InfeasibleBudgetError as error:
                fits, plan = False, error.plan
                exhausted.add(solver)
            key = (plan.segments, plan.budget_bytes)
            if key not in seen:
                seen[key] = (plan, verify(model, batch, plan, loss=loss, repeats=0))
            rows.append(row_of(name, f"{share} %" if fits else f"least (no {share} %)", solver, *seen[key]))
            print(rows[-1], flush=True)
    found = next(iter(seen.values()))[1]
    measured = found.unplanned_measured_peak_bytes
    first = {"model": name, "budget": "none", "solver": "", "predicted MiB": mib(unplanned)}
    first["of it calibrated, KiB"] = planner.profile.unseen_bytes / 2**10
    if measured is not None:
        first |= {"measured MiB": mib(measured), "measured/predicted - 1, %": 100 * (measured / unplanned - 1)}
    return [first, *rows]


def row_of(name: str, budget: str, solver: str, plan: Plan, found: Verification) -> dict:
    """Return one plan's promises and what came of them."""
    predicted, measured = plan.predicted_peak_bytes, found.measured_peak_bytes
    return {
        "model": name,
        "budget": budget,
        "solver": solver,
        "predicted MiB": mib(predicted),
        "measured MiB": mib(measured),
        "measured/predicted - 1, %": 100 * (measured / predicted - 1),
        "budget MiB": mib(plan.budget_bytes),
        "within budget": measured <= plan.budget_bytes,
        "loss equal": not found.loss.unequal,
        "gradients equal": not found.gradients.unequal,
        "buffers equal": not found.buffers.unequal,
        "random state equal": found.random_state_equal,
        "model repeats itself": found.repeatable,
    }


def title(rows: list[dict]) -> str:
    """Say what came out, in one sentence."""
    off = [abs(row["measured/predicted - 1, %"]) for row in rows if "measured MiB" in row]
    plans = [row for row in rows if row["solver"]]
    within = sum(row["within budget"] for row in plans)
    equal = sum(row["loss equal"] and row["gradients equal"] and row["buffers equal"] for row in plans)
    return (
        f"Promises kept: predicted within {max(off, default=0):.2f} % of measured; {within} of {len(plans)} plans "
        f"within their budget; {equal} of {len(plans)} bitwise equal in loss, gradients and buffers"
    )


def notes(rows: list[dict], given) -> list[str]:
    """Name the rows that break a promise."""
    broken = [
        f"- {row['model']}, {row['budget']}, {row['solver'] or 'unplanned'}: measured/predicted - 1 = "
        f"{row['measured/predicted - 1, %']:.3f} %, within budget: {row.get('within budget', 'no budget')}"
        for row in rows
        if "measured MiB" in row and (abs(row["measured/predicted - 1, %"]) > 1 or not row.get("within budget", True))
    ]
    return [*scale_note(given.scale), *broken]


if __name__ == "__main__":
    main()
