"""What applying a plan costs beyond the checkpoints themselves: the same segments, planned and wrapped by hand.

    python benchmarks/apply_cost.py

Chains of many small blocks, so that the host's work shows: of LayerNorm, Linear, GELU, Linear, a millisecond each, and
of small transformer layers. Both ways bring random states back and stop a replay early.
They run in turn, in alternating order. The clock's figures suffer from whatever else the machine does; CPU time does
less so, and least the ratio of the two steps of one round, of which the median is given.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from hand_written import largest_difference, runs_checkpointed, timed_in_turn
from models import mean_square
from remat.planner import Planner, apply
from remat.planner.plan import Call, PlannedSegment
from tables import Table, publish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    rows = [row for kind in given.kinds for row in rows_of(kind, given.blocks, given.rounds)]
    title = (
        f"Step time of {given.blocks} small blocks, the same segments planned and by hand; {given.rounds} rounds. "
        "mlp: LayerNorm, Linear, GELU, Linear of width 256, batch 32. encoder: nn.TransformerEncoderLayer of width "
        "128, feed-forward 512, 4 heads, batch 4, sequence 32"
    )
    publish("apply_cost", [Table(name="apply_cost", title=title, rows=rows)], given.out)


def rows_of(kind: str, blocks: int, rounds: int) -> list[dict[str, object]]:
    """Measure segments of three sizes on one kind of block."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model, batch = torch.nn.Sequential(*(make() for _ in range(blocks))).train(), torch.randn(shape)
    base = Planner.of(model, batch, loss=mean_square, repeats=0).plan("100%", solver="none")

    def step() -> None:
        mean_square(model(batch)).backward()
        model.zero_grad(set_to_none=True)

    rows = []
    for size in (1, 4, 16):
        runs = [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]
        segments = tuple(PlannedSegment(members=tuple(Call(module=str(index)) for index in run)) for run in runs)
        plan = replace(base, segments=segments)
        arms = {
            "planned": lambda plan=plan: apply(model, plan),
            "by hand": lambda runs=runs: runs_checkpointed(model, runs),
        }
        found = {}
        for name, arm in arms.items():
            torch.manual_seed(0)
            with arm():
                mean_square(model(batch)).backward()
            found[name] = {key: value.grad.clone() for key, value in model.named_parameters()}
            model.zero_grad(set_to_none=True)
        times = timed_in_turn(step, arms, rounds, warm=True)
        ours, theirs = times["planned"], times["by hand"]
        rows.append(
            {
                "block": kind,
                "blocks a segment": size,
                "by hand ms": 1e3 * median(theirs.wall),
                "planned ms": 1e3 * median(ours.wall),
                "ratio of medians": median(ours.wall) / median(theirs.wall),
                "by hand CPU us a block": 1e6 * median(theirs.cpu) / blocks,
                "planned CPU us a block": 1e6 * median(ours.cpu) / blocks,
                "CPU ratio of medians": median(ours.cpu) / median(theirs.cpu),
                "CPU ratio of fastest": min(ours.cpu) / min(theirs.cpu),
                "CPU ratio within rounds": median(a / b for a, b in zip(ours.cpu, theirs.cpu, strict=True)),
                "largest gradient difference": largest_difference(found["planned"], found["by hand"]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def mlp() -> torch.nn.Module:
    """Return a small block."""
    layers = (torch.nn.LayerNorm(256), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    return torch.nn.Sequential(*layers)


def encoder() -> torch.nn.Module:
    """Return a small transformer layer."""
    return torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)


KINDS = {"mlp": (mlp, (32, 256)), "encoder": (encoder, (4, 32, 128))}


if __name__ == "__main__":
    main()
