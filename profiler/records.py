"""A Profile: what one training step does, as data. Frozen, JSON in and out, no live tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from .lives import live_bytes_by_kind

Kind = Literal["parameter", "buffer", "batch", "gradient", "activation", "unsharded", "communication"]


class ProfileFileError(ValueError):
    """Raised when a file is not a profile this version can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Describe one ATen call of the step, forward or backward.

    Attributes:
        operator: Overload name, such as "aten.addmm.default".
        call: Index of the innermost module call it ran in, into `Profile.calls`; -1 outside the model.
        forward_ns: Its own time in forward, nanoseconds; 0 for backward operators.
        output_bytes: Bytes of the storages it made.
        scratch_bytes: Bytes it allocates and frees inside itself.
        reads: Storages among its arguments.
        produces: Storages it made.
        writes: Storages it changed in place.
        is_random: It draws from torch's random state.
        is_view: Its outputs share its inputs' storage.
        private_generator: It was given a generator of its own.
        fills_argument: It writes to an argument other than its first without returning it (RReLU's noise).
        counted: Selective checkpointing counts it.
        forward_of: For a backward operator, the forward operator whose gradient it computes; else -1.
    """

    operator: str
    call: int
    forward_ns: int
    output_bytes: int
    scratch_bytes: int
    reads: tuple[int, ...]
    produces: tuple[int, ...]
    writes: tuple[int, ...]
    is_random: bool
    is_view: bool
    private_generator: bool
    fills_argument: bool
    counted: bool
    forward_of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """Describe one call of a module's forward.

    Attributes:
        module: Dotted path; "" is the model itself.
        kind: Class name.
        index: Which call of this module within the step, from 0.
        parent: The call it was made from, into `Profile.calls`; -1 for the model's own.
        start: First operator it ran.
        stop: One past its last operator.
        training: The module's mode.
        hooked: It carries forward hooks of the user's.
        findings: What it changed besides its output, in words; such a call cannot be replayed as it is.
        differentiable: A tensor among its arguments needs a gradient.
    """

    module: str
    kind: str
    index: int
    parent: int
    start: int
    stop: int
    training: bool
    hooked: bool
    findings: tuple[str, ...]
    differentiable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Describe one storage of the step, counted once however many views it has.

    Attributes:
        nbytes: Its bytes.
        kind: What it is.
        name: Name of the parameter or buffer.
        born: The operator that made it; -1 when it was there before.
        last: Last operator during which it is alive; None when it outlives the step.
        last_unsaved: The same when autograd saves nothing (forward alone); None when it outlives the forward.
        saved_by: Forward operators that save it for backward.
        read_by: Forward operators that read it.
        written_by: Forward operators that change it in place.
    """

    nbytes: int
    kind: Kind
    name: str
    born: int
    last: int | None
    last_unsaved: int | None
    saved_by: tuple[int, ...]
    read_by: tuple[int, ...]
    written_by: tuple[int, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Hold everything a planner needs to know of one training step.

    Attributes:
        model: Class name of the model.
        device: Device of its parameters.
        operators: Forward, loss and backward operators, in execution order.
        calls: Module calls, in order of their beginning.
        storages: Every storage seen.
        stages: The forward and the loss cut into a chain.
        forward_stop: Operators of the model's forward.
        loss_stop: Operators of forward and loss.
        parts: Fixed parts and gradients.
        forward_ns: Time of forward and loss, nanoseconds.
        step_ns: Time of forward, loss and backward; the optimizer is not counted.
        bytes_from: How bytes were obtained.
        times_from: How operator times were obtained.
        step_time_from: How `step_ns` was obtained.
        accumulation: Whether gradients exist from the beginning.
        unseen_bytes: What the allocator's peak in a real step was above the recorded one; counted as alive throughout.
        notes: What a reader of the figures must know.
    """

    schema_version: int = 1
    model: str
    device: str
    operators: tuple[Operator, ...]
    calls: tuple[ModuleCall, ...]
    storages: tuple[Storage, ...]
    stages: tuple[StageSpan, ...]
    forward_stop: int
    loss_stop: int
    parts: Parts
    forward_ns: int
    step_ns: int
    bytes_from: Literal["dry run", "real step"]
    times_from: str
    step_time_from: str
    accumulation: bool
    unseen_bytes: int = 0
    notes: tuple[str, ...] = field(default=())

    def live_bytes(self) -> np.ndarray:
        """Return the bytes alive at each operator's worst moment, optimizer state included; shape (operators,)."""
        total = sum(self.live_bytes_by_kind().values()) + self.unseen_bytes
        return np.asarray(total) + np.array([operator.scratch_bytes for operator in self.operators], dtype=np.int64)

    def live_bytes_by_kind(self) -> dict[str, np.ndarray]:
        """Return the same without scratch, by category: parameters, optimizer, gradients, activations, ..."""
        count = len(self.operators)
        live = live_bytes_by_kind(self.storages, loss_stop=self.loss_stop, replayed=np.zeros(count, dtype=np.bool_))
        live["optimizer"] = np.full(count, self.parts.optimizer, dtype=np.int64)
        return live

    def peak_bytes(self) -> int:
        """Return the peak of the whole unplanned step, optimizer included, in bytes."""
        return max(int(self.live_bytes().max(initial=0)), self.parts.optimizer_step_peak)

    def __str__(self) -> str:
        parts = self.parts
        held = ("parameters", parts.parameters), ("gradients", parts.gradients), ("optimizer state", parts.optimizer)
        lines = [
            f"{self.model} on {self.device}: peak {self.peak_bytes() / 2**20:,.1f} MiB in the {self.peak_moment()}; "
            f"step {self.step_ns / 1e6:,.1f} ms, forward {self.forward_ns / 1e6:,.1f} ms; {len(self.stages)} stages",
            ", ".join(f"{name} {nbytes / 2**20:,.1f} MiB" for name, nbytes in held),
            f"bytes: {self.bytes_from}; times: {self.times_from}; step time: {self.step_time_from}",
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def fixed_bytes(self) -> int:
        """Return what is alive throughout: parameters, buffers, batch, optimizer state, accumulated gradients."""
        parts = self.parts
        fixed = parts.parameters + parts.buffers + parts.batch + parts.optimizer + self.unseen_bytes
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
        target = Path(path)
        temporary = target.with_name(f".{target.name}.partial")
        temporary.write_text(self.to_json())
        temporary.replace(target)

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
