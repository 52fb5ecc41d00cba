"""The whole way on a small GPT-2: profile, compare, apply, verify. Run by `remat demo`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn

from ...profiler.devices import CudaDevice
from ..compare import Comparison, compare
from ..errors import PlanError
from ..finding.planner import Planner
from ..pictures.frontier import peak_against_overhead
from ..plan import Plan
from ..verify import verify
from .console import print_comparison, print_memory, print_plan, print_profile

BUDGETS, SMALL_BUDGETS = ("75%", "55%", "40%"), ("80%", "65%")
SOLVERS = ("sqrt", "dp", "ilp")
TIME_LIMIT_S, SMALL_TIME_LIMIT_S = 8.0, 1.0
"""For each solve, so that two slow cores finish in minutes."""
GAP = 0.02
"""Share of the added time that plans may be away from the optimum, for the same reason."""


def demo_model(device: str, *, small: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build a GPT-2 with random weights and a batch of random tokens; nothing is downloaded.

    Args:
        device: Where to put both.
        small: Two layers instead of twelve, and a small batch.

    Raises:
        PlanError: transformers is not installed.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError:
        raise PlanError("the demo's model needs transformers: pip install transformers, then try again") from None
    logging.set_verbosity_error()
    torch.manual_seed(0)
    layers, width, heads, length, vocabulary, batch = (2, 64, 2, 64, 256, 4) if small else (12, 384, 6, 256, 8192, 4)
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        use_cache=False,
        **options,
    )
    model = cast("nn.Module", GPT2LMHeadModel(config)).train().to(device)
    tokens = torch.randint(0, vocabulary, (batch, length), device=device)
    return model, {"input_ids": tokens, "labels": tokens}


def run_demo(
    console: Console,
    folder: Path,
    *,
    device: str | None = None,
    small: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Profile, show a first plan, compare solvers at a few budgets, verify the best plan at the second.

    Returns:
        That best plan; it is among the files that are written.

    Args:
        console: Where to print.
        folder: Gets plan.json, comparison.csv, memory_over_time.png and peak_against_overhead.png; made if missing.
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        small: Take a toy model.
        progress: Called with a few words before each phase.

    Raises:
        PlanError: transformers or the device is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if device == "cuda" and not CudaDevice.is_there():
        raise PlanError("--device cuda: torch finds no CUDA device here; use --device cpu")
    model, batch = demo_model(device or ("cuda" if CudaDevice.is_there() else "cpu"), small=small)
    budgets = SMALL_BUDGETS if small else BUDGETS
    limit_s = SMALL_TIME_LIMIT_S if small else TIME_LIMIT_S
    console.rule("1. Where the memory is")
    planner = Planner.of(model, batch, optimizer="adamw", progress=progress)
    print_profile(console, planner.profile)
    console.rule(f"2. A first plan, for {budgets[1]}")
    first = planner.plan(budgets[1], solver="dp", check=False, time_limit_s=limit_s, gap=GAP, progress=progress)
    print_plan(console, first)
    print_memory(console, {"without checkpoints": planner.timeline(), "with the plan": planner.timeline(first)})
    console.rule("3. Solvers compared")
    comparison = compare(
        model,
        batch,
        budgets=budgets,
        solvers=SOLVERS,
        planner=planner,
        time_limit_s=limit_s,
        gap=GAP,
        progress=progress,
    )
    print_comparison(console, comparison)
    plan = comparison.best(budgets[1])
    console.rule(f"4. The best plan for {budgets[1]}, applied and verified")
    print_plan(console, plan)
    console.print(str(verify(model, batch, plan, progress=progress)), markup=False)
    console.rule("5. Files")
    for name in write_files(folder, comparison, plan, title=_title(model)):
        console.print(f"wrote {folder / name}", markup=False)
    return plan


def _title(model: nn.Module) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {count / 1e6:.1f} million parameters: memory over one training step"


def write_files(folder: Path, comparison: Comparison, plan: Plan, *, title: str) -> tuple[str, ...]:
    """Write a plan, the comparison it comes from and two pictures into a folder; return their names.

    Args:
        folder: An existing folder.
        comparison: What `compare` returned.
        plan: One of its plans.
        title: Title of the picture of memory over time.
    """
    plan.save(folder / "plan.json")
    comparison.frame.to_csv(folder / "comparison.csv", index=False)
    comparison.planner.plot(plan, title=title).savefig(folder / "memory_over_time.png", dpi=150)
    peak_against_overhead(comparison).savefig(folder / "peak_against_overhead.png", dpi=150)
    return "plan.json", "comparison.csv", "memory_over_time.png", "peak_against_overhead.png"
