"""Other ways to spend less memory, and plans at the very peaks that they reach.

    python benchmarks/peers.py --rockmate

GPT-2 (M1s, a small batch) and the chain of unequal layers (M4), dropout off so that all gradients can be compared.
Every way is measured in the same process: the allocator's peak of the whole step, step time in turn with the
unplanned step, the largest difference of any gradient from the unplanned one's. Rows where this library loses stay, and
rows of what could not be run say why.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch
from auto_sac import AutoSac, NoAnswerError, applied
from hand_written import each_checkpointed, largest_difference, ratio, timed_in_turn
from models import build
from remat.planner import InfeasibleBudgetError, Planner, apply
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.step import Step
from rockmate_trial import rockmate_rows
from tables import Table, mib, options, publish, scale_note
from torch.utils.checkpoint import checkpoint_sequential

CPU = torch.device("cpu")
SLACK = 1.001
"""Plans may take this much of another way's peak: promises count every region's random state as alive throughout."""


def main() -> None:
    parser = options(__doc__, ("M1s", "M4"), "peers")
    parser.set_defaults(scale=0.25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solve")
    parser.add_argument("--compile-limit", type=float, default=60.0, help="seconds for torch.compile; 0 leaves it out")
    parser.add_argument("--rockmate", action="store_true", help="try it in an environment of its own")
    given = parser.parse_args()
    rows: list[dict] = []
    for name in given.models:
        rows += Bench(name, given).rows()
    if given.rockmate:
        rows += rockmate_rows(given.models, given.scale)
    title = "Ways to spend less memory: peaks of the whole step as the allocator saw them, step time over the unplanned"
    publish(given.script, [Table(name="peers", title=title, rows=rows, notes=scale_note(given.scale))], given.out)


class Bench:
    """Measure one model in every way."""

    def __init__(self, name: str, given) -> None:
        self.name, self.given = name, given
        self.model, self.batch, self.loss = build(name, dropout=0.0, scale=given.scale)
        self.step = Step.of(self.model, self.batch, self.loss)
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.step.tensors()]
        self.entry = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        self.plain: dict[str, torch.Tensor] = {}

    def rows(self) -> list[dict]:
        """Return a row for every way, and under each that checkpoints one for a plan at its peak."""
        blocks = self.blocks()
        ways: dict[str, Callable] = {
            "nothing": nullcontext,
            "every block by hand": lambda: each_checkpointed(blocks),
            "every 2nd block by hand": lambda: each_checkpointed(blocks[::2]),
        }
        if isinstance(self.model, torch.nn.Sequential):
            for pieces in (4, 8):
                ways[f"checkpoint_sequential, {pieces} segments"] = lambda pieces=pieces: self.in_pieces(pieces)
        else:
            ways["gradient_checkpointing_enable"] = self.enabled
        rows = [self.measure(way, arm) for way, arm in ways.items()]
        rows += self.automatic({row["way"]: row["peak MiB"] for row in rows if "by hand" in row["way"]})
        started = time.perf_counter()
        planner = Planner.of(self.model, self.batch, loss=self.loss, repeats=2)
        profiling = time.perf_counter() - started
        ordered = [rows[0]]
        for row in rows[1:]:
            ordered.append(row)
            if row.get("peak MiB") is None:
                continue
            started = time.perf_counter()
            way, remark = f"plan at the peak of: {row['way']}", ""
            try:
                plan = planner.plan(
                    round(SLACK * row["peak MiB"] * 2**20), solver=self.given.solver, time_limit_s=self.given.time_limit
                )
            except InfeasibleBudgetError as error:
                plan, remark = error.plan, "no plan fits; this is the one of the least peak"
            planning = time.perf_counter() - started
            found = self.measure(way, lambda plan=plan: apply(self.model, plan))
            found |= {"profiling s": profiling, "planning s": planning, "solver": plan.solver, "remark": remark}
            ordered.append(found)
            print(row, found, sep="\n", flush=True)
        if self.given.compile_limit:
            ordered += self.compiled()
        return ordered

    def blocks(self) -> list[torch.nn.Module]:
        """Return what a user would wrap by hand."""
        return list(self.model) if isinstance(self.model, torch.nn.Sequential) else list(self.model.transformer.h)

    @contextmanager
    def in_pieces(self, pieces: int) -> Iterator[None]:
        """Run the chain by torch's own helper."""
        members = list(self.model)
        # The input needs no gradient here, and checkpoints without reentry do not ask for one.
        self.model.forward = lambda value: checkpoint_sequential(members, pieces, value, use_reentrant=False)
        try:
            yield
        finally:
            del self.model.forward

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Switch on transformers' own checkpoints."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            self.model.gradient_checkpointing_disable()

    def automatic(self, budgets: dict[str, float]) -> list[dict]:
        """Return a row of torch's Auto-SAC for each budget in MiB: what was measured, or why nothing was."""
        started, rows = time.perf_counter(), []
        estimate = AutoSac(lambda: build(self.name, dropout=0.0, scale=self.given.scale))
        estimating = time.perf_counter() - started
        for named, budget in budgets.items():
            row: dict = {"model": self.name, "way": f"torch's Auto-SAC, given the peak of {named}"}
            started = time.perf_counter()
            try:
                decisions = estimate.decide(SLACK * budget * 2**20)
                deciding = time.perf_counter() - started
                row |= self.measure(row["way"], lambda decisions=decisions: applied(self.model, decisions))
                row |= {
                    "planning s": deciding,
                    "solver": "sac_milp",
                    "remark": "timed by a CPU clock in place of CUDA's",
                }
                if row["peak MiB"] > SLACK * budget:
                    row["remark"] += f"; {row['peak MiB'] / budget - 1:.1%} over its budget"
            except NoAnswerError as error:
                row["remark"] = f"not run: {error}"
            rows.append(row | {"profiling s": estimating})
        return rows

    def measure(self, way: str, arm: Callable) -> dict:
        """Return peak, step time over the unplanned, and the largest gradient difference."""
        with arm():
            gradients = self.gradients()
            peak = self.entry + allocated_peak_bytes(self.step.train, CPU)
            self.model.zero_grad(set_to_none=True)
        self.plain = self.plain or gradients
        row = {"model": self.name, "way": way, "peak MiB": mib(peak)}
        if way != "nothing":
            times = timed_in_turn(self.train, {"plain": nullcontext, "way": arm}, self.given.rounds)
            row["step time over unplanned"] = ratio({arm: taken.wall for arm, taken in times.items()}, "way", "plain")
            row["CPU time over unplanned"] = ratio({arm: taken.cpu for arm, taken in times.items()}, "way", "plain")
        row["largest gradient difference"] = largest_difference(gradients, self.plain)
        return row

    def train(self) -> None:
        """Run one step and drop its gradients."""
        self.step.train()
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return every gradient of one step."""
        self.model.zero_grad(set_to_none=True)
        self.step.train()
        found = {name: value.grad.clone() for name, value in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return found

    def compiled(self) -> list[dict]:
        """Measure torch.compile with a budget for what it keeps, as far as that runs here in time."""
        import torch._functorch.config as functorch

        rows: list[dict] = []
        spent = time.perf_counter()
        for budget in (1.0, 0.5, 0.2):
            way = f"torch.compile (aot_eager_decomp_partition), activation_memory_budget {budget:g}"
            if time.perf_counter() - spent > self.given.compile_limit:
                rows.append({"model": self.name, "way": way, "remark": "not run: over the time for torch.compile"})
                continue
            try:
                torch._dynamo.reset()
                functorch.activation_memory_budget = budget
                started = time.perf_counter()
                self.model.compile(backend="aot_eager_decomp_partition")
                self.train()
                compiling = time.perf_counter() - started
                gradients = self.gradients()
                peak = self.entry + allocated_peak_bytes(self.step.train, CPU)
                self.model.zero_grad(set_to_none=True)
                taken = [self.timed() for _ in range(self.given.rounds)]
                self.model._compiled_call_impl = None
                plain = [self.timed() for _ in range(self.given.rounds)]
                walls, cpus = ([[pair[k] for pair in way] for way in (taken, plain)] for k in (0, 1))
                row = {"model": self.name, "way": way, "peak MiB": mib(peak), "planning s": compiling}
                row["step time over unplanned"] = median(walls[0]) / median(walls[1])
                row["CPU time over unplanned"] = median(cpus[0]) / median(cpus[1])
                row["largest gradient difference"] = largest_difference(gradients, self.plain)
                row["remark"] = "planning s is compiling and one step"
            except Exception as error:
                row = {"model": self.name, "way": way, "remark": f"failed: {str(error).splitlines()[0][:120]}"}
            finally:
                self.model._compiled_call_impl = None
                functorch.activation_memory_budget = 1.0
            rows.append(row)
            print(row, flush=True)
        return rows

    def timed(self) -> tuple[float, float]:
        """Return the seconds of one step, by the clock and of CPU time."""
        started = time.perf_counter(), time.process_time()
        self.train()
        return time.perf_counter() - started[0], time.process_time() - started[1]


if __name__ == "__main__":
    main()
