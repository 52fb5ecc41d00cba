"""How long profiling and planning take against training steps: the demo's model, in one process.

    python benchmarks/planning_time.py
    python benchmarks/planning_time.py --models --blocks 12 24 48 96
    python benchmarks/planning_time.py --models --in-steps gpt2 llama

The limit is six training steps and ten seconds. Wall time, so other programs on the machine count. The second
line plans GPT-2 of width 64 with more and more identical blocks, the third real models in their usual sizes; both
count CPU seconds of one thread, and the third's limit is four steps and ten seconds.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
from hand_written import timed_in_turn
from models import build
from remat.planner import InfeasibleBudgetError, Planner
from remat.profiler.step import Step
from remat.profiler.timing import train_once
from tables import Table, options, publish, scale_note
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LIMIT_STEPS, LIMIT_S = 6, 10.0
LIMIT_CPU_STEPS = 4


def main() -> None:
    parser = options(__doc__, ("M1s",), "planning_time")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--solvers", nargs="+", default=["dp", "ilp", "auto"])
    parser.add_argument("--time-limit", type=float, default=None, help="seconds for each solve")
    parser.add_argument("--blocks", type=int, nargs="*", default=[], help="plan GPT-2 of width 64 with so many blocks")
    parser.add_argument("--in-steps", nargs="*", default=[], choices=REAL, help="plan models in their usual sizes")
    given = parser.parse_args()
    if given.blocks:
        blocks = by_blocks(given.blocks, given.budget)
        publish(given.script, [blocks], given.out, name=blocks.name)
    if given.in_steps:
        steps = in_steps(given.in_steps, given.budget)
        publish(given.script, [steps], given.out, name=steps.name)
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
    if rows:
        table = Table(name="planning_time", title=title, rows=rows, notes=scale_note(given.scale))
        publish(given.script, [table], given.out, name=table.name)


def by_blocks(counts: list[int], budget: str) -> Table:
    """Plan models that differ in their number of identical blocks alone."""
    torch.set_num_threads(1)
    ids = torch.randint(0, 1000, (2, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    rows: list[dict] = []
    # The first only loads what torch loads at first use.
    for number, blocks in enumerate([counts[0], *counts]):
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, n_layer=blocks, vocab_size=1000, use_cache=False))
        phases, started = Phases(time.process_time), time.process_time()
        planner = Planner.of(model, batch, progress=phases.say)
        profiled = time.process_time()
        planner.plan(budget, solver="dp", progress=phases.say)
        if number:
            taken = time.process_time()
            rows.append(
                {
                    "blocks": blocks,
                    "profiling, CPU s": profiled - started,
                    "planning, CPU s": taken - profiled,
                    "together, CPU s": taken - started,
                }
            )
            print(rows[-1], phases.done(), flush=True)
    return Table(
        name="planning_time_by_blocks",
        title=f"Profiling and planning one budget ({budget} of the peak) against the number of identical blocks",
        rows=rows,
    )


def gpt2() -> tuple[str, nn.Module, torch.Tensor]:
    """Return a small GPT-2 with the vocabulary it has."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=12, n_head=6, use_cache=False))
    return "GPT-2, 12 x 384, sequence 256, batch 4", model, torch.randint(0, 50000, (4, 256))


def llama() -> tuple[str, nn.Module, torch.Tensor]:
    """Return a Llama of 374 million parameters."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
        use_cache=False,
    )
    return "Llama, 24 x 1024, sequence 2048, batch 1", LlamaForCausalLM(config), torch.randint(0, 32000, (1, 2048))


REAL = {"gpt2": gpt2, "llama": llama}


def in_steps(names: list[str], budget: str) -> Table:
    """Plan real models and count what that takes in their own training steps."""
    torch.set_num_threads(1)
    rows: list[dict] = []
    for name in names:
        torch.manual_seed(0)
        said, model, ids = REAL[name]()
        batch = {"input_ids": ids, "labels": ids}
        step = Step.of(model, batch)
        step_s = min(timed_in_turn(partial(train_once, step), {"plain": nullcontext}, 2)["plain"].cpu)
        phases, started = Phases(time.process_time), time.process_time()
        planner = Planner.of(model, batch, progress=phases.say)
        profiled = time.process_time()
        plan = planner.plan(budget, solver="dp", progress=phases.say)
        taken = time.process_time()
        phases.say("done")
        check_s = sum(seconds for phase, seconds in phases.seconds.items() if phase.startswith("running "))
        row = {
            "model": said,
            "parameters, millions": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
            "step, CPU s": step_s,
            "profiling, CPU s": profiled - started,
            "planning, CPU s": taken - profiled,
            "of that the check on a real step, CPU s": check_s,
            "together, CPU s": taken - started,
            "steps beyond 10 s": (taken - started - LIMIT_S) / step_s,
            f"within {LIMIT_CPU_STEPS} steps + {LIMIT_S:g} s": taken - started <= LIMIT_CPU_STEPS * step_s + LIMIT_S,
            "segments": len(plan.segments),
        }
        rows.append(row)
        print(row, phases.done(), flush=True)
    return Table(
        name="planning_time_in_steps",
        title=f"Profiling and planning one budget ({budget} of the peak, `dp`) in training steps",
        rows=rows,
        notes=["The check of the plan on a real step is counted in, and what is loaded at first use."],
    )


class Phases:
    """Collect how long each phase takes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phase, self._since = "opening", clock()

    def say(self, phase: str) -> None:
        """End the phase that runs and begin another."""
        now = self._clock()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def done(self) -> dict[str, float]:
        """Return seconds by phase."""
        self.say("done")
        return {phase: round(seconds, 2) for phase, seconds in self.seconds.items()}


if __name__ == "__main__":
    main()
