"""One recorded step as data: its operators, module calls and storages, and the bytes alive at each operator.

The same record serves planned and unplanned steps, fake and real ones, and one rank's part of a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Kind = Literal["parameter", "buffer", "batch", "gradient", "activation", "unsharded", "communication"]
CATEGORIES = (
    "parameter",
    "buffer",
    "batch",
    "gradient",
    "activation",
    "recomputed",
    "temporary",
    "unsharded",
    "communication",
)


BETWEEN_RANKS = ("c10d.", "_c10d_functional.", "fsdp.")
"""Beginnings of the names of operators that fill, send or receive buffers between ranks."""
CHANGES_ARGUMENT = (
    "changes an object passed to it (a cache? put use_cache=False into the batch, or set model.config.use_cache = "
    "False)"
)
"""What a call changed besides its output where that is no tensor but, most likely, a key-value cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Describe one ATen call of the step, forward or backward.

    Attributes:
        operator: Overload name, such as "aten.addmm.default".
        call: Index of the innermost module call it ran in, into `StepRecord.calls`; -1 outside the model.
        forward_ns: Its own time in forward, nanoseconds; 0 for backward operators, and where nothing was timed.
        output_bytes: Bytes of the storages it made.
        scratch_bytes: Bytes it allocates and frees inside itself.
        reads: Storages among its arguments.
        produces: Storages it made.
        writes: Storages it changed in place.
        is_random: It draws from torch's random state.
        is_view: Its outputs share its inputs' storage.
        private_generator: It was given a generator of its own.
        fills_argument: It writes to an argument other than its first without returning it (RReLU's noise).
        counted: It counts among the calls that a save set numbers; see `is_counted`.
        in_function: A custom autograd function ran it, or ended with it; a record of what is called does not see those.
        replayed: It runs in backward to compute again what a checkpointed segment dropped.
        forward_of: For a backward operator, the forward operator whose gradient it computes; else -1.
        flops: Floating-point operations of products, convolutions and attention; see `roofline.Cost`.
        moved_bytes: Bytes of its arguments and results; 0 for a view.
        dtype: Name of its first floating-point argument's type.
    """

    operator: str
    call: int
    forward_ns: int = 0
    output_bytes: int
    scratch_bytes: int = 0
    reads: tuple[int, ...]
    produces: tuple[int, ...]
    writes: tuple[int, ...]
    is_random: bool
    is_view: bool
    private_generator: bool
    fills_argument: bool
    counted: bool
    in_function: bool = False
    replayed: bool = False
    forward_of: int = -1
    flops: int = 0
    moved_bytes: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """Describe one call of a module's forward.

    Attributes:
        module: Dotted path; "" is the model itself.
        kind: Class name.
        index: Which of this module's calls with gradients within the step, from 0; one without gradients has an index
            of its own below 0, and is no member of a segment.
        parent: The call it was made from, into `StepRecord.calls`; -1 for the model's own.
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
        read_by: Operators that read it.
        written_by: Operators that change it in place.
        stream: Which stream it was made on, numbered as they come, whose pool of memory it came from; 0 is the default
            one.
    """

    nbytes: int
    kind: Kind
    name: str
    born: int
    last: int | None
    last_unsaved: int | None = None
    saved_by: tuple[int, ...] = ()
    read_by: tuple[int, ...] = ()
    written_by: tuple[int, ...] = ()
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Hold what one step did.

    Attributes:
        operators: Forward, loss and backward operators, in execution order.
        calls: Module calls, in order of their beginning; those of replays too.
        storages: Every storage seen.
        forward_stop: Operators of the model's forward.
        loss_stop: Operators of forward and loss.
        loss_is_assumed: The mean of the outputs was taken, for want of a loss.
        scratch_keys: By operator, what a `ScratchMeter` knows its workspace under; None where it takes none. Empty once
            the workspace is filled in for good.
    """

    operators: tuple[Operator, ...]
    calls: tuple[ModuleCall, ...]
    storages: tuple[Storage, ...]
    forward_stop: int
    loss_stop: int
    loss_is_assumed: bool = False
    scratch_keys: tuple[Hashable, ...] = ()

    def live_bytes(self) -> IntArray:
        """Return the bytes alive at each operator's worst moment, outputs and scratch included; shape (operators,)."""
        return alive(self.storages, len(self.operators)) + self.scratch_bytes()

    def live_bytes_by_kind(self) -> dict[str, IntArray]:
        """Return the same without scratch, by category.

        What forward or loss made and what is still alive in backward is an "activation"; what replays made is
        "recomputed"; what else is neither parameter, buffer, batch nor gradient is "temporary".
        """
        sorted_out: dict[str, list[Storage]] = {category: [] for category in CATEGORIES}
        for storage in self.storages:
            sorted_out[self.category_of(storage)].append(storage)
        return {category: alive(held, len(self.operators)) for category, held in sorted_out.items()}

    def category_of(self, storage: Storage) -> str:
        """Return the category that `live_bytes_by_kind` counts a storage in."""
        begin = max(storage.born, 0)
        if storage.kind != "activation" or begin >= len(self.operators):
            return storage.kind
        if begin < self.loss_stop:
            return "activation" if storage.last is None or storage.last >= self.loss_stop else "temporary"
        # The first operator of backward makes the loss's own gradient, outside every replay.
        return "recomputed" if self.operators[begin].replayed and begin > self.loss_stop else "temporary"

    def scratch_bytes(self) -> IntArray:
        """Return the bytes that each operator allocates and frees inside itself; shape (operators,)."""
        return np.array([operator.scratch_bytes for operator in self.operators], dtype=np.int64)

    def peak_bytes(self) -> int:
        """Return the most bytes alive at any moment of the record."""
        return int(self.live_bytes().max(initial=0))

    def entry_bytes(self) -> int:
        """Return the bytes that were there before the first operator."""
        return sum(storage.nbytes for storage in self.storages if storage.born < 0)

    def total_bytes(self, kind: Kind) -> int:
        """Return the bytes of all storages of a kind."""
        return sum(storage.nbytes for storage in self.storages if storage.kind == kind)


def alive(storages: Iterable[Storage], operators: int, *, before: bool = False) -> IntArray:
    """Return the bytes of storages alive at each operator; shape (operators,).

    Args:
        storages: The storages; their `born` and `last` count operators.
        operators: How many there are.
        before: Count at the moments just before each operator and after the last one instead; shape (operators + 1,).
    """
    change = np.zeros(operators + 2, dtype=np.int64)
    for storage in storages:
        begin = storage.born + 1 if before else max(storage.born, 0)
        if storage.last is None or storage.last >= storage.born:
            change[max(begin, 0)] += storage.nbytes
            if storage.last is not None:
                change[max(begin, storage.last + 1)] -= storage.nbytes
    return np.cumsum(change)[: operators + 1 if before else operators]
