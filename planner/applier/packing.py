"""Take arguments apart into tensors and the rest, and put them together again with other tensors.

A packed value holds no tensor: each is replaced by a numbered slot. Constants and foreign objects are kept as they are.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ApplyError

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.nn.Module, enum.Enum, type),
)


# The positional arguments and the keyword arguments of a call; most hold tensors directly, which is the short way.
PackedCall = tuple[list[Any], dict[str, Any]]


class Slot:
    """Stand for the tensor of a given number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Registered:
    """Stand for a container that only its pytree registration can take apart, like a model output."""

    __slots__ = ("children", "context", "unflatten")

    def __init__(self, children: list[Any], unflatten: Callable[..., Any], context: Any) -> None:
        self.children = children
        self.unflatten = unflatten
        self.context = context


class _Dataclass:
    """Stand for an instance of a dataclass that is not registered as a pytree."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields


def pack(value: Any, slot: Callable[[torch.Tensor], Any], objects: list[Any]) -> Any:
    """Return the value with every tensor replaced by what `slot` gives for it.

    Args:
        value: An argument or output: a tensor, a constant, or containers of them.
        slot: Gives a tensor's stand-in.
        objects: Receives every foreign object met; such an object is kept as it is.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return slot(value)
    if kind is tuple:
        return tuple([pack(item, slot, objects) for item in value])
    if kind is dict:
        return {key: pack(item, slot, objects) for key, item in value.items()}
    if kind is list:
        return [pack(item, slot, objects) for item in value]
    if isinstance(value, _CONSTANTS):
        return value
    if kind in pytree.SUPPORTED_NODES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        # Not by tree_flatten: its is_leaf would hold the value in a cycle, and with it the value's whole graph.
        registered: Any = kind if kind in pytree.SUPPORTED_NODES else namedtuple
        node = pytree.SUPPORTED_NODES[registered]
        children, context = node.flatten_fn(value)
        return _Registered([pack(child, slot, objects) for child in children], node.unflatten_fn, context)
    if dataclasses.is_dataclass(value):
        # Fields may lie in slots; attributes that are no fields count as well.
        names = dict.fromkeys((*(entry.name for entry in dataclasses.fields(value)), *getattr(value, "__dict__", ())))
        return _Dataclass(kind, {n: pack(getattr(value, n), slot, objects) for n in names if hasattr(value, n)})
    objects.append(value)
    return value


def rebuild(template: Any, values: Mapping[int, torch.Tensor] | Sequence[torch.Tensor]) -> Any:
    """Return a packed value with fresh containers, and the slots filled from `values`."""
    kind = type(template)
    if kind is Slot:
        return values[template.number]
    if kind is tuple:
        return tuple([rebuild(item, values) for item in template])
    if kind is dict:
        return {key: rebuild(item, values) for key, item in template.items()}
    if kind is list:
        return [rebuild(item, values) for item in template]
    if kind is _Registered:
        return template.unflatten([rebuild(child, values) for child in template.children], template.context)
    if kind is _Dataclass:
        copy = object.__new__(template.kind)
        for name, item in template.fields.items():
            object.__setattr__(copy, name, rebuild(item, values))
        return copy
    return template


def pack_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], slot: Callable[[torch.Tensor], Any], objects: list[Any]
) -> PackedCall:
    """Return the arguments of a call, packed."""
    tensor = torch.Tensor
    return (
        [slot(item) if isinstance(item, tensor) else pack(item, slot, objects) for item in args],
        pack(kwargs, slot, objects) if kwargs else kwargs,
    )


def rebuild_call(
    packed: PackedCall, values: Mapping[int, torch.Tensor] | Sequence[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a packed call, the slots filled from `values`."""
    args, kwargs = packed
    return (
        [values[item.number] if type(item) is Slot else rebuild(item, values) for item in args],
        rebuild(kwargs, values) if kwargs else kwargs,
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value in the order `pack` meets them."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    pack(value, found.append, [])
    return found


class Inputs:
    """Collect the distinct tensors of a call's arguments, with the arguments packed around them."""

    __slots__ = ("_numbers", "objects", "template", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.template = pack_call(args, kwargs, self._slot, self.objects)

    def _slot(self, tensor: torch.Tensor) -> Slot:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return Slot(number)


def refuse_iterators(objects: list[Any], where: str) -> None:
    """Refuse arguments that a replay would find used up.

    Raises:
        ApplyError: An argument is an iterator.
    """
    for value in objects:
        if isinstance(value, Iterator):
            raise ApplyError(
                f"segment {where}: an argument is a {type(value).__name__}, which a replay would find used up; "
                "pass a list instead, or plan without this segment"
            )
