"""How long the solvers take, by size: a table (Markdown and CSV) and a plot.

    python benchmarks/solver_scale.py --out results/

One process, one core for the integer programme; seconds are of that process's own CPU time, because other programs
on the machine do not count against a solver. Peak memory is the process's high-water mark so far.
"""

import argparse
import csv
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from remat.solvers import SOLVERS, Problem, simulate
from solver_problems import FIXED_BYTES, blocks_with_operators, unequal_chain
from tables import measured_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    case: str
    solver: str
    stages: int
    candidates: int
    operators: int
    budget_share: float
    cpu_seconds: float
    limit_seconds: float
    status: str
    gap_percent: float
    added_ms: float
    peak_memory_mib: float


def budgeted(problem: Problem, share: float) -> Problem:
    """Set the budget to a share of what the unplanned step needs beyond its fixed bytes."""
    unplanned = simulate(problem, (), trace=False).peak_bytes
    return replace(problem, budget_bytes=FIXED_BYTES + int(share * (unplanned - FIXED_BYTES)))


def measure(case: str, solve, problem: Problem, share: float, limit: float, **options) -> Row:
    """Solve once, tables and graphs made anew."""
    fresh = replace(problem, stages=(*problem.stages[:-1], problem.stages[-1]))
    started = time.process_time()
    solution = solve(budgeted(fresh, share), **options)
    seconds = time.process_time() - started
    return Row(
        case=case,
        solver=solution.solver,
        stages=len(problem.stages),
        candidates=len(problem.candidates),
        operators=len(problem.operators),
        budget_share=share,
        cpu_seconds=round(seconds, 3),
        limit_seconds=limit,
        status=solution.status.value,
        gap_percent=round(100 * solution.gap, 3),
        added_ms=round(solution.added_ns / 1e6, 3),
        peak_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def targets(shares: list[float]) -> Iterator[Row]:
    """Measure the cases that have a limit."""
    chain = unequal_chain(100, 100)
    short = unequal_chain(100, 37)
    blocks = blocks_with_operators(48, 100)
    for share in shares:
        yield measure("100 stages, all segments", SOLVERS["dp"], chain, share, 1.0)
        yield measure("100 stages, all segments", SOLVERS["dp_nested"], chain, share, 10.0)
        yield measure("100 stages, segments up to 37", SOLVERS["ilp"], short, share, 30.0)
        yield measure("48 blocks of 100 operators, 1 % gap", SOLVERS["ilp"], blocks, share, 20.0, gap=0.01)
    long = unequal_chain(1000, 64)
    for share in shares:
        yield measure("1,000 stages, segments up to 64", SOLVERS["dp"], long, share, 20.0)


def growth(largest: int) -> Iterator[Row]:
    """Measure chains of growing length, at half of the unplanned memory."""
    for count in (25, 50, 100, 200, 400, 800):
        if count > largest:
            return
        problem = unequal_chain(count, 37)
        yield measure("growth", SOLVERS["dp"], problem, 0.5, 0.0)
        if count <= 200:
            yield measure("growth", SOLVERS["dp_nested"], problem, 0.5, 0.0)
        if count <= 100:
            yield measure("growth", SOLVERS["ilp"], problem, 0.5, 0.0)


def simulator_rate() -> str:
    """Say how long one call of the simulator takes at two sizes."""
    parts: list[str] = []
    for count, calls in ((150, 500), (1000, 200)):
        problem = budgeted(unequal_chain(count, 37), 0.5)
        plan = SOLVERS["dp"](problem).segments
        started = time.process_time()
        for _ in range(calls):
            simulate(problem, plan, trace=False)
        each = (time.process_time() - started) / calls
        parts.append(f"{each * 1e6:.0f} µs with {count} stages and {len(problem.tensors)} tensors")
    return "One call of the simulator: " + ", ".join(parts) + "."


def write_table(rows: list[Row], rate: str, out: Path) -> None:
    """Write solver_scale.csv and solver_scale.md."""
    names = [field.name for field in fields(Row)]
    with (out / "solver_scale.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(str(getattr(row, name)) for name in names) + " |" for row in rows]
    header = f"Measured with `benchmarks/solver_scale.py`, {measured_on()}."
    (out / "solver_scale.md").write_text("\n".join([header, "", *lines, "", rate, ""]))


def draw(rows: list[Row], out: Path) -> None:
    """Plot CPU time against the number of stages."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for solver in ("dp", "dp_nested", "ilp"):
        points = [(row.stages, row.cpu_seconds) for row in rows if row.case == "growth" and row.solver == solver]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=solver)
    axes.set(xscale="log", yscale="log", xlabel="stages", ylabel="CPU seconds")
    axes.set_title("Segments up to 37 stages long, half of the unplanned memory", fontsize=10)
    sizes = sorted({row.stages for row in rows if row.case == "growth"})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "solver_scale.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the plot")
    parser.add_argument("--quick", action="store_true", help="one budget, and chains up to 100 stages only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for rows_of in (targets([0.5] if options.quick else [0.7, 0.5, 0.3]), growth(100 if options.quick else 800)):
        for row in rows_of:
            print(row, flush=True)
            rows.append(row)
    write_table(rows, simulator_rate(), options.out)
    draw(rows, options.out)
    for row in rows:
        if row.limit_seconds and row.cpu_seconds > row.limit_seconds:
            print(f"over its limit: {row}")


if __name__ == "__main__":
    main()
