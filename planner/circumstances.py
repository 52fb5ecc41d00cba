"""The circumstances that a plan's figures hold under: precision, what is held, what else counts in the peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import ConfigDict, Field

from .by_name import Policy, policy_words

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Say how the step is run that a plan was made for. In other circumstances a plan stays exact, its figures do not.

    Attributes:
        autocast: By kind of device, the dtype that autocast was on with, like {"cpu": "bfloat16"}; empty without it.
        device: Where the model was: a kind of device, and its name where it has one.
        card: What was given as `device=`: the card that the step was recorded for without running it; "" where it ran.
        loss: Name of the function given as `loss=`, "" where none was. A file cannot hold the function itself.
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
        alike: Blocks that are built alike were to be treated so.
        mp_policy: FSDP2's mixed precision, by name; None where none was given.
        reshard_after_forward: As given for `fully_shard`; None is its default.
        parallelize: Name of the function given as `parallelize=`, "" where none was.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    autocast: dict[str, str] = field(default_factory=dict)
    device: str = ""
    card: str = ""
    loss: str = ""
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
    alike: bool = False
    mp_policy: Policy | None = None
    reshard_after_forward: bool | int | None = None
    parallelize: str = ""

    @property
    def precision(self) -> str:
        """Return the precision in words: "no autocast", or "bfloat16 autocast on cpu"."""
        return precision_words(self.autocast)

    @property
    def output_words(self) -> str:
        """Return in words how long the model's output lives."""
        return "output held" if self.holds_output else "output dropped after the loss"

    @property
    def optimizer_words(self) -> str:
        """Return in words that no optimizer is counted; "" where one is."""
        return "" if self.optimizer else "optimizer not counted"

    @property
    def sharding_words(self) -> str:
        """Return in words how ranks share the model, as far as it was said; "" where nothing was."""
        words = [] if self.mp_policy is None else [policy_words(self.mp_policy)]
        if self.reshard_after_forward is not None:
            words.append(f"reshard_after_forward={self.reshard_after_forward}")
        if self.parallelize:
            words.append(f"sharded by {self.parallelize}")
        return ", ".join(word for word in words if word)

    def words(self) -> str:
        """Return the circumstances in words: "no autocast, optimizer not counted, output held"."""
        card = self.card and f"for {self.card}"
        return ", ".join(
            filter(None, [card, self.precision, self.optimizer_words, self.output_words, self.sharding_words])
        )

    @contextmanager
    def as_recorded(self, *, elsewhere: bool) -> Iterator[None]:
        """Switch autocast on as the step was recorded under; where some is on already, that counts.

        Args:
            elsewhere: The step is recorded for a card that is not here, for which the CPU's autocast stands.
        """
        with ExitStack() as stack:
            if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
                for kind, dtype in self.autocast.items():
                    stack.enter_context(torch.autocast("cpu" if elsewhere else kind, getattr(torch, dtype)))
            yield


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
