"""What containers hold, read and put back in place by the methods of their base classes, past any overridden ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch

from .places import MISSING

_DEPTH = 3
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


_BASES = (OrderedDict, dict, list, set, deque)


def _base(container: object) -> Any:
    kind = type(container)
    return kind if kind in _BASES else next(base for base in _BASES if isinstance(container, base))


def holds_the_same(now: list[Any], before: list[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def flat(container: Any) -> list[Any]:
    """List what a container holds: a dictionary's keys and then its values, or items; a set's in order of identity."""
    if type(container) is dict:
        return [*container, *container.values()]
    base = _base(container)
    if issubclass(base, dict):
        return [*base.keys(container), *base.values(container)]
    items: list[Any] = list(base.__iter__(container))
    return sorted(items, key=id) if base is set else items


def items_of(container: Any) -> list[Any]:
    """List the pairs of a dictionary, or the items of a list, tuple, set or deque."""
    if isinstance(container, dict):
        base: Any = _base(container)
        return list(zip(base.keys(container), base.values(container), strict=True))
    return list(next(base for base in _SEQUENCES if isinstance(container, base)).__iter__(container))


def refill(container: Any, contents: list[Any]) -> None:
    """Let a container hold again what `flat` listed."""
    base = _base(container)
    base.clear(container)
    if issubclass(base, dict):
        half = len(contents) // 2
        for key, value in zip(contents[:half], contents[half:], strict=True):
            base.__setitem__(container, key, value)
    elif base is set:
        base.update(container, contents)
    else:
        base.extend(container, contents)


def replace_items(container: Any, others: Mapping[int, object]) -> None:
    """Put other objects in place of those in a dictionary or list that have the given identities."""
    base = _base(container)
    if base in (set, deque) or not base.__len__(container):
        return
    items: list[Any] = list(base.items(container) if issubclass(base, dict) else enumerate(base.__iter__(container)))
    for key, value in items:
        if id(value) in others:
            base.__setitem__(container, key, others[id(value)])


def left_in(container: Any, before: list[Any], now: list[Any]) -> dict[str, object]:
    """Return what a container holds otherwise than before, as plain data: by key, or under "" all of it."""
    if not isinstance(container, dict):
        return {"": picture(container)}
    was = dict(zip(before[: len(before) // 2], before[len(before) // 2 :], strict=True))
    new = dict(zip(now[: len(now) // 2], now[len(now) // 2 :], strict=True))
    keys = [key for key in {**was, **new} if not is_equal_data(was.get(key, MISSING), new.get(key, MISSING))]
    return {f"[{key!r}]" if isinstance(key, _PLAIN) else "[...]": picture(new.get(key, MISSING)) for key in keys}


def picture(value: object, depth: int = 0) -> object:
    """Reduce a value to plain data that another run leaves alike: of objects, their class is told."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth < _DEPTH and isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        inside = [picture(item, depth + 1) for item in items_of(value)]
        return type(value).__name__, sorted(inside, key=repr) if isinstance(value, (set, frozenset)) else inside
    return type(value).__name__


def changed_in(container: Any, before: list[Any], now: list[Any]) -> str | None:
    """Say which keys or items differ; None where plain data is equal again."""
    if isinstance(container, dict):
        was = dict(zip(before[: len(before) // 2], before[len(before) // 2 :], strict=True))
        new = dict(zip(now[: len(now) // 2], now[len(now) // 2 :], strict=True))
        keys = [k for k in {**was, **new} if not is_equal_data(was.get(k, MISSING), new.get(k, MISSING))]
        return ", its " + ", ".join(str(key) for key in keys[:3]) if keys else None
    same = len(before) == len(now) and all(is_equal_data(a, b) for a, b in zip(before, now, strict=True))
    return None if same else ", what it holds"


def is_equal_data(a: object, b: object) -> bool:
    """Return whether two objects are one, or equal plain data."""
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)
