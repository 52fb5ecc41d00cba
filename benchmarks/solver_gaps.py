"""How far the exact solvers' plans may be from the best of their plan spaces: a table of added time, bound and gap.

    python benchmarks/recorded_plans.py record --folder recorded/
    python benchmarks/solver_gaps.py --folder recorded/ --out benchmarks/results
    python benchmarks/solver_gaps.py --folder recorded/ --before before.json   # what `recorded_plans.py plan` wrote

Every solver has its default time limit. Seconds are of the process's own CPU time: a busy machine leaves a solver less
of its limit, and so can only widen a gap. A solver none of whose plans fits a budget has no row for it.
"""

import argparse
import json
import time
from pathlib import Path

from recorded_plans import recorded_problems
from remat.solvers import SOLVERS, BudgetTooSmallError, Status
from remat.solvers.solution import DEFAULT_LIMIT_S
from tables import Table, publish

EXACT = ("dp", "dp_nested", "ilp")
BUDGETS = (80, 60, 40)


def rows_of(folder: Path, before: dict[str, dict]) -> list[dict[str, object]]:
    """Solve every recorded step at every budget with every exact solver."""
    rows: list[dict[str, object]] = []
    for name, (bridge, recorded) in recorded_problems(folder, save_sets=True).items():
        for share in BUDGETS:
            problem = bridge.problem(share * recorded.peak_bytes() // 100)
            for solver in EXACT:
                started = time.process_time()
                try:
                    found = SOLVERS[solver](problem)
                except BudgetTooSmallError:
                    continue
                row: dict[str, object] = {
                    "model": name,
                    "budget, %": share,
                    "solver": solver,
                    "added ms": found.added_ns / 1e6,
                    "bound ms": found.lower_bound_ns / 1e6,
                    "gap, %": 100 * found.gap,
                    "status": found.status.value,
                    "CPU s": time.process_time() - started,
                }
                old = before.get(f"{name} {share} % {solver}")
                if old is not None and old["added_ns"]:
                    row["added ms, before"] = old["added_ns"] / 1e6
                    row["gap before, %"] = 100 * (old["added_ns"] - old["bound_ns"]) / old["added_ns"]
                print(row, flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what `recorded_plans.py record` wrote")
    parser.add_argument("--before", type=Path, help="plans of another version, to stand beside these")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    given = parser.parse_args()
    rows = rows_of(given.folder, json.loads(given.before.read_text()) if given.before else {})
    proven = sum(row["status"] == Status.OPTIMAL.value for row in rows)
    title = (
        f"Added time and proven bound within {DEFAULT_LIMIT_S:g} s a solver; budgets in per cent of the unplanned peak"
    )
    notes = [
        f"{proven} of {len(rows)} plans are proven optimal in their solver's plan space: one level and a few save sets "
        "a candidate for `dp`, nesting besides for `dp_nested`, one level and any save set for `ilp`."
    ]
    publish("solver_gaps", [Table(name="solver_gaps", title=title, rows=rows, notes=notes)], given.out)


if __name__ == "__main__":
    main()
