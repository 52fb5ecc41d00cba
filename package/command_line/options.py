"""The command line's options, each with its unit and an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import checks

if TYPE_CHECKING:
    import torch
    from remat.planner.show.factory import Subject
    from torch import nn


class Device(StrEnum):
    """Name a kind of device."""

    CPU = "cpu"
    CUDA = "cuda"


class Autocast(StrEnum):
    """Name a precision to compute in."""

    BF16 = "bf16"
    FP16 = "fp16"


class Dtype(StrEnum):
    """Name a precision of a sharded model's parameters or gradients."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    def torch(self) -> torch.dtype:
        """Return it as torch knows it."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]


OnDevice = Annotated[
    Device | None,
    typer.Option("--device", help="Move model and batch there first; otherwise they stay where the factory put them."),
]
_TARGET = (
    "FILE.py:FACTORY or package.module:FACTORY; the factory takes nothing and returns (model, batch) or (model, batch, "
    "loss). Example: train.py:build"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a command is about, and where and how it computes."""

    target: Annotated[str | None, typer.Argument(metavar="TARGET", show_default=False, help=_TARGET)] = None
    model: Annotated[str | None, typer.Option("--model", metavar="TARGET", help="The same, as an option.")] = None
    device: OnDevice = None
    autocast: Annotated[
        Autocast | None,
        typer.Option(
            "--autocast",
            help="Run the step under torch.autocast in this precision; a plan made under autocast is verified and "
            "priced under the same. Example: bf16",
        ),
    ] = None

    def __post_init__(self) -> None:
        if (self.target is None) == (self.model is None):
            both = "given twice, by position and as --model" if self.target else "missing"
            raise typer.BadParameter(f"{both}; pass one, such as train.py:build", param_hint="TARGET")
        checks.target(self.spec)

    @property
    def spec(self) -> str:
        """Return FILE.py:FACTORY, however it was given."""
        return self.target or self.model or ""

    def load(self) -> Subject:
        """Import the factory and call it."""
        from remat.planner.show.factory import load_subject

        return load_subject(self.spec, self._device)

    def batches(self, spec: str) -> Sequence[object]:
        """Import a function that returns batches and call it."""
        from remat.planner.show.factory import load_batches

        return load_batches(spec, self._device)

    @property
    def _device(self) -> str | None:
        return None if self.device is None else self.device.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and how the step will run, as far as that is not here."""

    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            metavar="NAME|FILE.json",
            help="Plan for this card, which need not be here: nothing is run, times are predicted, and the factory may "
            "make the model on the meta device; or for one whose figures `remat calibrate` wrote. Example: h100-80gb",
        ),
    ] = None
    param_dtype: Annotated[
        Dtype | None,
        typer.Option("--param-dtype", help="FSDP2's mixed precision: what parameters are gathered in. Example: bf16"),
    ] = None
    reduce_dtype: Annotated[
        Dtype | None,
        typer.Option("--reduce-dtype", help="FSDP2's mixed precision: what gradients are reduced in. Example: fp32"),
    ] = None
    reshard_after_forward: Annotated[
        str | None,
        typer.Option(
            "--reshard-after-forward",
            metavar="yes|no|COUNT",
            callback=checks.reshard,
            help="As in fully_shard, for the units; otherwise its default. Example: no",
        ),
    ] = None
    parallelize: Annotated[
        str | None,
        typer.Option(
            "--parallelize",
            metavar="TARGET",
            callback=checks.function,
            help="A function that takes the model and a DeviceMesh and shards the model in place, instead of "
            "fully_shard on the units. Example: train.py:shard",
        ),
    ] = None

    def check(self) -> None:
        """Refuse, before there is a model, what can be told without it."""
        if self.card is not None:
            from remat.profiler.cards import card

            card(self.card)

    def elsewhere(self) -> dict[str, Any]:
        """Return what was given of this as keywords of `plan`."""
        given: dict[str, Any] = {}
        if self.card is not None:
            given["device"] = self.card
        if self.param_dtype is not None or self.reduce_dtype is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            param, reduce = (
                None if dtype is None else dtype.torch() for dtype in (self.param_dtype, self.reduce_dtype)
            )
            given["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        if self.reshard_after_forward is not None:
            said = self.reshard_after_forward
            given["reshard_after_forward"] = said == "yes" if said in ("yes", "no") else int(said)
        if self.parallelize is not None:
            from remat.planner.show.factory import load_function

            given["parallelize"] = load_function(self.parallelize)
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Place):
    """What a training step is besides model, batch and loss: each field of `StepOptions`, as it is typed."""

    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="Count this optimizer's state and step in the peak; without it neither counts. Example: adamw",
        ),
    ] = None
    accumulation: Annotated[
        bool, typer.Option("--accumulation", help="Count gradients as alive throughout, as when accumulating batches.")
    ] = False
    drops_output: Annotated[
        bool,
        typer.Option(
            "--drops-output",
            help="Your loop drops the model's output once there is a loss (a function that returns the loss, "
            "transformers' Trainer, Lightning); otherwise it is counted as held until backward is over.",
        ),
    ] = False
    no_save_sets: Annotated[
        bool, typer.Option("--no-save-sets", help="Let no segment keep operators' outputs (selective checkpointing).")
    ] = False
    no_cross_operators: Annotated[
        bool,
        typer.Option(
            "--no-cross-operators",
            help="Let no segment run across a container's own operators; needed where the model is compiled.",
        ),
    ] = False
    repeatable_hooks: Annotated[
        list[str],
        typer.Option(
            "--repeatable-hooks",
            metavar="PATHS",
            help="Modules whose forward hooks a replay may run once more, because they only compute; 'all' for every "
            "one. May be given several times. Example: 'h.*.attn'",
        ),
    ] = field(default_factory=list[str])
    exclude: Annotated[
        list[str],
        typer.Option(
            "--exclude",
            metavar="PATHS",
            help="Modules that no segment holds a call of; * stands for anything but a dot, 0-3,7 for numbers. May be "
            "given several times. Example: 'h.*.attn'",
        ),
    ] = field(default_factory=list[str])
    only: Annotated[
        list[str],
        typer.Option(
            "--only",
            metavar="PATHS",
            help="Modules that segments are made of, and no others. May be given several times. Example: 'h.0-5'",
        ),
    ] = field(default_factory=list[str])
    alike: Annotated[
        bool,
        typer.Option(
            "--alike",
            help="Treat blocks that are built alike in the same way: one pattern for each kind, or two and where they "
            "change. The plan says what it costs. With the solvers auto, dp, ilp, all and none; "
            "compare and report take all in place of sqrt.",
        ),
    ] = False
    units: Annotated[
        list[str],
        typer.Option(
            "--units",
            metavar="PATHS",
            help="Modules that fully_shard will be called on, besides the root. May be given several times. "
            "Example: 'transformer.h.*'",
        ),
    ] = field(default_factory=list[str])
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks",
            metavar="COUNT",
            min=1,
            help="Processes that fully_shard will divide the model over; the budget and all bytes are then one rank's. "
            "Example: 8",
        ),
    ] = 1
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            metavar="COUNT",
            min=0,
            help="Timed repeats; 0 runs nothing for time and estimates it instead.",
        ),
    ] = 3

    def check(self) -> None:
        """Refuse, before there is a model, what can be told without it."""
        from remat.planner import StepOptions

        Place.check(self)
        StepOptions.of({"optimizer": self.optimizer})

    def keywords(self, model: nn.Module) -> dict[str, Any]:
        """Return the options as keywords of `plan`, with the model's modules in place of their paths."""
        from remat.planner.show.factory import modules_named

        every = "all" in self.repeatable_hooks
        return {
            "optimizer": self.optimizer,
            "accumulation": self.accumulation,
            "holds_output": not self.drops_output,
            "save_sets": not self.no_save_sets,
            "cross_operators": not self.no_cross_operators,
            "repeatable_hooks": every or modules_named(model, self.repeatable_hooks, "--repeatable-hooks"),
            "exclude": self.exclude,
            "only": self.only,
            "alike": self.alike,
            "units": modules_named(model, self.units, "--units"),
            "ranks": self.ranks,
            "repeats": self.repeats,
            **self.elsewhere(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How much a command says, and to whom."""

    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON on standard output, a mistake too; nothing else."),
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no tables, only mistakes.")] = (
        False
    )
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print every phase with its time, all modules, and where an internal error arose."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise typer.BadParameter("--quiet and --verbose: pass one of them")


Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="BYTES",
        callback=checks.budget,
        help="Most memory at the peak of the whole step: bytes with a unit, or a share of the peak without "
        "checkpoints. Examples: 8GiB, 750MB, 60%",
    ),
]
Budgets = Annotated[
    list[str],
    typer.Option(
        "--budget",
        metavar="BYTES",
        callback=checks.budgets,
        help="As for plan; may be given several times. Examples: 8GiB, 60%",
    ),
]
Solver = Annotated[
    str,
    typer.Option(
        "--solver",
        metavar="NAME",
        callback=checks.solver,
        autocompletion=checks.solver_names,
        help="auto, or one algorithm: dp and ilp are exact, sqrt is the classical rule. Example: ilp",
    ),
]
Solvers = Annotated[
    list[str],
    typer.Option(
        "--solver",
        metavar="NAME",
        callback=checks.solvers,
        autocompletion=checks.solver_names,
        help="May be given several times. Example: --solver dp",
    ),
]
Headroom = Annotated[
    float,
    typer.Option(
        "--headroom",
        metavar="SHARE",
        callback=checks.share,
        help="Share of the budget to keep free, 0 to 1. Example: 0.05",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        min=0.001,
        help="Most seconds for each solve; a plan takes a few. Example: 30",
    ),
]
Race = Annotated[
    int,
    typer.Option(
        "--race",
        metavar="COUNT",
        min=0,
        help="Time so many plans in turn and take the measured best; 0 takes the predicted best. Example: 3",
    ),
]
Batches = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="TARGET",
        callback=checks.function,
        help="A function that returns a list of batches, which differ in sizes alone, in place of the factory's one: "
        "the plan fits with each of them. Example: train.py:batches",
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="COUNT", min=0, help="Timed repeats; 0 measures no time. Example: 5")
]
Steps = Annotated[int, typer.Option("--steps", metavar="COUNT", min=1, help="Steps after which to compare. Example: 3")]
Measure = Annotated[
    bool, typer.Option("--measure", help="Run every plan as well, and give measured peaks and times beside predicted.")
]
PlanFile = Annotated[
    Path,
    typer.Option(
        "--plan", metavar="PATH", callback=checks.plan_file, help="What `remat plan` wrote. Example: plan.json"
    ),
]


def plan_argument(name: str) -> typer.models.ArgumentInfo:
    """Return the argument for a plan file."""
    return typer.Argument(metavar=name, callback=checks.plan_file, help="A plan file. Example: plan.json")


Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        metavar="PATH",
        callback=checks.picture_file,
        help="Draw peak against added time; the name's end says the format. Example: front.png",
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="LIST",
        callback=checks.sizes,
        help="Batch sizes to try; otherwise they are doubled from 1 until one does not fit. Example: 8,16,32",
    ),
]


def written(what: str, example: str) -> typer.models.OptionInfo:
    """Return the option for an output file."""
    return typer.Option(
        "--out", metavar="PATH", callback=checks.written_file, help=f"Write {what} here. Example: {example}"
    )


PlanOut = Annotated[Path | None, written("the plan", "plan.json")]
ProfileOut = Annotated[Path | None, written("the profile (JSON)", "profile.json")]
CardOut = Annotated[Path, written("the card's figures (JSON)", "card.json")]
CsvOut = Annotated[Path | None, written("the table (CSV)", "comparison.csv")]
ReportOut = Annotated[Path, written("the report", "report.html")]
FolderOut = Annotated[
    Path, typer.Option("--out", metavar="PATH", help="Write plan.json, two pictures and a table here. Example: out")
]
