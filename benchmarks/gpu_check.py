"""Compare what is promised for a CUDA card with the card, one item after the other, each a row of JSON when it is done.

    make gpu-check
    python benchmarks/gpu_check.py --device cpu --small

What would spoil the rest comes first: versions, kernels' times against torch's own total, a cold and a warm step, the
optimizer's peak, attention's names, what ten plain steps repeat. Then plans of a GPT-2 and a ResNet-50 in bfloat16, a
stack that is bound by launches, and a step above 60 % of the card. Items that would begin after `--seconds` are left
out and named. It needs torch, numpy, pandas, pulp, pydantic and this package, of the versions that the machine has; the
models are written out here. `--device cpu --small` walks the same way on a CPU.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from remat.planner import InfeasibleBudgetError, Planner, apply, verify
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.devices import device_of, is_out_of_memory
from remat.profiler.internals import kineto_events
from remat.profiler.kernels import device_ns, marked_durations
from remat.profiler.optimizer import optimizer_cost
from remat.profiler.repeatability import Repeatability
from remat.profiler.results import run_steps
from remat.profiler.step import Step
from remat.profiler.timing import timed_ns, train_once
from torch import nn
from torch.profiler import profile as torch_profile
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

MARK = "gpu_check"
TESTED = "2.13"


class Block(nn.Module):
    """A transformer block as GPT-2's, attention by torch."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        q, k, v = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + nn.functional.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mix(self.between(x))


class Language(nn.Module):
    """A GPT-2: embeddings, blocks, and the loss over the vocabulary."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run it."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())}


class Bottleneck(nn.Module):
    """A ResNet-50 block."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        same = stride == 1 and inside == 4 * width
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return torch.relu(self.body(x) + self.skip(x))


def resnet(depths: tuple[int, ...], width: int) -> nn.Module:
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    inside = width
    for level, depth in enumerate(depths):
        for number in range(depth):
            blocks.append(Bottleneck(inside, width << level, 2 if level and not number else 1))
            inside = 4 * (width << level)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Check:
    """Run the items and write their rows."""

    def __init__(self, device: torch.device, *, small: bool, solver: str, seconds: float, out: Path) -> None:
        self.device, self.place, self.small, self.solver = device, device_of(device), small, solver
        self.seconds, self.out, self.started = seconds, out, time.perf_counter()
        self.failures: list[str] = []
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")

    def run(self) -> None:
        """Run every item for which there is time; what goes wrong in one stops no other."""
        items: list[tuple[str, Callable[[], dict]]] = [
            ("versions", self._versions),
            ("kernels", self._kernels),
            ("cold and warm", self._cold_and_warm),
            ("optimizer", self._optimizer),
            ("attention", self._attention),
            ("repeats", self._repeats),
            ("GPT-2", lambda: self._plans(*self._language())),
            ("ResNet-50", lambda: self._plans(*self._pictures())),
            ("launch-bound", lambda: self._plans(*self._launches())),
            ("a large part of the card", self._large),
        ]
        for name, item in items:
            begun = time.perf_counter()
            if begun - self.started > self.seconds:
                self.write({"item": name, "left out": f"more than {self.seconds:.0f} s had passed"})
                continue
            try:
                row = item()
            except Exception as error:
                row = {"error": "".join(traceback.format_exception_only(error)).strip()[:500]}
                self.failures.append(f"{name}: {row['error']}")
            self.place.release_cached()
            self.write({"item": name, "seconds": round(time.perf_counter() - begun, 2), **row})

    def write(self, row: dict) -> None:
        """Print a row and add it to the file."""
        line = json.dumps(row, default=str)
        print(line, flush=True)
        with self.out.open("a") as file:
            file.write(line + "\n")

    def _versions(self) -> dict:
        found: dict[str, object] = {"device": self.place.name, "python": sys.version.split()[0]}
        for package in ("remat", "torch", "numpy", "pulp", "highspy"):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                found[package] = None
        found["torch as tested"] = torch.__version__.startswith(TESTED)
        if self.device.type == "cuda":
            found |= {"cuda": torch.version.cuda, "capability": torch.cuda.get_device_capability(self.device)}
            found |= {"memory": torch.cuda.mem_get_info(self.device), "context": self.place.context_bytes()}
        return found

    def _language(self) -> tuple[nn.Module, torch.Tensor]:
        sizes = (2, 64, 2, 64, 256) if self.small else (24, 1024, 16, 1024, 50304)
        torch.manual_seed(0)
        model = Language(*sizes).to(device=self.device, dtype=torch.bfloat16).train()
        return model, torch.randint(0, sizes[-1], (4 if self.small else 8, sizes[3]), device=self.device)

    def _pictures(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model = resnet((1, 1), 8) if self.small else resnet((3, 4, 6, 3), 64)
        shape = (4, 3, 32, 32) if self.small else (64, 3, 224, 224)
        return model.to(self.device, torch.bfloat16).train(), torch.randn(shape, device=self.device).bfloat16()

    def _launches(self) -> tuple[nn.Module, torch.Tensor]:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8 if self.small else 200)]
        return nn.Sequential(*layers).to(self.device), torch.randn(64, 64, device=self.device)

    def _kernels(self) -> dict:
        model, batch = self._language()
        step = Step.of(model, batch)
        train_once(step)
        with torch_profile(activities=self.place.activities) as profiler, _Marked():
            train_once(step)
            self.place.synchronize()
        events = kineto_events(profiler)
        ours = sum(marked_durations(events, MARK, on_device=self.place.runs_behind))
        whole = device_ns(events)
        torchs = 1000 * sum(event.self_device_time_total for event in profiler.key_averages())
        if whole and not 0.97 < ours / whole < 1.001:
            self.failures.append(f"kernels: {ours} ns went to operators, of {whole}")
        return {"to operators ns": ours, "all kernels ns": whole, "torch's table ns (annotations too)": torchs}

    def _cold_and_warm(self) -> dict:
        model, batch = self._pictures()
        step = Step.of(model, batch)
        times = []
        kept = self.place.warm_up(lambda: times.append(timed_ns(lambda: train_once(step), self.device)))
        times += [timed_ns(lambda: train_once(step), self.device) for _ in range(3)]
        return {"step ns": times, "kept by libraries": kept}

    def _optimizer(self) -> dict:
        model, batch = self._language()
        row = {}
        for name, options in {"default": {}, "a loop": {"foreach": False}, "fused": {"fused": True}}.items():
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            predicted = optimizer_cost(Step.of(model, batch), optimizer, round_to=self.place.round_to).temporary_bytes
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            measured = allocated_peak_bytes(optimizer.step, self.device)
            model.zero_grad()
            row[name] = {"predicted": predicted, "measured": measured}
            if abs(measured - predicted) > 1 << 20:
                self.failures.append(f"optimizer, {name}: predicted {predicted}, measured {measured}")
        return row

    def _attention(self) -> dict:
        row = {}
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            model = Language(1, 64, 2, 64, 256, dropout=0.0).to(self.device, dtype).train()
            batch = torch.randint(0, 256, (2, 64), device=self.device)
            planner = Planner.of(model, batch, repeats=0)
            fake = {o.operator for o in planner.profile.operators if "attention" in o.operator}
            with _Marked() as marked:
                train_once(planner.session.step)
            real = {name for name in marked.names if "attention" in name}
            row[str(dtype)] = {"fake": sorted(fake), "real": sorted(real)}
            if fake != real:
                self.failures.append(f"attention in {dtype}: recorded {sorted(fake)}, ran {sorted(real)}")
        return row

    def _repeats(self) -> dict:
        row = {}
        for name, (model, batch) in {"GPT-2": self._language(), "ResNet-50": self._pictures()}.items():
            step = Step.of(model, batch)
            known = Repeatability(run_steps(step, _nothing), lambda step=step: run_steps(step, _nothing), 9)
            row[name] = known.words() or "everything repeats"
        return row

    def _plans(self, model: nn.Module, batch: torch.Tensor, shares: tuple[int, ...] = (80, 60)) -> dict:
        planner = Planner.of(model, batch)
        profile, rows = planner.profile, {}
        rows["none"] = {
            "predicted": planner.search.dry_runs.unplanned_peak_bytes(),
            "allocated, predicted": profile.peak_bytes(),
            "step ns": profile.step_ns,
            "forward ns": profile.forward_ns,
            "notes": profile.notes,
        }
        for share in shares:
            try:
                plan = planner.plan(f"{share}%", solver=self.solver, time_limit_s=10)
            except InfeasibleBudgetError as error:
                plan = error.plan
            found = verify(model, batch, plan, repeats=3)
            rows[f"{share} %"] = {
                "predicted": found.predicted_peak_bytes,
                "measured": found.measured_peak_bytes,
                "unplanned measured": found.unplanned_measured_peak_bytes,
                "within budget": found.within_budget,
                "exact": found.exact,
                "repeatable": found.repeatable,
                "gradients": str(found.gradients),
                "added, predicted": found.predicted_overhead,
                "added, measured": found.measured_overhead,
                **self._counters(model, batch, plan),
                "notes": plan.notes,
            }
            if not found.within_budget:
                self.failures.append(f"{share} %: measured {found.measured_peak_bytes} of {found.budget_bytes}")
            if found.repeatable and not found.exact:
                self.failures.append(f"{share} %: gradients {found.gradients}")
        return rows

    def _counters(self, model: nn.Module, batch: torch.Tensor, plan: object) -> dict:
        """Return the allocator's own three figures of one planned step, all that is there included."""
        if self.device.type != "cuda":
            return {}
        self.place.release_cached()
        torch.cuda.reset_peak_memory_stats(self.device)
        with apply(model, plan):
            train_once(Step.of(model, batch))
        stats = torch.cuda.memory_stats(self.device)
        kinds = ("allocated", "requested", "reserved")
        return {kind: stats.get(f"{kind}_bytes.all.peak") for kind in kinds}

    def _large(self) -> dict:
        """Plan a step that takes more than 60 % of what is free, without memory for a second of everything."""
        width, rows = (64, 256) if self.small else (8192, 16384)
        free = self.place.free_bytes() if self.device.type == "cuda" else 1 << 23
        layer = 2 * rows * width * 9
        layers = max(4, int(0.65 * free / (layer + 2 * 2 * 8 * width * width)))
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
        )
        model = model.to(self.device, torch.bfloat16)
        batch = torch.randn(rows, width, device=self.device, dtype=torch.bfloat16)
        try:
            return {"layers": layers, "free": free, **self._plans(model, batch, (60,))}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return {"layers": layers, "free": free, "error": "memory ran out outside of what plan() guards"}


class _Marked(TorchDispatchMode):
    """Mark every operator, and remember its name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        with record_function(MARK):
            return func(*args, **(kwargs or {}))


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_nothing = _Nothing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the rows; default benchmarks/results/gpu_check_DEVICE.jsonl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toy models instead of real ones")
    parser.add_argument("--solver", default="dp")
    parser.add_argument("--seconds", type=float, default=450.0, help="no item begins later than this")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: skipped, torch finds no CUDA device here; nothing was checked")
        return 0
    out = given.out or Path(f"benchmarks/results/gpu_check_{given.device}.jsonl")
    check = Check(
        torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu"),
        small=given.small,
        solver=given.solver,
        seconds=given.seconds,
        out=out,
    )
    check.run()
    check.write(
        {"item": "verdict", "failures": check.failures, "seconds": round(time.perf_counter() - check.started, 1)}
    )
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
