"""A Profile: what one training step does, as data. Frozen, JSON in and out, no live tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError
from remat.whole_file import write_whole

from .step_record import IntArray, StepRecord
from .times import Origin, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ProfileFileError(ValueError):
    """Raised when a file is not a profile this version can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """Describe one stage: a module call, or a run of operators a container executes itself.

    Attributes:
        name: Module path with the call's index when there are several, or the container's path and "(own operators)".
        call: The module call, or the container's call.
        is_call: Whether it is a whole module call.
        start: First operator.
        stop: One past the last operator.
    """

    name: str
    call: int
    is_call: bool
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Split the step's memory, in bytes.

    Attributes:
        parameters: All parameters.
        buffers: All buffers.
        batch: The batch.
        optimizer: Optimizer state in its steady state; 0 when no optimizer was given.
        gradients: Gradients of all parameters that get one.
        optimizer_step_peak: Most bytes alive during the optimizer's step, everything included; 0 without optimizer.
    """

    parameters: int
    buffers: int
    batch: int
    optimizer: int
    gradients: int
    optimizer_step_peak: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile(StepRecord):
    """Hold everything a planner needs to know of one training step: its record, its stages and its times.

    Attributes:
        model: Class name of the model.
        device: Device of its parameters.
        stages: The forward and the loss cut into a chain.
        parts: Fixed parts and gradients.
        forward: Time of forward and loss, over repeats.
        step: Time of forward, loss and backward; the optimizer is not counted.
        bytes_from: How bytes were obtained.
        times_from: How times of operators and forward were obtained.
        step_time_from: How the step's time was obtained.
        optimizer_ns: How long the optimizer's own step should take on a named card, nanoseconds: predicted. None where
            it is not known, and where gradients accumulate, so that not every step has one.
        accumulation: Whether gradients exist from the beginning.
        unseen_bytes: What the allocator's peak in a real step was above the recorded one; counted as alive throughout.
        library_bytes: What libraries keep on the device from their first call on (cuBLAS's workspace), throughout.
        notes: What a reader of the figures must know.
    """

    schema_version: int = 2
    model: str
    device: str
    stages: tuple[StageSpan, ...]
    parts: Parts
    forward: Spread
    step: Spread
    bytes_from: Literal["dry run", "real step"]
    times_from: Origin
    step_time_from: Origin
    accumulation: bool
    unseen_bytes: int = 0
    library_bytes: int = 0
    optimizer_ns: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def forward_ns(self) -> int:
        """Return the median time of forward and loss, nanoseconds."""
        return self.forward.median_ns

    @property
    def step_ns(self) -> int:
        """Return the median time of forward, loss and backward, nanoseconds."""
        return self.step.median_ns

    def time_words(self) -> str:
        """Return the times of the step and its forward in words, and whether they were estimated."""
        return f"step {self.step.words(self.step_time_from)}, forward {self.forward.words(self.times_from)}"

    def live_bytes(self) -> IntArray:
        """Return the bytes alive at each operator's worst moment, optimizer state included; shape (operators,)."""
        return StepRecord.live_bytes(self) + self.parts.optimizer + self.unseen_bytes + self.library_bytes

    def live_bytes_by_kind(self) -> dict[str, IntArray]:
        """Return the same without scratch, by category: parameters, optimizer, gradients, activations, ..."""
        optimizer = np.full(len(self.operators), self.parts.optimizer, dtype=np.int64)
        return {**StepRecord.live_bytes_by_kind(self), "optimizer": optimizer}

    def peak_bytes(self) -> int:
        """Return the peak of the whole unplanned step, optimizer included, in bytes."""
        return max(int(self.live_bytes().max(initial=0)), self.parts.optimizer_step_peak)

    def __str__(self) -> str:
        parts = self.parts
        held = ("parameters", parts.parameters), ("gradients", parts.gradients), ("optimizer state", parts.optimizer)
        lines = [
            f"{self.model} on {self.device}: peak {_mib(self.peak_bytes())} in the {self.peak_moment()}; "
            f"{self.time_words()}; {len(self.stages)} stages",
            ", ".join(f"{name} {_mib(nbytes)}" for name, nbytes in held),
            f"bytes: {self.bytes_from}; times: {self.times_from}; step time: {self.step_time_from}",
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def __repr__(self) -> str:
        peak, step = _mib(self.peak_bytes()), f"{self.step_ns / 1e6:,.1f} ms"
        return f"<Profile of {self.model} on {self.device}: peak {peak}, step {step}, {len(self.operators)} operators>"

    def _repr_html_(self) -> str:
        first, *others = str(self).splitlines()
        table = self.alive_at_peak(5)
        table["bytes"] = [_mib(nbytes) for nbytes in table["bytes"]]
        below = "".join(f"<p>{escape(line)}</p>" for line in others)
        return f"<p><b>{escape(first)}</b></p>{below}<p>The largest alive at the peak:</p>{table.to_html(index=False)}"

    def fixed_bytes(self) -> int:
        """Return what is alive throughout: parameters, buffers, batch, optimizer state, accumulated gradients."""
        parts = self.parts
        fixed = parts.parameters + parts.buffers + parts.batch + parts.optimizer
        fixed += self.unseen_bytes + self.library_bytes
        return fixed + (parts.gradients if self.accumulation else 0)

    def module_of(self, operator: int) -> str:
        """Return the path of the module an operator belongs to; a backward operator belongs to its forward's."""
        record = self.operators[operator]
        source = self.operators[record.forward_of] if record.forward_of >= 0 else record
        return self.calls[source.call].module if source.call >= 0 else "(loss)"

    def alive_at_peak(self, limit: int = 10) -> pd.DataFrame:
        """List the largest storages alive at the peak: bytes, kind, module and operator that made them."""
        at = int(self.live_bytes().argmax())
        alive = [s for s in self.storages if max(s.born, 0) <= at and (s.last is None or s.last >= at)]
        rows = [
            {
                "bytes": storage.nbytes,
                "kind": storage.kind,
                "module": storage.name or (self.module_of(storage.born) if storage.born >= 0 else ""),
                "operator": self.operators[storage.born].operator if storage.born >= 0 else "",
            }
            for storage in sorted(alive, key=lambda storage: -storage.nbytes)[:limit]
        ]
        return pd.DataFrame(rows, columns=["bytes", "kind", "module", "operator"])

    def peak_moment(self) -> str:
        """Say where in the step the peak is."""
        at = int(self.live_bytes().argmax())
        if self.parts.optimizer_step_peak > int(self.live_bytes().max(initial=0)):
            return "the optimizer's step"
        phase = "forward" if at < self.loss_stop else "backward"
        return f"{phase} of {self.module_of(at) or self.model}"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per forward operator: module, operator, forward_ns, output_bytes, saved_bytes, flags."""
        saved = np.zeros(self.loss_stop, dtype=np.int64)
        for storage in self.storages:
            if storage.saved_by and storage.kind == "activation":
                saved[storage.saved_by[0]] += storage.nbytes
        rows = [
            {
                "module": self.module_of(index),
                "operator": operator.operator,
                "forward_ns": operator.forward_ns,
                "output_bytes": operator.output_bytes,
                "saved_bytes": int(saved[index]),
                "scratch_bytes": operator.scratch_bytes,
                "random": operator.is_random,
                "in_place": bool(operator.writes),
                "view": operator.is_view,
            }
            for index, operator in enumerate(self.operators[: self.loss_stop])
        ]
        return pd.DataFrame(rows)

    def plot(self, *, rows: int = 20, title: str = "") -> Figure:
        """Draw where the memory is, by module; see `module_memory`.

        Args:
            rows: Most bars.
            title: Above everything.
        """
        # Pictures are the planner's side; this one name of it is known here, and imported when it is drawn.
        from ..planner.pictures.memory import module_memory

        return module_memory(self, rows=rows, title=title)

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return _adapter().dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read a profile from JSON.

        Raises:
            ProfileFileError: It is not a profile of this schema version.
        """
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ProfileFileError(f"not a remat profile: {where}: {first['msg']}; profile the model again") from None

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON; an existing file is replaced only when the new one is complete."""
        write_whole(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            ProfileFileError: The file does not hold a profile.
        """
        return Profile.from_json(Path(path).read_text())


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Profile)


def _mib(nbytes: int) -> str:
    """Return bytes in one unit for all rows, so that they compare at a glance."""
    return f"{nbytes / 2**20:,.1f} MiB"
