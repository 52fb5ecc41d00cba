"""Which batch trains most samples per second under a memory budget: `largest_batch` against two common answers.

    python benchmarks/largest_batch.py

A GPT-2 (6 x 256, sequence 128). The budget is the peak of an unplanned step at `--fit` samples. The two answers: the
largest batch that fits without checkpoints, and the largest that fits with every block checkpointed. All three are
timed in turn, in one process, each on its own batch.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
from hand_written import each_checkpointed
from remat.planner import InfeasibleBudgetError, Planner, apply, largest_batch
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.step import Step
from tables import Table, mib, options, publish
from torch import nn

LENGTH, VOCABULARY = 128, 2048


def main() -> None:
    parser = options(__doc__, (), "largest_batch")
    parser.add_argument("--fit", type=int, default=12, help="samples whose unplanned peak is the budget")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    model = gpt2()
    budget = Planner.of(model, tokens(given.fit), repeats=0).profile.peak_bytes()
    started = time.perf_counter()
    found = largest_batch(tokens, budget, model=model, solver="dp")
    searching = time.perf_counter() - started
    print(found.table(), flush=True)
    every = largest(model, "all", budget)
    ways: dict[str, tuple[int, Callable[[], AbstractContextManager]]] = {
        "largest_batch": (found.size, lambda: apply(model, found.plan)),
        "largest without checkpoints": (largest(model, "none", budget), nullcontext),
        "largest with every block checkpointed": (every, lambda: each_checkpointed(list(model.transformer.h))),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    rows: list[dict] = []
    for way, (size, arm) in ways.items():
        step = Step.of(model, tokens(size))
        entry = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *step.tensors()))
        with arm():
            peak = entry + allocated_peak_bytes(step.train, torch.device("cpu"))
        rows.append({"way": way, "samples": size, "peak MiB": mib(peak), "budget MiB": mib(budget)})
    for number in range(given.rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            size, arm = ways[way]
            with arm():
                seconds[way].append(timed(Step.of(model, tokens(size))))
    for row in rows:
        rates = sorted(row["samples"] / taken for taken in seconds[row["way"]])
        row |= {"samples/s, median": median(rates), "lowest": rates[0], "highest": rates[-1]}
        row["searching s"] = searching if row["way"] == "largest_batch" else None
        chosen = zip(seconds["largest_batch"], seconds[row["way"]], strict=True)
        row["rate over largest_batch's, median of rounds"] = median(
            (row["samples"] / theirs) / (found.size / ours) for ours, theirs in chosen
        )
    title = f"Samples per second under one budget, {given.rounds} rounds in turn"
    publish(
        given.script,
        [Table(name=given.script, title=title, rows=rows, notes=[f"```\n{found.table()}\n```"])],
        given.out,
    )


def gpt2() -> nn.Module:
    """Return the model, in training mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6,
        n_embd=256,
        n_head=4,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def tokens(size: int) -> dict[str, torch.Tensor]:
    """Return a batch of that many samples."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(size))
    return {"input_ids": ids, "labels": ids}


def largest(model: nn.Module, solver: str, budget: int) -> int:
    """Return the most samples whose step fits the budget with a solver's plan, by bisection over dry runs."""

    def fits(size: int) -> bool:
        try:
            Planner.of(model, tokens(size), repeats=0).plan(budget, solver=solver, check=False)
        except InfeasibleBudgetError:
            return False
        return True

    low = 1
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def timed(step: Step) -> float:
    """Return the seconds of one step."""
    started = time.perf_counter()
    step.train()
    step.model.zero_grad(set_to_none=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
