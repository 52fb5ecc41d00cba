"""The circumstances that a plan's figures hold under: precision, what is held, what else counts in the peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Say how the step is run that a plan was made for. In other circumstances a plan stays exact, its figures do not.

    Attributes:
        autocast: By kind of device, the dtype that autocast was on with, like {"cpu": "bfloat16"}; empty without it.
        device: Where the model was: a kind of device, and its name where it has one.
        accumulation: Gradients exist throughout.
        holds_output: The model's output is referred to until backward is over.
        optimizer: Name of the optimizer counted, "" where none is.
        optimizer_bytes: Its state.
        optimizer_step_peak_bytes: Most bytes alive during its own step, everything included.
        library_bytes: What libraries keep on the device throughout.
        whole_step_bytes: What the unmodified step of the whole model allocates above its entry; what one process needs
            to run it.
        headroom: Share of the budget that was kept free.
        exclude: Patterns of modules that segments were not to hold.
        only: Patterns of modules that segments were to be made of; empty for all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    autocast: dict[str, str] = field(default_factory=dict)
    device: str = ""
    accumulation: bool = False
    holds_output: bool = True
    optimizer: str = ""
    optimizer_bytes: Count = 0
    optimizer_step_peak_bytes: Count = 0
    library_bytes: Count = 0
    whole_step_bytes: Count | None = None
    headroom: float = 0.0
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """Return the precision in words: "as the parameters are", or "bfloat16 autocast on cpu"."""
        return precision_words(self.autocast)

    @property
    def output_words(self) -> str:
        """Return in words how long the model's output lives."""
        return "output held" if self.holds_output else "output dropped after the loss"


def precision_words(autocast: dict[str, str]) -> str:
    """Say what autocast does, in words."""
    kinds = [f"{dtype} autocast on {kind}" for kind, dtype in autocast.items()]
    return " and ".join(kinds) or "no autocast"


def autocast_now(kind: str) -> dict[str, str]:
    """Return what autocast is set to in this thread for the CPU and another kind of device, as in `Circumstances`."""
    kinds = dict.fromkeys(("cpu", kind))
    return {
        name: str(torch.get_autocast_dtype(name)).removeprefix("torch.")
        for name in kinds
        if torch.is_autocast_enabled(name)
    }
