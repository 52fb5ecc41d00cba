"""How long profiling and planning take against training steps: the demo's model, in one process.

    python benchmarks/planning_time.py

The limit is six training steps and ten seconds. Wall time, so other programs on the machine count against it.
"""

import time
from contextlib import nullcontext
from functools import partial
from statistics import median

from hand_written import timed_in_turn
from models import build
from remat.planner import InfeasibleBudgetError, Planner
from remat.profiler.step import Step
from remat.profiler.timing import train_once
from tables import Table, options, publish, scale_note

LIMIT_STEPS, LIMIT_S = 6, 10.0


def main() -> None:
    parser = options(__doc__, ("M1s",), "planning_time")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--solvers", nargs="+", default=["dp", "ilp", "auto"])
    parser.add_argument("--time-limit", type=float, default=None, help="seconds for each solve")
    given = parser.parse_args()
    rows: list[dict] = []
    for name in given.models:
        model, batch, loss = build(name, scale=given.scale)
        step = Step.of(model, batch, loss)
        train_once(step)
        step_s = median(timed_in_turn(partial(train_once, step), {"plain": nullcontext}, 3)["plain"].wall)
        for solver in given.solvers:
            phases = Phases()
            started, cpu = time.perf_counter(), time.process_time()
            planner = Planner.of(model, batch, loss=loss, progress=phases.say)
            profiled = time.perf_counter() - started
            added = None
            try:
                plan = planner.plan(given.budget, solver=solver, time_limit_s=given.time_limit, progress=phases.say)
                added = 100 * plan.predicted_overhead
            except InfeasibleBudgetError as error:
                print(error)
            total = time.perf_counter() - started
            limit = LIMIT_STEPS * step_s + LIMIT_S
            rows.append(
                {
                    "model": name,
                    "solver": solver,
                    "step s": step_s,
                    "profiling s": profiled,
                    "planning s": total - profiled,
                    "together s": total,
                    "CPU s": time.process_time() - cpu,
                    f"limit: {LIMIT_STEPS} steps + {LIMIT_S:g} s": limit,
                    "within": total <= limit,
                    "added time, %": added,
                }
            )
            print(rows[-1], phases.done(), flush=True)
    title = f"Profiling and planning one budget ({given.budget} of the peak) against training steps"
    publish(
        given.script, [Table(name="planning_time", title=title, rows=rows, notes=scale_note(given.scale))], given.out
    )


class Phases:
    """Collect how long each phase takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "opening", time.perf_counter()

    def say(self, phase: str) -> None:
        """End the phase that runs and begin another."""
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def done(self) -> dict[str, float]:
        """Return seconds by phase."""
        self.say("done")
        return {phase: round(seconds, 2) for phase, seconds in self.seconds.items()}


if __name__ == "__main__":
    main()
