"""Record the steps of one run of a segment, tensors by reference, and run them again.

A tape keeps no tensor alive that it saw produced, so a segment's insides die as soon as their user lets go of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .errors import ApplyError
from .internals import next_node_number, node_number
from .packing import Inputs, PackedCall, Slot, pack_call, rebuild_call, refuse_iterators, tensors_in

_HOOK_NODE = "BackwardHookFunctionBackward"


class Entry:
    """One recorded step: a call of a module or of a torch function."""

    __slots__ = ("arguments", "dying", "function", "gradients", "outputs")

    def __init__(self, function: Callable[..., Any], arguments: PackedCall, gradients: bool) -> None:
        self.function = function
        self.arguments = arguments
        self.gradients = gradients
        self.outputs: list[int] = []
        # Tensors that no later step uses.
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
        *("_capture", "_captured", "_detached", "_first_node", "_inputs", "_known"),
        *("_last_use", "_made", "_size", "_where", "entries"),
    )

    def __init__(
        self, where: str, inputs: Inputs, capture: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    ) -> None:
        self._where = where
        self._capture: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = capture
        self._captured: dict[int, Callable[[], torch.Tensor]] = {}
        self._known = {id(t): (weakref.ref(t), number) for number, t in enumerate(inputs.tensors)}
        self._inputs = self._size = len(inputs.tensors)
        self._detached: set[int] = set()
        # A full backward hook puts another tensor in an output's place, which may then die; its node lives on.
        self._made: dict[tuple[int, int], int] = {}
        self._last_use: dict[int, int] = {}
        self._first_node = next_node_number()
        self.entries: list[Entry] = []

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put a step on the tape, before or after it runs; `finish` adds what it returned."""
        objects: list[Any] = []
        arguments = pack_call(args, kwargs, self._slot, objects)
        if objects:
            refuse_iterators(objects, self._where)
        self.entries.append(Entry(function, arguments, torch.is_grad_enabled()))

    def finish(self, output: Any) -> None:
        """Number the output tensors of the last recorded step."""
        outputs = self.entries[-1].outputs
        for tensor in tensors_in(output):
            number = self._find(tensor)
            if number is None:
                number = self._remember(tensor)
                node = tensor.grad_fn
                if node is not None:
                    self._made[node_number(node), tensor.output_nr] = number
                elif not self.entries[-1].gradients:
                    self._detached.add(number)
            outputs.append(number)

    def is_external(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made outside the tape."""
        number = self._find(tensor)
        return number is None or number < self._inputs or number in self._captured

    def close(self) -> None:
        """Forget which tensors the numbers stood for; nothing is recorded after this."""
        self._known.clear()
        for number, step in self._last_use.items():
            self.entries[step].dying.append(number)
        # The capturing run owns this tape: a way back would be a cycle, and its memory would wait for the collector.
        self._capture = None

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Run the steps again, from the inputs' tensors."""
        values = dict(enumerate(inputs))
        for number, restore in self._captured.items():
            values[number] = restore()
        last_use = self._last_use
        for step, entry in enumerate(self.entries):
            args, kwargs = rebuild_call(entry.arguments, values)
            if entry.gradients:
                output = entry.function(*args, **kwargs)
            else:
                with torch.no_grad():
                    output = entry.function(*args, **kwargs)
            del args, kwargs
            if entry.outputs:
                produced = zip(entry.outputs, tensors_in(output), strict=True)
                values.update([(n, tensor) for n, tensor in produced if last_use.get(n, -1) > step])
            del output
            for number in entry.dying:
                values.pop(number, None)

    def _slot(self, tensor: torch.Tensor) -> Slot:
        number = self._find(tensor)
        if number is None:
            number = self._capture_outside(tensor)
        elif number in self._detached and tensor.requires_grad:
            # A custom function computes without gradients and joins the graph afterwards; only the first was seen.
            number = self._behind_hook(tensor, tensor.grad_fn)
        self._last_use[number] = len(self.entries)
        return Slot(number)

    def _find(self, tensor: torch.Tensor) -> int | None:
        known = self._known.get(id(tensor))
        # An id can come back after its tensor died; the weak reference tells.
        return known[1] if known is not None and known[0]() is tensor else None

    def _remember(self, tensor: torch.Tensor) -> int:
        number = self._size
        self._size += 1
        self._known[id(tensor)] = (weakref.ref(tensor), number)
        return number

    def _capture_outside(self, tensor: torch.Tensor) -> int:
        node = tensor.grad_fn
        if node is not None and node_number(node) >= self._first_node:
            return self._behind_hook(tensor, node)
        assert self._capture is not None
        number = self._remember(tensor)
        self._captured[number] = self._capture(tensor)
        return number

    def _behind_hook(self, tensor: torch.Tensor, node: Any) -> int:
        """Find the output that a full backward hook of its module stands in front of."""
        if node.name() == _HOOK_NODE:
            inner, output = node.next_functions[tensor.output_nr]
            number = self._made.get((node_number(inner), output))
            if number is not None:
                self._known[id(tensor)] = (weakref.ref(tensor), number)
                return number
        raise self._unrecorded(node)

    def _unrecorded(self, node: Any) -> ApplyError:
        return ApplyError(
            f"segment {self._where}: a tensor made by {node.name()} between the members reached one of them, and that "
            "step could not be recorded (a custom autograd function?); plan each member as a segment of its own"
        )
