"""Record the steps of one run of a segment, tensors by reference, and run them again.

A tape keeps no tensor alive that it saw produced, so a segment's insides die as soon as their user lets go of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..errors import ApplyError
from .internals import Autocast, autocast_is_on, autocast_state, next_node_number, node_number
from .packing import Inputs, PackedCall, Slot, pack_call, rebuild_call, refuse_iterators, tensors_in

_HOOK_NODE = "BackwardHookFunctionBackward"


class Entry:
    """One recorded step: a call of a module or of a torch function.

    Attributes:
        function: What is called.
        arguments: With what.
        gradients: Whether gradients were on.
        autocast: What autocast was, if it was not as at the tape's beginning.
        outputs: The tensors it returned, by number; once the tape is closed, None for one that no later step uses, and
            empty where none is used.
        dying: The tensors that no later step uses, by number.
    """

    __slots__ = ("arguments", "autocast", "dying", "function", "gradients", "outputs")

    def __init__(
        self, function: Callable[..., Any], arguments: PackedCall, gradients: bool, autocast: Autocast | None
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.gradients = gradients
        self.autocast = autocast
        self.outputs: list[int | None] = []
        self.dying: list[int] = []


class Tape:
    """Record steps and run them again.

    Tensors are numbered: the inputs first, then captured tensors and outputs as they are met.

    Args:
        where: The segment's name, for errors.
        inputs: The arguments of the first call; a replay receives their tensors.
        capture: Holds a tensor that comes from outside and is not an input; calling what it returns gives it back.
    """

    __slots__ = (
        *("_autocast", "_capture", "_captured", "_detached", "_first_node", "_inputs", "_known"),
        *("_last_use", "_made", "_where", "entries"),
    )

    def __init__(
        self, where: str, inputs: Inputs, capture: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    ) -> None:
        self._where = where
        self._capture: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = capture
        self._captured: dict[int, Callable[[], torch.Tensor]] = {}
        self._known = {id(t): (weakref.ref(t), Slot(number)) for number, t in enumerate(inputs.tensors)}
        self._inputs = len(inputs.tensors)
        # By tensor number, the last step that uses it; -1 for none.
        self._last_use = [-1] * self._inputs
        self._detached: set[int] = set()
        # A full backward hook puts another tensor in an output's place, which may then die; its node lives on.
        self._made: dict[tuple[int, int], int] = {}
        self._autocast = autocast_state() if autocast_is_on() else None
        self._first_node = next_node_number()
        self.entries: list[Entry] = []

    def record(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, gradients: bool = True
    ) -> None:
        """Put a step on the tape, before or after it runs; `finish` adds what it returned."""
        objects: list[Any] = []
        arguments = pack_call(args, kwargs, self._slot, objects)
        if objects:
            refuse_iterators(objects, self._where)
        now = autocast_state() if self._autocast is not None or autocast_is_on() else None
        autocast = None if now == self._autocast else now
        self.entries.append(Entry(function, arguments, gradients, autocast))

    def finish(self, output: Any) -> None:
        """Number the output tensors of the last recorded step."""
        entry = self.entries[-1]
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            slot = self._find(tensor)
            if slot is None:
                slot = self._remember(tensor)
                node = tensor.grad_fn
                if node is not None:
                    self._made[node_number(node), tensor.output_nr] = slot.number
                elif not entry.gradients:
                    self._detached.add(slot.number)
            entry.outputs.append(slot.number)

    def is_external(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made outside the tape."""
        slot = self._find(tensor)
        return slot is None or slot.number < self._inputs or slot.number in self._captured

    def close(self) -> None:
        """Forget which tensors the numbers stood for; nothing is recorded after this."""
        self.forget()
        last_use = self._last_use
        for step, entry in enumerate(self.entries):
            used = [number if number is not None and last_use[number] > step else None for number in entry.outputs]
            entry.outputs = used if any(number is not None for number in used) else []
        for number, step in enumerate(last_use):
            if step >= 0:
                self.entries[step].dying.append(number)

    def forget(self) -> None:
        """Let go of what leads back to the run, whose tape this is, and of what the numbers stood for."""
        self._known.clear()
        # The capturing run owns this tape: a way back would be a cycle, and its memory would wait for the collector.
        self._capture = None

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Run the steps again, from the inputs' tensors."""
        values: list[Any] = [None] * len(self._last_use)
        values[: self._inputs] = inputs
        for number, restore in self._captured.items():
            values[number] = restore()
        for entry in self.entries:
            args, kwargs = rebuild_call(entry.arguments, values)
            if entry.gradients and entry.autocast is None:
                output = entry.function(*args, **kwargs)
            else:
                with ExitStack() as contexts:
                    contexts.enter_context(torch.set_grad_enabled(entry.gradients))
                    for kind, dtype, enabled in entry.autocast or ():
                        contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                    output = entry.function(*args, **kwargs)
            del args, kwargs
            if entry.outputs:
                _keep(entry.outputs, output, values)
            del output
            for number in entry.dying:
                values[number] = None

    def _slot(self, tensor: torch.Tensor) -> Slot:
        slot = self._find(tensor)
        if slot is None:
            slot = self._capture_outside(tensor)
        elif slot.number in self._detached and tensor.requires_grad:
            # A custom function computes without gradients and joins the graph afterwards; only the first was seen.
            slot = self._behind_hook(tensor, tensor.grad_fn)
        self._last_use[slot.number] = len(self.entries)
        return slot

    def _find(self, tensor: torch.Tensor) -> Slot | None:
        known = self._known.get(id(tensor))
        # An id can come back after its tensor died; the weak reference tells.
        return known[1] if known is not None and known[0]() is tensor else None

    def _remember(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(len(self._last_use))
        self._last_use.append(-1)
        self._known[id(tensor)] = (weakref.ref(tensor), slot)
        return slot

    def _capture_outside(self, tensor: torch.Tensor) -> Slot:
        node = tensor.grad_fn
        if node is not None and node_number(node) >= self._first_node:
            return self._behind_hook(tensor, node)
        assert self._capture is not None
        slot = self._remember(tensor)
        self._captured[slot.number] = self._capture(tensor)
        return slot

    def _behind_hook(self, tensor: torch.Tensor, node: Any) -> Slot:
        """Find the output that a full backward hook of its module stands in front of."""
        if node.name() == _HOOK_NODE:
            inner, output = node.next_functions[tensor.output_nr]
            number = self._made.get((node_number(inner), output))
            if number is not None:
                slot = Slot(number)
                self._known[id(tensor)] = (weakref.ref(tensor), slot)
                return slot
        raise self._unrecorded(node)

    def _unrecorded(self, node: Any) -> ApplyError:
        return ApplyError(
            f"segment {self._where}: a tensor made by {node.name()} between the members reached one of them, and that "
            "step could not be recorded (a custom autograd function?); plan each member as a segment of its own"
        )


def _keep(numbers: list[int | None], output: Any, values: list[Any]) -> None:
    """Put the tensors of an output in the places of their numbers."""
    # A function of its own, so that no variable outlives it and keeps a tensor.
    tensors = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
    for number, tensor in zip(numbers, tensors, strict=True):
        if number is not None:
            values[number] = tensor
