"""Other ways to spend less memory, and plans at the very peaks that they reach.

    python benchmarks/peers.py --rockmate
    python benchmarks/peers.py --models M3    # goes on where it was stopped

Small batches, dropout off so that all gradients can be compared. The output is held or dropped as the model's loop
does: `model(**batch).loss` drops it, `out = model(x)` with a loss of its own holds it (`--output` says otherwise).
Every way is measured in the same process: the allocator's peak of the whole step, step time in turn with the unplanned
step, the largest difference of any gradient from the unplanned one's. Rows where this library loses stay, and
rows of what could not be run say why.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from statistics import median

import torch
from auto_sac import AutoSac, NoAnswerError, applied
from hand_written import each_checkpointed, largest_difference, ratio, timed_in_turn
from models import HOLDS_OUTPUT, NAMES, build
from remat.planner import InfeasibleBudgetError, Planner, apply
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.step import Step
from rockmate_trial import rockmate_rows
from tables import KeptRows, Table, kept_rows, mib, options, publish, scale_note
from torch.utils.checkpoint import checkpoint_sequential

CPU = torch.device("cpu")
BLOCKS = {
    "M1s": [r"transformer\.h\.\d+"],
    "M1e": [r"transformer\.h\.\d+"],
    "M2": [r"model\.layers\.\d+"],
    "M3": [r"resnet\.encoder\.stages\.\d+\.layers\.\d+"],
    "M5": [r"down\.\d+", r"mid", r"up\.\d+"],
}
"""What a user would wrap by hand, by path."""
SLACK = 1.001
"""Plans may take this much of another way's peak: promises count every region's random state as alive throughout."""


def main() -> None:
    parser = options(__doc__, ("M1s", "M1e", "M2", "M3", "M4", "M5"), "peers")
    parser.set_defaults(scale=0.25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", choices=("loop", "held", "dropped"), default="loop", help="how long it lives")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solve")
    parser.add_argument("--compile-limit", type=float, default=60.0, help="seconds for torch.compile; 0 leaves it out")
    parser.add_argument("--rockmate", action="store_true", help="try it in an environment of its own")
    given = parser.parse_args()
    kept = kept_rows(given, "peers")
    for name in given.models:
        Bench(name, given, kept).measure_all()
    rows = kept.all(NAMES)
    if given.rockmate:
        rows += rockmate_rows(given.models, given.scale)
    title = "Ways to spend less memory: peaks of the whole step as the allocator saw them, step time over the unplanned"
    publish(given.script, [Table(name="peers", title=title, rows=rows, notes=scale_note(given.scale))], given.out)


class Bench:
    """Measure one model in every way."""

    def __init__(self, name: str, given, kept: KeptRows) -> None:
        self.name, self.given, self.kept = name, given, kept
        self.model, self.batch, self.loss = build(name, dropout=0.0, scale=given.scale)
        holds = name in HOLDS_OUTPUT if given.output == "loop" else given.output == "held"
        self.step = Step.of(self.model, self.batch, self.loss, holds_output=holds)
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.step.tensors()]
        self.entry = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        self.plain: dict[str, torch.Tensor] = {}
        self.compiling_s = 0.0

    def measure_all(self) -> None:
        """Measure every way, and a plan at the peak of each that checkpoints."""
        blocks = self.blocks()
        ways: dict[str, Callable] = {
            "every block by hand": lambda: each_checkpointed(blocks),
            "every 2nd block by hand": lambda: each_checkpointed(blocks[::2]),
        }
        if isinstance(self.model, torch.nn.Sequential):
            for pieces in (4, 8):
                ways[f"checkpoint_sequential, {pieces} segments"] = lambda pieces=pieces: self.in_pieces(pieces)
        elif hasattr(self.model, "gradient_checkpointing_enable") and self.model.supports_gradient_checkpointing:
            ways["gradient_checkpointing_enable"] = self.enabled
        self.row("nothing", lambda: self.measure("nothing", nullcontext))
        peaks: dict[str, float] = {}
        for way, arm in ways.items():
            row = self.row(way, lambda way=way, arm=arm: self.measure(way, arm))
            peaks[way] = row["peak MiB"]
            self.row(f"plan at the peak of: {way}", lambda way=way, row=row: self.planned(way, row["peak MiB"]))
        for way in ("every block by hand", "every 2nd block by hand"):
            named = f"torch's Auto-SAC, given the peak of {way}"
            row = self.row(named, lambda named=named, way=way: self.automatic(named, peaks[way]))
            if row.get("peak MiB") is not None:
                self.row(
                    f"plan at the peak of: {named}", lambda named=named, row=row: self.planned(named, row["peak MiB"])
                )
        if self.given.compile_limit:
            for budget in (1.0, 0.5, 0.2):
                way = f"torch.compile (aot_eager_decomp_partition), activation_memory_budget {budget:g}"
                self.row(way, lambda way=way, budget=budget: self.compiled(way, budget))

    def row(self, way: str, measure: Callable[[], dict]) -> dict:
        """Return the row of a way of this model, as kept or measured now."""
        output = "held" if self.step.holds_output else "dropped"
        return self.kept.row(
            f"{self.name} {output} {way}", lambda: {"model": self.name, "output": output, "way": way} | measure()
        )

    @cached_property
    def planner(self) -> Planner:
        """Return the planner of the step."""
        return Planner.of(self.model, self.batch, loss=self.loss, repeats=2, holds_output=self.step.holds_output)

    def planned(self, way: str, peak_mib: float) -> dict:
        """Return the row of a plan at another way's peak."""
        started = time.perf_counter()
        planner = self.planner
        profiled, remark = time.perf_counter(), ""
        budget = round(SLACK * peak_mib * 2**20)
        try:
            plan = planner.plan(budget, solver=self.given.solver, time_limit_s=self.given.time_limit)
        except InfeasibleBudgetError as error:
            plan, remark = error.plan, "no plan fits; this is the one of the least peak"
        planning = time.perf_counter() - profiled
        found = self.measure(f"plan at the peak of: {way}", lambda: apply(self.model, plan))
        found["predicted over unplanned"] = 1 + plan.predicted_overhead
        return found | {
            "profiling s": profiled - started,
            "planning s": planning,
            "solver": plan.solver,
            "remark": remark,
        }

    def blocks(self) -> list[torch.nn.Module]:
        """Return what a user would wrap by hand."""
        if isinstance(self.model, torch.nn.Sequential):
            return list(self.model)
        found: list[torch.nn.Module] = []
        for pattern in BLOCKS[self.name]:
            found += [module for name, module in self.model.named_modules() if re.fullmatch(pattern, name)]
        return found

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

    @cached_property
    def auto_sac(self) -> tuple[AutoSac, float]:
        """Return torch's estimate of the step, and the seconds that it took."""
        started = time.perf_counter()
        estimate = AutoSac(lambda: build(self.name, dropout=0.0, scale=self.given.scale))
        return estimate, time.perf_counter() - started

    def automatic(self, way: str, budget_mib: float) -> dict:
        """Return the row of torch's Auto-SAC for a budget: what was measured, or why nothing was."""
        try:
            estimate, estimating = self.auto_sac
        except NoAnswerError as error:
            return {"remark": f"not run: {error}"}
        started = time.perf_counter()
        try:
            decisions = estimate.decide(SLACK * budget_mib * 2**20)
            deciding = time.perf_counter() - started
            row = self.measure(way, lambda: applied(self.model, decisions))
            row |= {"planning s": deciding, "solver": "sac_milp", "remark": "timed by a CPU clock in place of CUDA's"}
            if row["peak MiB"] > SLACK * budget_mib:
                row["remark"] += f"; {row['peak MiB'] / budget_mib - 1:.1%} over its budget"
        except NoAnswerError as error:
            row = {"remark": f"not run: {error}"}
        return row | {"profiling s": estimating}

    def measure(self, way: str, arm: Callable) -> dict:
        """Return peak, step time over the unplanned, and the largest gradient difference."""
        with arm():
            gradients = self.gradients()
            peak = self.entry + allocated_peak_bytes(self.step.train, CPU)
            self.model.zero_grad(set_to_none=True)
        self.plain = self.plain or (gradients if way == "nothing" else self.gradients())
        row: dict = {"peak MiB": mib(peak)}
        if way != "nothing":
            times = timed_in_turn(self.train, {"plain": nullcontext, "way": arm}, self.given.rounds, warm=True)
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

    def compiled(self, way: str, budget: float) -> dict:
        """Return the row of torch.compile with a budget for what it keeps, as far as that runs here in time."""
        import torch._functorch.config as functorch

        if self.compiling_s > self.given.compile_limit:
            return {"remark": "not run: over the time for torch.compile"}
        started = time.perf_counter()
        try:
            torch._dynamo.reset()
            functorch.activation_memory_budget = budget
            self.model.compile(backend="aot_eager_decomp_partition")
            self.train()
            compiling = time.perf_counter() - started
            gradients = self.gradients()
            peak = self.entry + allocated_peak_bytes(self.step.train, CPU)
            self.model.zero_grad(set_to_none=True)
            taken = [self.timed() for _ in range(self.given.rounds)]
            self.model._compiled_call_impl = None
            plain = [self.timed() for _ in range(self.given.rounds)]
            self.plain = self.plain or self.gradients()
            walls, cpus = ([[pair[k] for pair in times] for times in (taken, plain)] for k in (0, 1))
            return {
                "peak MiB": mib(peak),
                "planning s": compiling,
                "step time over unplanned": median(walls[0]) / median(walls[1]),
                "CPU time over unplanned": median(cpus[0]) / median(cpus[1]),
                "largest gradient difference": largest_difference(gradients, self.plain),
                "remark": "planning s is compiling and one step",
            }
        except Exception as error:
            return {"remark": f"failed: {str(error).splitlines()[0][:120]}"}
        finally:
            self.model._compiled_call_impl = None
            functorch.activation_memory_budget = 1.0
            self.compiling_s += time.perf_counter() - started

    def timed(self) -> tuple[float, float]:
        """Return the seconds of one step, by the clock and of CPU time."""
        started = time.perf_counter(), time.process_time()
        self.train()
        return time.perf_counter() - started[0], time.process_time() - started[1]


if __name__ == "__main__":
    main()
