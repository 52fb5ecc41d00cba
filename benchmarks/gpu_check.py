"""Compare predictions with a CUDA device: peaks with max_memory_allocated, results bit for bit, times with the clock.

    make gpu-check
    python benchmarks/gpu_check.py --device cpu --small

A GPT-2 of 24 layers of width 1024 in bfloat16, sequence 1024, batch 8, is profiled, planned at 80, 60 and 40 % of its
peak, and verified; under five minutes on one GPU. Exits with 1 when a check fails, with 0 when all pass, and with 0
and one line where there is no CUDA device. `--device cpu --small` walks the same way on a CPU with a toy model.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from remat.planner import InfeasibleBudgetError, Planner, Verification, apply, verify
from remat.profiler.step import Step
from remat.profiler.timing import train_once
from tables import Table, measured_on, mib, publish
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

SHARES = (80, 60, 40)
CLOSE_PER_CENT = 1.0
"""How far a measured peak may be from the predicted one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="two layers of 64 instead of 24 of 1024")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: skipped, torch finds no CUDA device here; nothing was checked")
        return 0
    device = torch.device(given.device)
    rows, failures = check(device, small=given.small, solver=given.solver, time_limit_s=given.time_limit)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    model = "GPT-2 2 x 64" if given.small else "GPT-2 24 x 1024, sequence 1024, batch 8"
    verdict = "all checks passed" if not failures else f"{len(failures)} checks failed"
    title = f"{model}, bfloat16, on {where}: {verdict}"
    table = Table(name=f"gpu_check_{device.type}", title=title, rows=rows, notes=[f"- {item}" for item in failures])
    publish("gpu_check", [table], given.out, name=table.name)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def check(device: torch.device, *, small: bool, solver: str, time_limit_s: float) -> tuple[list[dict], list[str]]:
    """Profile, plan, verify; return the table's rows and what failed."""
    print(measured_on(), flush=True)
    model, batch = gpt2(device, small=small)
    started = time.perf_counter()
    planner = Planner.of(model, batch, progress=say)
    profiling = time.perf_counter() - started
    profile = planner.profile
    step_ns, kernel_ns = profile.step_ns, kernel_time_ns(lambda: train_once(planner.session.step), device)
    rows: list[dict] = [
        {
            "budget": "none",
            "predicted MiB": mib(profile.peak_bytes()),
            "step ms": step_ns / 1e6,
            "kernels ms": None if kernel_ns is None else kernel_ns / 1e6,
            "profiling s": profiling,
        }
    ]
    failures: list[str] = []
    for share in SHARES:
        started = time.perf_counter()
        try:
            plan = planner.plan(f"{share}%", solver=solver, time_limit_s=time_limit_s, progress=say)
            label = f"{share} %"
        except InfeasibleBudgetError as error:
            plan, label = error.plan, f"least (no {share} %)"
        planning = time.perf_counter() - started
        found = verify(model, batch, plan, repeats=3, progress=say)
        print(found, flush=True)
        with apply(model, plan):
            step = Step.of(model, batch)
            planned_kernel_ns = kernel_time_ns(lambda step=step: train_once(step), device)
        rows.append(row_of(label, found) | {"planning s": planning})
        if kernel_ns and planned_kernel_ns:
            rows[-1]["kernels ms"] = planned_kernel_ns / 1e6
            rows[-1]["added kernel time, %"] = 100 * (planned_kernel_ns / kernel_ns - 1)
        failures += failures_of(label, found)
    first = found.unplanned_measured_peak_bytes
    if first is not None:
        off = 100 * (first / profile.peak_bytes() - 1)
        rows[0] |= {"measured MiB": mib(first), "measured/predicted - 1, %": off}
        if abs(off) > CLOSE_PER_CENT:
            failures.append(f"unplanned: measured peak is {off:+.2f} % off the predicted one")
    return rows, failures


def row_of(label: str, found: Verification) -> dict:
    """Return one plan's promises and what came of them."""
    measured, predicted = found.measured_peak_bytes, found.predicted_peak_bytes
    return {
        "budget": label,
        "predicted MiB": mib(predicted),
        "measured MiB": mib(measured),
        "measured/predicted - 1, %": 100 * (measured / predicted - 1),
        "within budget": measured <= found.budget_bytes,
        "bitwise equal": found.exact,
        "model repeats itself": found.repeatable,
        "largest gradient difference": found.gradients.largest,
        "added time predicted, %": 100 * found.predicted_overhead,
        "added time measured, %": None if found.measured_overhead is None else 100 * found.measured_overhead,
        "step ms": None if found.planned_step_ns is None else found.planned_step_ns / 1e6,
    }


def failures_of(label: str, found: Verification) -> list[str]:
    """Return what one plan does not keep; differences prove nothing where the model does not repeat itself."""
    off = 100 * (found.measured_peak_bytes / found.predicted_peak_bytes - 1)
    failures: list[str] = []
    if abs(off) > CLOSE_PER_CENT:
        failures.append(f"{label}: measured peak is {off:+.2f} % off the predicted one")
    if found.measured_peak_bytes > found.budget_bytes:
        failures.append(f"{label}: measured {found.measured_peak_bytes} bytes, budget {found.budget_bytes}")
    if found.repeatable and not found.exact:
        failures.append(
            f"{label}: not bitwise equal: loss {found.loss}; gradients {found.gradients}; buffers {found.buffers}"
        )
    return failures


def kernel_time_ns(step: Callable[[], None], device: torch.device) -> int | None:
    """Return the time of all kernels of one step, by torch.profiler; None on a CPU."""
    if device.type != "cuda":
        step()
        return None
    step()
    torch.cuda.synchronize(device)
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    return int(1000 * sum(event.self_device_time_total for event in profiler.key_averages()))


def gpt2(device: torch.device, *, small: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a GPT-2 in bfloat16 with dropout on, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    layers, width, heads, length, size, vocabulary = (2, 64, 2, 64, 4, 256) if small else (24, 1024, 16, 1024, 8, 50304)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).to(device=device, dtype=torch.bfloat16).train()
    ids = torch.randint(0, vocabulary, (size, length), device=device)
    return model, {"input_ids": ids, "labels": ids}


def say(phase: str) -> None:
    """Print a phase."""
    print(f"  {phase}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
