"""What the modules of a segment hold at a moment, so that a replay notices where it is not what forward saw."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..errors import ApplyError, ReplayStateError
from .internals import buffers_of, children_of, forward_hook_registries, is_sharded, parameters_of
from .reads import Reads
from .told import CONTAINERS, MOST_ITEMS, PLAIN, by_items, plainly, with_version

_DEPTH = 3
_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "forward"))

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class State(NamedTuple):
    """What is watched, at a moment; equal states are equal tuples.

    The first three have an entry for each registered tensor, in one order; `settings` one for each of
    `Watched.words`, in that order.

    Attributes:
        identities: `id` of each tensor.
        versions: How often each was changed in place.
        requires_grad: Of each.
        settings: Attributes and variables, and what they hold, as `told.py` tells them.
        dictionaries: Copies of the children and hooks of modules. One list serves all states until one of them changes.
    """

    identities: list[int]
    versions: list[int]
    requires_grad: list[bool]
    settings: list[object]
    dictionaries: list[dict[Any, Any]]


class Watched:
    """Everything that a replay reads from a segment's modules besides their modes and the buffers it is given.

    Registered tensors are told by identity, version and requires_grad. Attributes of modules, and of the objects they
    keep (configurations, mostly): plain data by value, containers by what is in them, all else by identity. Children
    and the hooks that a replay runs by identity. Plain data in variables of the user's modules by value.

    Args:
        root: The model.
        where: The segment's name, for errors.
        modules: All modules of the segment, with their paths.
        restored: Buffers that a replay is given as forward saw them, and attributes that hooks make anew in it.
        called: The modules that a replay calls, hooks and all.
        reads: What the segment's code can read; of attributes and buffers nothing else counts.
    """

    __slots__ = (
        *("_containers", "_dictionaries", "_known", "_names", "_objects", "_owners", "_readers", "_registered"),
        *("_root", "_scalars", "_where", "reads"),
    )

    def __init__(
        self,
        root: nn.Module,
        where: str,
        modules: dict[nn.Module, str],
        restored: list[tuple[nn.Module, str]],
        called: list[nn.Module],
        reads: Reads,
    ) -> None:
        self._root = root
        self.reads = reads
        self._where = where
        self._registered: list[tuple[dict[str, Any], str]] = []
        # Kind and path of every registered tensor.
        self._names: list[tuple[str, str]] = []
        # What reads all plain attributes of an owner at once, with their paths; then containers and other objects.
        self._readers: list[tuple[attrgetter[Any], object]] = []
        self._scalars: list[str] = []
        self._containers: list[tuple[str, Any]] = []
        self._owners: list[tuple[str, object, str]] = []
        self._objects: list[tuple[str, object, str]] = []
        seen: set[int] = set()
        for module, path in modules.items():
            registries: dict[str, dict[str, Any]] = {"parameter": parameters_of(module), "buffer": buffers_of(module)}
            for kind, registry in registries.items():
                # Which parameters a replay reads is not asked: an optimizer step is told whatever it changes.
                read = [n for n in registry if kind == "parameter" or reads.reads_of(module, n)]
                watched = [n for n in read if registry[n] is not None and (module, n) not in restored]
                self._registered += [(registry, name) for name in watched]
                self._names += [(kind, _join(path, name)) for name in watched]
            left_out = _OF_EVERY_MODULE.union(n for owner, n in restored if owner is module)
            own = {n: v for n, v in vars(module).items() if n not in left_out and not _is_size(module, v)}
            self._watch_attributes(module, path, own, seen, _DEPTH)
            later = [n for n, value in buffers_of(module).items() if value is None and reads.reads_of(module, n)]
            self._objects += [
                (_join(path, name), module, name) for name in (*later, *sorted(reads.may_come(module) - left_out))
            ]
        self._dictionaries: list[dict[Any, Any]] = [children_of(module) for module in modules]
        self._dictionaries += [hooks for module in called for hooks in forward_hook_registries(module)]
        self._known = [dictionary.copy() for dictionary in self._dictionaries]

    def _watch_attributes(
        self, owner: object, path: str, attributes: dict[str, Any], seen: set[int], depth: int
    ) -> None:
        scalars: list[str] = []
        for name, value in attributes.items():
            if not self.reads.reads_of(owner, name):
                continue
            where = _join(path, name)
            if type(value) in PLAIN and name.isidentifier():
                scalars.append(name)
            elif isinstance(value, CONTAINERS):
                self._owners.append((where, owner, name))
                self._watch_inside(where, value, seen, depth)
            else:
                self._objects.append((where, owner, name))
                inside: Any = getattr(value, "__dict__", None)
                # Many modules share one configuration.
                if id(value) not in seen and depth and isinstance(inside, dict) and _is_settings(value, inside):
                    seen.add(id(value))
                    self._watch_attributes(value, where, inside, seen, depth - 1)
        if scalars:
            # With the first name twice a single one is read as a tuple too.
            self._readers.append((attrgetter(*scalars, scalars[0]), owner))
            self._scalars += [_join(path, name) for name in (*scalars, scalars[0])]

    def _watch_inside(self, path: str, container: Any, seen: set[int], depth: int) -> None:
        """Watch the containers inside a container; the outermost one is read from its owner."""
        items = list(container.values() if isinstance(container, dict) else container)
        if len(items) > MOST_ITEMS or not depth or id(container) in seen:
            return
        seen.add(id(container))
        for item in items:
            if isinstance(item, CONTAINERS):
                self._containers.append((path, item))
                self._watch_inside(path, item, seen, depth - 1)

    def now(self) -> tuple[State, list[Any]]:
        """Return what is watched, as it is now, and the tensors and objects that it tells by identity.

        Equal states are equal lists. Who compares a state later keeps the objects until then: another one could take
        the identity of one that is gone.

        Raises:
            ApplyError: Something was taken away.
        """
        # With as little Python as can be, as this runs twice for every region.
        try:
            held: list[Any] = [registry[name] for registry, name in self._registered]
            identities, versions = list(map(id, held)), list(map(_version, held))
            requires_grad = list(map(_requires_grad, held))
            settings: list[object] = []
            for read, owner in self._readers:
                settings += read(owner)
        except (KeyError, AttributeError) as error:
            gone = [name for registry, name in self._registered if registry.get(name) is None] or [str(error)]
            raise ApplyError(
                f"segment {self._where}: {', '.join(gone)} is gone since the plan was applied (pruning, weight_norm?); "
                "call remove() before such a change and make the plan again"
            ) from None
        # Plain data may have given way to something whose == does anything.
        if not PLAIN.issuperset(map(type, settings)):
            settings = list(map(plainly, settings))
        if self._owners:
            settings += [by_items(getattr(owner, name, None)) for _, owner, name in self._owners]
        if self._containers:
            settings += [by_items(container) for _, container in self._containers]
        if self._objects:
            objects = [getattr(owner, name, None) for _, owner, name in self._objects]
            settings += map(with_version, objects)
            # A tensor with a graph behind it is let go: it would keep the graph's memory.
            held += [value for value in objects if getattr(value, "grad_fn", None) is None]
        if self.reads.variables:
            settings += self.reads.variables.now()
        if self._dictionaries != self._known:
            self._known = [dictionary.copy() for dictionary in self._dictionaries]
        return State(identities, versions, requires_grad, settings, self._known), held

    @property
    def words(self) -> list[str]:
        """Name each of a state's settings: plain attributes, containers, other objects, then modules' variables."""
        paths = [*self._scalars, *(path for path, *_ in (*self._owners, *self._containers, *self._objects))]
        return [*(f"attribute {path!r}" for path in paths), *self.reads.variables.words()]

    def refuse_change(self, before: State, after: State, *, broadcast: bool) -> None:
        """Refuse a replay that would not see what forward saw.

        Args:
            before: What was watched in forward.
            after: What is watched now.
            broadcast: Whether DDP may have copied buffers since, in place and onto themselves.

        Raises:
            ReplayStateError: What decides the replay's result has changed.
        """
        change = self._changed_tensor(before, after, broadcast) or self._changed_setting(before, after)
        if change:
            # Only where the code asks for attributes by names that it makes does more count than it is seen to read.
            sure = "reads that, and its gradients would be wrong" if not self.reads.everything else "may read that"
            raise ReplayStateError(
                f"segment {self._where}: {change}; its replay {sure}. Run backward before the change, or plan without "
                "this segment"
            )

    def _changed_tensor(self, before: State, after: State, broadcast: bool) -> str:
        # Under FSDP2 a parameter's shard and its gathered form take turns, which says nothing about its value.
        if is_sharded(self._root):
            return ""
        for position, (kind, path) in enumerate(self._names):
            if before.identities[position] != after.identities[position]:
                why = "weights substituted by functional_call or a parametrization are gone"
                return f"{kind} {path!r} is another tensor ({why})"
            if before.versions[position] != after.versions[position] and not (kind == "buffer" and broadcast):
                why = " (an optimizer step between forward and backward?)" if kind == "parameter" else ""
                return f"{kind} {path!r} was changed in place{why}"
            was, now = before.requires_grad[position], after.requires_grad[position]
            if was != now:
                return f"{kind} {path!r} has requires_grad {now}, {was} in forward"
        return ""

    def _changed_setting(self, before: State, after: State) -> str:
        for what, was, now in zip(self.words, before.settings, after.settings, strict=True):
            if was != now:
                return f"{what} is {_short(now)}, {_short(was)} in forward"
        if before.dictionaries == after.dictionaries:
            return ""
        return "a child or a forward hook of its modules came, went or was replaced"


def _is_settings(value: object, attributes: dict[str, object]) -> bool:
    """Return whether an object is a configuration or the like: most of what it holds is plain data."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value) or len(attributes) > MOST_ITEMS:
        return False
    plain = sum(type(item) in PLAIN or isinstance(item, CONTAINERS) for item in attributes.values())
    return plain >= 0.8 * len(attributes)


def _is_size(module: nn.Module, value: object) -> bool:
    """Return whether a value is one of the sizes of torch's own layers, which their weights fix."""
    if not type(module).__module__.startswith("torch.nn.modules"):
        return False
    sizes = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return all(type(size) is int for size in sizes)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
