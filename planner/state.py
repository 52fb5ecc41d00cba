"""What the modules of a segment hold at a moment, so that a replay notices where it is not what forward saw."""

from __future__ import annotations

import enum
from copy import copy
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from torch import distributed, nn

from .errors import ApplyError, ReplayStateError
from .internals import buffers_of, is_sharded, parameters_of

State = list[Any]
_SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_ITEMS = 256
"""A longer container is data rather than a setting, and is not looked into."""
_DEPTH = 3
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class Watched:
    """Everything that a replay reads from a segment's modules besides their modes and the buffers it is given.

    Tensors are told by identity, version and requires_grad; attributes of plain data, like a dropout's `p` or a list of
    adapters' names, by value, and so are the attributes of configurations and the like.

    Args:
        root: The model.
        where: The segment's name, for errors.
        modules: All modules of the segment, with their paths.
        restored: Buffers that a replay is given as forward saw them.

    Attributes:
        modules: The modules.
    """

    __slots__ = (
        *("_containers", "_names", "_objects", "_paths", "_readers", "_registered"),
        *("_root", "_scalars", "_tensors", "_where", "modules"),
    )

    def __init__(
        self, root: nn.Module, where: str, modules: dict[nn.Module, str], restored: list[tuple[nn.Module, str]]
    ) -> None:
        self._root = root
        self._where = where
        # Parameters and buffers by the dictionary they are registered in, the others by the module.
        self._registered: list[tuple[dict[str, Any], str]] = []
        self._tensors: list[tuple[nn.Module, str]] = []
        self._scalars: list[tuple[nn.Module, tuple[str, ...]]] = []
        self._containers: list[tuple[nn.Module, str]] = []
        self._objects: list[tuple[nn.Module, str]] = []
        self._paths = modules
        self.modules = list(modules)
        # Kind and path of every tensor.
        self._names: list[tuple[str, str]] = []
        seen: set[int] = set()
        for module in modules:
            registries: dict[str, dict[str, Any]] = {"parameter": parameters_of(module), "buffer": buffers_of(module)}
            for kind, registry in registries.items():
                watched = [n for n, value in registry.items() if value is not None and (module, n) not in restored]
                self._registered += [(registry, name) for name in watched]
                self._names += [(kind, self._path(module, name)) for name in watched]
            own = {n: v for n, v in vars(module).items() if n not in _OF_EVERY_MODULE and not _is_size(module, v)}
            scalars = tuple(name for name, value in own.items() if self._watch(module, name, value, seen))
            if scalars:
                self._scalars.append((module, scalars))
        # One call reads all of a module's.
        self._readers = [(attrgetter(*names), module) for module, names in self._scalars]
        self._names += [("tensor", self._path(module, name)) for module, name in self._tensors]

    def _watch(self, module: nn.Module, name: str, value: object, seen: set[int]) -> bool:
        """Watch an attribute, and return whether it is plain data in one piece, which is left to the caller."""
        if isinstance(value, torch.Tensor):
            self._tensors.append((module, name))
        elif _is_plain(value, _DEPTH):
            if not isinstance(value, (list, dict, set)):
                return True
            self._containers.append((module, name))
        elif id(value) not in seen and hasattr(value, "__dict__") and _is_plain(vars(value), _DEPTH):
            # Many modules share one configuration.
            seen.add(id(value))
            self._objects.append((module, name))
        return False

    def now(self) -> State:
        """Return what is watched, as it is now; equal states are equal lists.

        Raises:
            ApplyError: Something was taken away.
        """
        # With as little Python as can be, as this runs twice for every region.
        try:
            tensors: list[Any] = [registry[name] for registry, name in self._registered]
            if self._tensors:
                tensors += [getattr(module, name) for module, name in self._tensors]
            state: State = [*map(id, tensors), *map(_version, tensors), *map(_requires_grad, tensors)]
            state += [read(module) for read, module in self._readers]
            if self._containers:
                state += [copy(getattr(module, name)) for module, name in self._containers]
            if self._objects:
                state += [vars(getattr(module, name)).copy() for module, name in self._objects]
        except (KeyError, AttributeError, TypeError):
            raise ApplyError(
                f"segment {self._where}: {', '.join(self._gone())} is gone since the plan was applied (pruning, "
                "weight_norm?); call remove() before such a change and make the plan again"
            ) from None
        return state

    def _gone(self) -> list[str]:
        scalars = [(module, name) for module, names in self._scalars for name in names]
        kept = chain(self._tensors, scalars, self._containers, self._objects)
        lost = [self._path(module, name) for module, name in kept if not hasattr(module, name)]
        return [name for registry, name in self._registered if registry.get(name) is None] + lost

    def _path(self, module: nn.Module, name: str) -> str:
        path = self._paths[module]
        return f"{path}.{name}" if path else name

    def refuse_change(self, before: State, after: State) -> None:
        """Refuse a replay that would not see what forward saw.

        Raises:
            ReplayStateError: What decides the replay's result has changed.
        """
        change = self._changed_tensor(before, after) or self._changed_setting(before, after)
        if change:
            raise ReplayStateError(
                f"segment {self._where}: {change}; its replay would give wrong gradients. Run backward before the "
                "change, or plan without this segment"
            )

    def _changed_tensor(self, before: State, after: State) -> str:
        # Under FSDP2 a parameter's shard and its gathered form take turns, which says nothing about its value.
        if is_sharded(self._root):
            return ""
        count = len(self._names)
        for position, (kind, path) in enumerate(self._names):
            was, now = before[position : 3 * count : count], after[position : 3 * count : count]
            if was[0] != now[0]:
                why = "weights substituted by functional_call or a parametrization are gone"
                return f"{kind} {path!r} is another tensor ({why})"
            if was[1] != now[1] and not (kind == "buffer" and _buffers_are_broadcast()):
                why = " (an optimizer step between forward and backward?)" if kind == "parameter" else ""
                return f"{kind} {path!r} was changed in place{why}"
            if was[2] != now[2]:
                return f"{kind} {path!r} has requires_grad {now[2]}, {was[2]} in forward"
        return ""

    def _changed_setting(self, before: State, after: State) -> str:
        was, now = self._settings(before), self._settings(after)
        for path in {**was, **now}:
            if path not in was or path not in now or was[path] != now[path]:
                return f"attribute {path!r} is {_short(now.get(path))}, {_short(was.get(path))} in forward"
        return ""

    def _settings(self, state: State) -> dict[str, object]:
        """Return attributes of plain data by path."""
        values = iter(state[3 * len(self._names) :])
        found: dict[str, object] = {}
        for module, names in self._scalars:
            read = next(values)
            found.update(
                zip([self._path(module, name) for name in names], read if len(names) > 1 else (read,), strict=True)
            )
        found.update((self._path(module, name), next(values)) for module, name in self._containers)
        for module, name in self._objects:
            found.update((f"{self._path(module, name)}.{key}", value) for key, value in next(values).items())
        return found


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, _SCALARS):
        return True
    if not depth or not isinstance(value, (tuple, list, dict, set, frozenset)):
        return False
    items = cast("dict[object, object]", value).values() if isinstance(value, dict) else cast("list[object]", value)
    return len(items) <= _ITEMS and all(_is_plain(item, depth - 1) for item in items)


def _is_size(module: nn.Module, value: object) -> bool:
    """Return whether a value is one of the sizes of torch's own layers, which their weights fix."""
    if not type(module).__module__.startswith("torch.nn.modules"):
        return False
    sizes = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return all(type(size) is int for size in sizes)


def _buffers_are_broadcast() -> bool:
    """Return whether a buffer's version tells nothing: DDP copies all of them in place before every forward."""
    return distributed.is_available() and distributed.is_initialized()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
