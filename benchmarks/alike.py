"""What it costs to treat blocks alike: predicted added time of `dp` and `ilp` with and without it, at three budgets.

    python benchmarks/alike.py --out benchmarks/results

Nothing is planned or run but the profile: both problems are solved with the same averaged times. Seconds are of the
process's own CPU time, the first solve's with what it prepares.
"""

import time

from models import HOLDS_OUTPUT, build
from remat.planner import Planner
from remat.solvers import ALIKE, SOLVERS, BudgetTooSmallError, Problem, Solver
from tables import Table, options, publish, scale_note

BUDGETS = (80, 60, 40)


def added(solver: Solver, problem: Problem) -> tuple[float | None, str, float]:
    """Return the added time as a share of the step's, what is known of it, and the CPU seconds it took."""
    started = time.process_time()
    try:
        found = solver(problem)
    except BudgetTooSmallError as error:
        return None, f"least {error.least_peak_bytes / 2**20:.0f} MiB", time.process_time() - started
    return 100 * found.added_ns / problem.step_ns, found.status.value, time.process_time() - started


def rows_of(name: str, scale: float) -> list[dict[str, object]]:
    """Solve one model's step at every budget, with and without blocks alike."""
    model, batch, loss = build(name, scale=scale)
    planner = Planner.of(model, batch, loss=loss, alike=True, holds_output=name in HOLDS_OUTPUT)
    peak, rows = planner.profile.peak_bytes(), list[dict[str, object]]()
    blocks = " + ".join(str(len(kind.bounds)) for kind in planner.bridge.kinds)
    for solver in ("dp", "ilp"):
        for share in BUDGETS:
            problem = planner.bridge.problem(share * peak // 100)
            free, free_status, free_s = added(SOLVERS[solver], problem)
            alike, status, alike_s = added(ALIKE[solver], problem)
            row = {"model": name, "blocks": blocks, "solver": solver, "budget, %": share}
            row |= {"added, %": free, "status": free_status, "CPU s": free_s}
            row |= {"alike added, %": alike, "alike status": status, "alike CPU s": alike_s}
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    given = options(__doc__, ("M1s", "M2"), "alike").parse_args()
    rows = [row for name in given.models for row in rows_of(name, given.scale)]
    title = "Added time of the same room without and with blocks alike; budgets in per cent of the unplanned peak"
    publish("alike", [Table(name="alike", title=title, rows=rows, notes=scale_note(given.scale))], given.out)


if __name__ == "__main__":
    main()
