"""The command line's options, each with its unit and an example."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """Name a kind of device."""

    CPU = "cpu"
    CUDA = "cuda"


Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="SPEC",
        help="FILE.py:FACTORY or package.module:FACTORY; the factory takes nothing and returns (model, batch) or "
        "(model, batch, loss). Example: train.py:build",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="BYTES",
        help="Most memory at the peak of the whole step: bytes with a unit, or a share of the peak without "
        "checkpoints. Examples: 8GiB, 750MB, 60%",
    ),
]
Budgets = Annotated[
    list[str],
    typer.Option("--budget", metavar="BYTES", help="As for plan; may be given several times. Examples: 8GiB, 60%"),
]
Solver = Annotated[
    str,
    typer.Option(
        "--solver",
        metavar="NAME",
        help="auto, or one algorithm: dp and ilp are exact, sqrt is the classical rule. Example: ilp",
    ),
]
Solvers = Annotated[
    list[str], typer.Option("--solver", metavar="NAME", help="May be given several times. Example: --solver dp")
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="Count this optimizer's state and step in the peak; without it neither counts. Example: adamw",
    ),
]
Accumulation = Annotated[
    bool, typer.Option("--accumulation", help="Count gradients as alive throughout, as when accumulating batches.")
]
DropsOutput = Annotated[
    bool,
    typer.Option(
        "--drops-output",
        help="Your loop drops the model's output once there is a loss (a function that returns the loss, transformers' "
        "Trainer, Lightning); otherwise it is counted as held until backward is over.",
    ),
]
Units = Annotated[
    list[str],
    typer.Option(
        "--units",
        metavar="PATHS",
        help="Modules that fully_shard will be called on, besides the root; * stands for anything but a dot. May be "
        "given several times. Example: 'transformer.h.*'",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks",
        metavar="COUNT",
        min=1,
        help="Processes that fully_shard will divide the model over; the budget and all bytes are then one rank's. "
        "Example: 8",
    ),
]
Headroom = Annotated[
    float, typer.Option("--headroom", metavar="SHARE", help="Share of the budget to keep free, 0 to 1. Example: 0.05")
]
OnDevice = Annotated[
    Device | None,
    typer.Option("--device", help="Move model and batch there first; otherwise they stay where the factory put them."),
]
NoSaveSets = Annotated[
    bool, typer.Option("--no-save-sets", help="Let no segment keep operators' outputs (selective checkpointing).")
]
NoCrossOperators = Annotated[
    bool,
    typer.Option(
        "--no-cross-operators",
        help="Let no segment run across a container's own operators; needed where the model is compiled.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="Most seconds for each solve; a plan takes a few. Example: 30"
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats", metavar="COUNT", min=0, help="Timed repeats; 0 runs nothing for time and estimates it instead."
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Run every plan as well, and give measured peaks and times beside predicted.")
]


def output(what: str, example: str) -> typer.models.OptionInfo:
    """Return the option for an output file."""
    return typer.Option("--out", metavar="PATH", help=f"Write {what} here. Example: {example}")


PlanOut = Annotated[Path | None, output("the plan", "plan.json")]
ProfileOut = Annotated[Path | None, output("the profile (JSON)", "profile.json")]
CsvOut = Annotated[Path | None, output("the table (CSV)", "comparison.csv")]
ReportOut = Annotated[Path, output("the report", "report.html")]
FolderOut = Annotated[Path, output("plan.json, two pictures and a table", "out")]
