"""How values are told apart without running code of theirs: plain data by value, containers by items, else by identity.

What is compared between forward and replay is told so: what modules hold (`state.py`) and the foreign objects among a
segment's arguments (`region.py`).
"""

from __future__ import annotations

from enum import Enum
from typing import Any, cast

import torch
from torch import nn

from .internals import versions_of

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
CONTAINERS = (list, tuple, dict, set, frozenset)
MOST_ITEMS = 256
"""A longer container is data rather than a setting, and is not looked into."""
_DEPTH = 3
_BY_IDENTITY = (torch.Tensor, nn.Module, type, Enum)


class _Identity(tuple[Any, ...]):
    """Stand for an object, whose own == could do anything; equal to no plain data."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<object {self[0]:#x}>"


def plainly(value: object) -> object:
    """Tell plain data by value, all else by identity."""
    return value if type(value) in PLAIN else _Identity((id(value),))


def with_version(value: object) -> object:
    """Tell a tensor by identity, version and requires_grad, all else plainly."""
    if isinstance(value, torch.Tensor):
        return _Identity((id(value), *versions_of([value]), value.requires_grad))
    return plainly(value)


def by_items(value: object) -> object:
    """Tell a container by its items, of those inside it only that they are there; all else with its version."""
    if not isinstance(value, CONTAINERS):
        return with_version(value)
    if len(value) > MOST_ITEMS:
        return _Identity((id(value), len(value)))
    if isinstance(value, dict):
        # Past any method of its own: a mapping of transformers' imports what it maps to.
        items = dict.items(cast("dict[Any, object]", value))
        return {key if type(key) in PLAIN else id(key): _item(item) for key, item in items}
    told = [_item(item) for item in cast("list[object]", value)]
    return set(told) if isinstance(value, (set, frozenset)) else told


def _item(item: object) -> object:
    return type(item) if isinstance(item, CONTAINERS) else with_version(item)


def by_attributes(objects: list[Any]) -> list[object]:
    """Tell foreign objects by their attributes and what is in these, to a small depth; tensors by identity alone."""
    return [_inside(vars(value), _DEPTH) for value in objects if hasattr(value, "__dict__")]


def _inside(value: object, depth: int) -> object:
    if depth and isinstance(value, dict):
        return [(key, _inside(item, depth - 1)) for key, item in dict.items(cast("dict[object, object]", value))]
    if depth and isinstance(value, (list, tuple)):
        return [_inside(item, depth - 1) for item in cast("list[object]", value)]
    if depth and hasattr(value, "__dict__") and not isinstance(value, _BY_IDENTITY):
        return _inside(vars(value), depth - 1)
    return plainly(value)
