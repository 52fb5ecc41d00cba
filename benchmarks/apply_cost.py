"""What applying a plan costs beyond the checkpoints themselves: the same segments, planned and wrapped by hand.

    python benchmarks/apply_cost.py

A chain of many small blocks, so that the host's work shows. Both ways run in turn; the figure is the ratio of medians.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from hand_written import interleaved, largest_difference, ratio, runs_checkpointed
from models import mean_square
from remat.planner import Planner, apply
from remat.planner.plan import Call, PlannedSegment
from tables import Table, publish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(block(given.width) for _ in range(given.blocks))).train()
    batch = torch.randn(given.batch, given.width)
    base = Planner.of(model, batch, loss=mean_square, repeats=1).plan("100%", solver="none")

    def step() -> None:
        mean_square(model(batch)).backward()
        model.zero_grad(set_to_none=True)

    rows = []
    for size in (1, 4, 16):
        runs = [range(start, min(start + size, given.blocks)) for start in range(0, given.blocks, size)]
        segments = tuple(PlannedSegment(members=tuple(Call(module=str(index)) for index in run)) for run in runs)
        plan = replace(base, segments=segments)
        arms = {
            "planned": lambda plan=plan: apply(model, plan),
            "by hand": lambda runs=runs: runs_checkpointed(model, runs),
        }
        found = {}
        for name, arm in arms.items():
            with arm():
                mean_square(model(batch)).backward()
            found[name] = {key: value.grad.clone() for key, value in model.named_parameters()}
            model.zero_grad(set_to_none=True)
        seconds = interleaved(step, arms, given.rounds, warm=True)
        rows.append(
            {
                "blocks a segment": size,
                "segments": len(runs),
                "by hand ms": 1e3 * sorted(seconds["by hand"])[given.rounds // 2],
                "planned ms": 1e3 * sorted(seconds["planned"])[given.rounds // 2],
                "ratio of medians": ratio(seconds, "planned", "by hand"),
                "ratio of fastest": min(seconds["planned"]) / min(seconds["by hand"]),
                "largest gradient difference": largest_difference(found["planned"], found["by hand"]),
            }
        )
        print(rows[-1], flush=True)
    title = (
        f"Step time of {given.blocks} blocks (LayerNorm, Linear, GELU, Linear; width {given.width}, batch "
        f"{given.batch}), the same segments planned and by hand; {given.rounds} rounds"
    )
    publish("apply_cost", [Table(name="apply_cost", title=title, rows=rows)], given.out)


def block(width: int) -> torch.nn.Module:
    """Return a small block."""
    layers = (torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    return torch.nn.Sequential(*layers)


if __name__ == "__main__":
    main()
