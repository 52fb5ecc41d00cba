"""`Session`: a step, and what it is recorded with, with and without a plan, in just the same way."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from .cards import Card, card
from .devices import CUDA_GRANULARITY, Device, device_of
from .dry_run import DryRunError, dry_run, record_step
from .ranks import Ranks
from .repeatable_hooks import Repeatable
from .repetition import identical_blocks
from .results import Results
from .scratch import ScratchMeter
from .shortened import NotAlikeError, Role, runs_of
from .step import BatchError, Loss, Step, check_eager, check_present
from .step_record import StepRecord
from .timing import Watched


@dataclass(slots=True)
class Session:
    """Hold what a step is profiled with, so that planned steps are recorded in just the same way.

    Attributes:
        step: The step.
        device: Where its model is.
        scratch: Knows what operators allocate inside themselves.
        accumulation: Gradients exist throughout.
        reference: What the unmodified step computed, once it was run.
        watched: Unmodified steps that were run, and were timed by the way.
        card: The card that the step is recorded for and never run on; None where it is run here.
        ranks: How the model is divided over processes; the step is then that of one of them.
        left: What recording it last left in Python's objects, as in `Results.left`.
        shortens: Of identical blocks most may be left out of dry runs, and be written into the record.
        is_shortened: The unmodified step was last recorded so.
        identical: The identical blocks of the unmodified model, by run.
    """

    step: Step
    device: torch.device
    scratch: ScratchMeter
    accumulation: bool
    reference: Results | None = None
    watched: Watched | None = None
    card: Card | None = None
    ranks: Ranks | None = None
    left: dict[str, object] = field(default_factory=dict)
    shortens: bool = True
    is_shortened: bool = False
    identical: tuple[tuple[str, ...], ...] = ()

    @property
    def place(self) -> Device:
        """Return what is known of the device."""
        return device_of(self.device)

    @property
    def round_to(self) -> int:
        """Return the allocation granularity of the device, in bytes."""
        return self.place.round_to if self.card is None else CUDA_GRANULARITY

    @property
    def budget_on(self) -> Literal["allocated", "reserved"]:
        """Return which figure runs out: what tensors take, or what a caching allocator took for them."""
        return self.place.budget_on if self.card is None else "reserved"

    @property
    def context_bytes(self) -> int:
        """Return what the driver and its libraries hold outside the allocator; unknown, and 0, where no card is."""
        return self.place.context_bytes() if self.card is None else 0

    @property
    def device_words(self) -> str:
        """Say what the figures are for."""
        return str(self.device) if self.card is None else f"{self.card.name} (not there: predicted)"

    def record(
        self,
        method: Literal["dry run", "real step"],
        *,
        forward_only: bool = False,
        planned: bool = False,
        role: Role | None = None,
    ) -> StepRecord:
        """Record the step as the model is now, with or without a plan applied.

        Args:
            method: On what.
            forward_only: As in `record_step`.
            planned: A plan is applied.
            role: What the plan has in store for blocks: those left out must have it in common. None runs all of them.
        """
        options: dict[str, Any] = {
            "accumulation": self.accumulation and not forward_only,
            "round_to": self.round_to,
            "scratch": None if forward_only else self.scratch,
            "forward_only": forward_only,
            "planned": planned,
        }
        guard = self.step.guard
        shortened = False
        if method == "dry run":
            with guard.undisturbed():
                record, shortened = self._dry_run(options, role)
        elif self.ranks is not None:
            raise BatchError("a step that cannot run on fake tensors cannot be recorded as one of several ranks")
        else:
            with guard.preserved():
                record = record_step(replace(self.step, beside=guard.beside(self.step.model)), **options)
        if not (planned or forward_only):
            self.left, self.is_shortened = guard.left, shortened
        return record

    def _dry_run(self, options: dict[str, Any], role: Role | None) -> tuple[StepRecord, bool]:
        """Record a dry run; say also whether identical blocks were left out of it."""
        guard, planned = self.step.guard, options["planned"]
        shortens = self.shortens and self.ranks is None and not guard.now.stepping_hooks
        if shortens and not (planned or options["forward_only"]):
            self.identical = identical_blocks(self.step.model)
        shortens = shortens and (role is not None or not planned)
        runs = runs_of(self.step.model, self.identical, role) if shortens else ()
        if runs:
            with suppress(NotAlikeError, DryRunError):
                record = dry_run(self.step, **options, card=self.card, runs=runs)
                # What blocks leave behind in Python's objects is compared block by block.
                if not guard.left:
                    return record, True
            self.shortens = planned
        return dry_run(self.step, **options, ranks=self.ranks, card=self.card), False


def open_session(
    model: nn.Module,
    batch: object,
    loss: Loss | None,
    *,
    accumulation: bool = False,
    holds_output: bool = True,
    repeatable_hooks: Repeatable = False,
    device: str | None = None,
) -> Session:
    """Check the model and the batch and get ready to record steps.

    Args:
        model: The model; without memory (on meta, or fake) where a card is named.
        batch: The batch.
        loss: The loss.
        accumulation: Gradients exist throughout.
        holds_output: As for `profile`.
        repeatable_hooks: Which forward hooks of the user's a replay may run again.
        device: Name of a card from `cards.CARDS`, to record the step for it without running anything.

    Raises:
        BatchError: The batch cannot be used, a part of the model is compiled, or it is not there and no card is named.
        DeviceError: Steps cannot be measured on the model's device.
        CardError: There is no such card.
    """
    step = replace(Step.of(model, batch, loss, holds_output=holds_output), repeatable_hooks=repeatable_hooks)
    check_eager(model)
    if device is not None:
        return Session(step, torch.device("cpu"), ScratchMeter(), accumulation, card=card(device))
    check_present(model)
    place = next(model.parameters()).device
    device_of(place)
    return Session(step, place, ScratchMeter(), accumulation)


def silent(_: str) -> None:
    """Take progress and say nothing."""
