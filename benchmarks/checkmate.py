"""What confining recomputation to checkpointed segments costs: the unrestricted problem, solved exactly.

    python benchmarks/checkmate.py

Checkmate (Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", MLSys 2020,
section 4) lets a step compute any node again at any time. The execution is cut into periods (there: stages), each of
which ends with one node's first forward or with one node's backward; before that end a period may run, in index order
and once each, nodes that have run before. Backward nodes run once and gradients are never dropped: their bytes are
among the stages' extras.
"""

import argparse
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pulp
from remat.solvers import SOLVERS, BudgetTooSmallError, Problem, Segment, simulate
from remat.solvers.integer.backends import run_highs

SCALE = 1000.0
"""What the room and the forward's time are scaled to in the programme."""

Runs = tuple[frozenset[int], ...]
"""The nodes that each period runs before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Hold a schedule.

    Attributes:
        runs: What it recomputes, by period.
        peak_bytes: Its peak, in bytes.
        added_ns: Time of what it recomputes, in nanoseconds.
        bound: No schedule has less of what was minimised, nanoseconds or bytes.
        proven: Whether it is proven optimal.
    """

    runs: Runs
    peak_bytes: int
    added_ns: int
    bound: float
    proven: bool


class _Uses:
    """Hold which tensors each node reads, makes and needs in backward, by index."""

    def __init__(self, problem: Problem) -> None:
        nodes, tensors = range(len(problem.stages)), list(enumerate(problem.tensors))
        self.reads = [{t for t, tensor in tensors if i in tensor.consumers} for i in nodes]
        self.makes = [{t for t, tensor in tensors if i == tensor.producer} for i in nodes]
        self.holds = [{t for t, tensor in tensors if i in tensor.holders} for i in nodes]
        self.first_use = [min((*tensor.holders, *tensor.consumers), default=len(nodes)) for _, tensor in tensors]
        self.outliving = {t for t, tensor in tensors if tensor.last_alive >= len(nodes)}


def periods(count: int) -> list[tuple[str, int]]:
    """Return how each period ends: ("forward", node) in order, then ("backward", node) in reverse order."""
    return [("forward", i) for i in range(count)] + [("backward", i) for i in reversed(range(count))]


def price(problem: Problem, runs: Runs) -> tuple[int, int]:
    """Return (peak_bytes, added_ns) of a schedule whose tensors are freed as soon as nothing will read them again.

    Raises:
        ValueError: If something is read that is not there.
    """
    stages, tensors, uses = problem.stages, problem.tensors, _Uses(problem)
    peak, needed = problem.floor_bytes, set(uses.outliving)
    for (phase, node), run in zip(reversed(periods(len(stages))), reversed(runs), strict=True):
        entry = 0
        if phase == "backward":
            needed |= uses.holds[node]
            entry = stages[node].entry_extra_bytes
            alive = sum(tensors[t].nbytes for t in needed)
            peak = max(peak, problem.fixed_bytes + alive + stages[node].backward_extra_bytes)
        for k in sorted(run | {node} if phase == "forward" else run, reverse=True):
            needed |= uses.makes[k] | uses.reads[k]
            alive = sum(tensors[t].nbytes for t in needed)
            peak = max(peak, problem.fixed_bytes + alive + stages[k].forward_extra_bytes + entry)
            is_first = phase == "forward" and k == node
            needed -= uses.makes[k] if is_first else uses.makes[k] - uses.outliving
    missing = [t for t in needed if tensors[t].producer >= 0]
    if missing:
        raise ValueError(f"tensors {missing} are read before they are made")
    return peak, sum(stages[k].forward_ns for run in runs for k in run)


def runs_of(problem: Problem, segments: tuple[Segment, ...]) -> Runs:
    """Return the schedule of a plan: a segment's replay runs in the period of its last stage's backward."""
    count = len(problem.stages)
    uses = _Uses(problem)
    runs = [set[int]() for _ in range(2 * count)]
    for segment in (inner for outer in segments for inner in outer.walk()):
        savers = [i for i in range(segment.start, segment.stop) if uses.holds[i]]
        if savers:
            end = savers[-1] + bool(uses.holds[savers[-1]] & uses.makes[savers[-1]])  # Early stop.
            kept = {problem.operators[operator].stage for operator in segment.keep}
            runs[2 * count - segment.stop] |= set(range(segment.start, end)) - kept
    return tuple(map(frozenset, runs))


class Programme:
    """State the problem as an integer programme.

    A binary for each period and node says whether the node runs there again (R in the paper). Instead of S, U and
    FREE, a continuous variable for each moment and tensor says whether it is in memory then: S is its value as a
    period begins, FREE its decrease from one moment to the next, U the sum over tensors. Users of a tensor need not be
    counted then, and once the binaries are fixed the least values are 0 or 1.

    Args:
        problem: Extras must not be negative. Candidates and operators play no part.
        least_peak: Minimise the peak, at most the budget, instead of the time added.
    """

    def __init__(self, problem: Problem, *, least_peak: bool = False) -> None:
        if min(min(s.forward_extra_bytes, s.backward_extra_bytes) for s in problem.stages) < 0:
            raise ValueError("extras must not be negative: moments that do not happen would count")
        self._problem, self._uses = problem, _Uses(problem)
        self._per_byte = SCALE / max(1, problem.budget_bytes - problem.fixed_bytes)
        self._per_ns = SCALE / max(1, sum(stage.forward_ns for stage in problem.stages))
        self._programme = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self._room = self._programme.add_variable("room", 0, SCALE) if least_peak else SCALE
        self._runs: list[dict[int, pulp.LpVariable]] = []
        self._here: dict[int, pulp.LpVariable | int] = {
            t: 1 for t, tensor in enumerate(problem.tensors) if tensor.producer < 0
        }
        for phase, node in periods(len(problem.stages)):
            self._add_period(phase, node)
        runs = [(k, run) for period in self._runs for k, run in period.items()]
        added = pulp.lpSum(problem.stages[k].forward_ns * self._per_ns * run for k, run in runs)
        self._programme.setObjective(pulp.lpSum(self._room) if least_peak else added)

    def _add_period(self, phase: str, node: int) -> None:
        uses, stage, number = self._uses, self._problem.stages[node], len(self._runs)
        forward = phase == "forward"
        runs: dict[int, pulp.LpVariable] = {}
        for k in range(node if forward else node + 1):
            runs[k] = self._programme.add_variable(f"run_{number}_{k}", cat="Binary")
            extra = self._problem.stages[k].forward_extra_bytes + (0 if forward else stage.entry_extra_bytes)
            self._add_moment(f"{number}_{k}", runs[k], extra, uses.reads[k], uses.makes[k])
        self._runs.append(runs)
        if forward:
            self._add_moment(f"{number}_f", 1, stage.forward_extra_bytes, uses.reads[node], uses.makes[node])
        else:
            self._add_moment(f"{number}_b", 1, stage.backward_extra_bytes, uses.holds[node], set())
            done = {t for t in self._here if uses.first_use[t] >= node} - uses.outliving
            self._here = {t: here for t, here in self._here.items() if t not in done}

    def _add_moment(self, name: str, run: pulp.LpVariable | int, extra: int, reads: set[int], makes: set[int]) -> None:
        """Let `run` happen: what it reads and makes is in memory, everything there fits and was there or is made."""
        before, self._here = self._here, {}
        for t in sorted(before.keys() | makes):
            must_stay = t in self._uses.outliving and t in before
            here = self._here[t] = self._programme.add_variable(f"here_{name}_{t}", int(must_stay), 1)
            self._programme += here <= before.get(t, 0) + (run if t in makes else 0)
            if t in reads or t in makes:
                self._programme += here >= run
        alive = pulp.lpSum(self._problem.tensors[t].nbytes * self._per_byte * here for t, here in self._here.items())
        self._programme += alive + extra * self._per_byte * run <= self._room

    def solve(self, *, time_limit_s: float = math.inf) -> Optimum:
        """Return the best schedule found.

        Raises:
            LookupError: If there is none, or none was found in time.
        """
        answer = run_highs(self._programme, gap=0.0, time_limit_s=time_limit_s)
        if not answer.found or self._problem.budget_bytes < max(self._problem.floor_bytes, self._problem.fixed_bytes):
            raise LookupError(f"no schedule within {self._problem.budget_bytes} bytes was found")
        runs = tuple(frozenset(k for k, run in period.items() if run.varValue > 0.5) for period in self._runs)
        peak, added = price(self._problem, runs)
        assert peak <= self._problem.budget_bytes * (1 + 1e-6)  # The solver's own tolerance.
        if isinstance(self._room, pulp.LpVariable):
            bound = self._problem.fixed_bytes + answer.bound / self._per_byte
        else:
            bound = answer.bound / self._per_ns
        return Optimum(runs=runs, peak_bytes=peak, added_ns=added, bound=bound, proven=answer.proven)


EXACT = ("dp", "ilp", "dp_nested")
MOST_NODES = 20
GAP_TITLE = (
    "What plans of segments add beyond the unrestricted optimum at the same budget, in points (per cent of the step's "
    "time); segments are any interval of nodes, or only those that the planner offers"
)
LEAST_TITLE = "Smallest peak reachable, as a share of the unplanned one; segments are any interval of nodes"
WORDS = """Where the gaps come from. A segment keeps all inputs of its interval until its own backward, and replays the
interval at once, so that all it saves is alive together. The optimum frees every tensor at its last reader and spreads
what it computes over the gaps between backwards; near the smallest budgets it computes some nodes more than once. In
the transformer block a segment around the scores holds the joint projection as an input, though backward needs only the
copies taken from it, and these are held too. `dp` and `dp_nested` choose among a few save sets, `ilp` operator by
operator: that alone is their gap where the one of `ilp` is 0. The planner offers fewer segments than there are
intervals: they begin and end at module calls, so what a container computes itself (attention's products, a U-Net's
pooling and `cat`) can only be inside.

Both sides count the same bytes at the same moments. The column "accounts apart" prices each plan as a schedule that
frees at the last reader, and gives by how much its peak is lower than the simulator's: the largest of the six plans.
Not counted: the host's time for a region, what merging operators into nodes hides, and schedules that drop gradients,
change the order of nodes, or compute a node twice between two backwards. Of the three budgets the smallest is the least
for `dp` with the segments offered; the others lie a third and two thirds of the way from there to the unplanned peak.
Operator times are those of one profile: another, on a busy machine, moved single gaps by up to 3 points."""


def main() -> None:
    # Here, so that tests can import this file without having its folder on their path.
    import torch
    from remat.profiler import profile
    from small_graphs import GRAPHS, at_module_calls, mean_square, node_problem
    from tables import Table, publish

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the tables")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for each programme")
    given = parser.parse_args()
    gaps: list[dict] = []
    least: list[dict] = []
    for name, build in GRAPHS.items():
        torch.manual_seed(0)
        model, batch = build()
        recorded = profile(model, batch, loss=mean_square, repeats=5)
        free = node_problem(recorded, MOST_NODES)
        offered = at_module_calls(free, recorded, MOST_NODES)
        unplanned = simulate(free, (), trace=False).peak_bytes
        lowest = least_peak("dp", offered)
        for third in range(3):
            budget = lowest + third * (unplanned - lowest) // 3
            row = gap_row(replace(free, budget_bytes=budget), replace(offered, budget_bytes=budget), given.time_limit)
            gaps.append({"model": name, "nodes": len(free.stages), "budget, % of peak": 100 * budget / unplanned} | row)
            print(gaps[-1], flush=True)
        least.append({"model": name, "unplanned MiB": unplanned / 2**20} | least_row(free, unplanned, given.time_limit))
    tables = [
        Table(name="checkmate", title=GAP_TITLE, rows=gaps, notes=[WORDS]),
        Table(name="checkmate_least", title=LEAST_TITLE, rows=least),
    ]
    publish("checkmate", tables, given.out)


def gap_row(free: Problem, offered: Problem, time_limit_s: float) -> dict[str, object]:
    """Solve one budget in every plan space and without restriction."""
    percent = 100 / free.step_ns
    started = time.perf_counter()
    best = Programme(free).solve(time_limit_s=time_limit_s)
    seconds = time.perf_counter() - started
    row: dict[str, object] = {"optimum, %": percent * best.added_ns}
    if not best.proven:
        row["its proven bound, %"] = percent * best.bound
    apart = 0.0
    for problem, label in ((free, "any interval"), (offered, "offered")):
        for solver in EXACT:
            plan = SOLVERS[solver](problem)
            peak, added = price(problem, runs_of(problem, plan.segments))
            assert added == plan.added_ns
            assert peak <= plan.peak_bytes <= problem.budget_bytes
            assert best.bound <= plan.added_ns * (1 + 1e-6) + 1
            assert best.added_ns <= plan.added_ns or not best.proven
            row[f"{solver}, {label}"] = percent * (plan.added_ns - best.added_ns)
            apart = max(apart, 100 * (plan.peak_bytes - peak) / plan.peak_bytes)
    times = Counter(k for run in best.runs for k in run)
    row["nodes computed again"] = len(times)
    row["more than once"] = sum(count > 1 for count in times.values())
    row["in forward"] = sum(map(len, best.runs[: len(free.stages)]))
    row["accounts apart, %"] = apart
    return row | {"proven": best.proven, "solved in s": seconds}


def least_row(problem: Problem, unplanned: int, time_limit_s: float) -> dict[str, object]:
    """Find the smallest peak of each plan space and without restriction."""
    reached = {solver: least_peak(solver, problem) for solver in ("dp", "dp_nested")}
    within = replace(problem, budget_bytes=min(reached.values()))
    best = Programme(within, least_peak=True).solve(time_limit_s=time_limit_s)
    row: dict[str, object] = {solver: peak / unplanned for solver, peak in reached.items()}
    row |= {"unrestricted": best.peak_bytes / unplanned, "its proven bound": best.bound / unplanned}
    return row | {"its added time, % of the step": 100 * best.added_ns / problem.step_ns, "proven": best.proven}


def least_peak(solver: str, problem: Problem) -> int:
    """Return the smallest peak that a solver's plans reach, in bytes."""
    try:
        return SOLVERS[solver](replace(problem, budget_bytes=0)).peak_bytes
    except BudgetTooSmallError as error:
        return error.least_peak_bytes


if __name__ == "__main__":
    main()
