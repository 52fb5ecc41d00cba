"""What a training step can reach: the walk from its model, loss and batch through everything they lead to.

The walk knows kinds of Python objects, and nothing of what is done with them. It goes through containers, attributes,
closures, arguments bound to functions, hooks, classes, and the globals that functions name. Of a class's methods it
follows those that Python calls by itself, `forward`, and those whose names other functions mention. It does not go into
the functions and classes of torch, numpy and the standard library, nor into what belongs to threads, files and loaders.
"""

from __future__ import annotations

import dis
import enum
import functools
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from .contents import items_of
from .internals import FakeTensor, is_cached_function, tensor_hooks
from .places import Cell, ClassAttribute, Contextual, Name, Place, SlotOf
from .raw import is_raw

_PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
        *(types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, weakref.ReferenceType),
        *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
        *(types.GetSetDescriptorType, types.MemberDescriptorType),
    )
)
_CONTAINERS = (dict, list, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0])) - {"__main__"}
_FOREIGN = ("torch.utils.data", "torch.multiprocessing", "torch.distributed", "torch._dynamo", "torch._inductor")
"""Parts of torch whose objects belong to other threads, processes or a compiler, and are not looked into."""
_LOOKED_INTO = frozenset(("collections", "weakref", "_weakrefset", "types", "functools", "_thread", "contextlib"))
"""Parts of the standard library whose objects hold what users put into them."""
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_MAKERS = frozenset(("__init__", "__new__", "__init_subclass__", "__reduce__", "__setstate__", "__getstate__"))
"""Methods that run when an object is made or copied, and not in a step, unless they are mentioned."""
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


class Reach:
    """Everything reachable from some roots, sorted by kind.

    Args:
        roots: By name, where the walk begins.

    Attributes:
        containers: Dictionaries (attributes of objects among them), lists, sets and deques.
        places: Names that hold one value each, outside any such container.
        tensors: All but fake ones.
        fakes: The fake ones, of a model that was built so.
        generators: Private random generators.
        raws: What holds data of its own, such as arrays of numpy.
        iterators: What is used up by running.
        caches: Functions under functools.lru_cache.
        modules: All modules, the model's among them.
        optimizers: All optimizers.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self.containers: list[Any] = []
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []
        self.fakes: list[torch.Tensor] = []
        self.generators: list[Any] = []
        self.raws: list[Any] = []
        self.iterators: list[Any] = []
        self.caches: list[Any] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        # By identity: the object, which keeps the identity its own; whence it was reached, and how.
        self._seen: dict[int, tuple[object, int, str]] = {}
        self._named: set[tuple[int, str]] = set()
        # Names that functions mention, and methods that wait for theirs to be.
        self._mentioned: set[str] = {"forward"}
        self._methods: dict[str, list[tuple[object, int]]] = {}
        self._waiting: list[object] = []
        for name, root in roots.items():
            self._meet(root, 0, name)
            while self._waiting:
                self._expand(self._waiting.pop())

    def path(self, value: object) -> str:
        """Say how an object was reached, like "model.blocks[2].mask" or "loss, its variable 'head'"."""
        words: list[str] = []
        number = id(value)
        while number in self._seen:
            _, number, step = self._seen[number]
            words.append(step)
        return "".join(reversed(words)) or f"a {type(value).__name__}"

    def _meet(self, value: object, parent: int, step: str) -> None:
        if type(value) not in _PLAIN and id(value) not in self._seen:
            self._seen[id(value)] = (value, parent, step)
            self._waiting.append(value)

    def _expand(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._expand_tensor(value)
        elif isinstance(value, _CONTAINERS):
            self._expand_container(value)
        elif isinstance(value, (tuple, frozenset)):
            for position, item in enumerate(items_of(value)):
                self._meet(item, id(value), f"[{position}]")
            self._expand_attributes(value)
        elif isinstance(value, type):
            self._expand_class(value)
        elif isinstance(value, types.FunctionType):
            self._expand_function(value)
        elif isinstance(value, _GENERATORS):
            self.generators.append(value)
        elif isinstance(value, ContextVar):
            self._add_place(Contextual(value, value.name), id(value), "")
        elif is_raw(value):
            self._expand_raw(value)
        elif not isinstance(value, enum.Enum):
            self._expand_object(value)

    def _expand_tensor(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            self.fakes.append(tensor)
            return
        self.tensors.append(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            self._meet(tensor.grad, id(tensor), ".grad")
        for hooks in tensor_hooks(tensor):
            self._meet(hooks, id(tensor), ", its hooks")
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            self._expand_attributes(tensor)

    def _expand_container(self, value: Any) -> None:
        self.containers.append(value)
        if isinstance(value, dict):
            for key, item in items_of(value):
                self._meet(item, id(value), f"[{key!r}]" if type(key) in _PLAIN else "[...]")
                self._meet(key, id(value), ", a key of it")
        else:
            for position, item in enumerate(items_of(value)):
                self._meet(item, id(value), f"[{position}]")
        if type(value) not in _CONTAINERS and type(value) is not OrderedDict:
            self._expand_attributes(value)
            self._meet(type(value), id(value), ", its class")

    def _expand_raw(self, value: Any) -> None:
        self.raws.append(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            for position, item in enumerate(value.flat):
                self._meet(item, id(value), f"[{position}]")

    def _expand_attributes(self, value: object) -> None:
        """Go through the attributes that an object keeps in its dictionary and its slots."""
        attributes = _dictionary_of(value)
        if attributes is not None and id(attributes) not in self._seen:
            self._seen[id(attributes)] = (attributes, id(value), "")
            self.containers.append(attributes)
            for key, item in attributes.items():
                self._meet(item, id(value), f".{key}")
        for kind in type(value).__mro__:
            if "__slots__" not in vars(kind) or _is_library(kind.__module__):
                continue
            for key, descriptor in vars(kind).items():
                if isinstance(descriptor, types.MemberDescriptorType):
                    self._add_place(SlotOf(value, key, descriptor), id(value), f".{key}")

    def _expand_object(self, value: Any) -> None:
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self._meet(value.__self__, id(value), "")
            self._meet(getattr(value, "__func__", None), id(value), "")
            return
        if isinstance(value, (staticmethod, classmethod)):
            self._meet(cast("Any", value).__func__, id(value), "")
            return
        if isinstance(value, property):
            for function in (value.fget, value.fset):
                self._meet(function, id(value), "")
            return
        if isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._meet(part, id(value), "")
        elif is_cached_function(value):
            self.caches.append(value)
        elif isinstance(value, functools.cached_property):
            self._meet(cast("Any", value).func, id(value), "")
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            # An iterator of a user's own class is told by its attributes.
            self.iterators.append(value)
        if not _is_looked_into(type(value)):
            return
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        self._expand_attributes(value)
        self._meet(type(value), id(value), ", its class")

    def _expand_class(self, kind: type) -> None:
        if _is_library(kind.__module__):
            return
        for base in kind.__mro__:
            self._meet(base, id(kind), "")
        for key, value in list(vars(kind).items()):
            if isinstance(value, (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)):
                if key in self._mentioned or (key.startswith("__") and key not in _MAKERS):
                    self._meet(value, id(kind), f".{key}")
                else:
                    self._methods.setdefault(key, []).append((value, id(kind)))
            elif not key.startswith(("__", "_abc_")) and not isinstance(value, _DESCRIPTORS):
                self._add_place(ClassAttribute(kind, key), id(kind), f".{key}")

    def _mention(self, name: str) -> None:
        if name not in self._mentioned:
            self._mentioned.add(name)
            for method, parent in self._methods.pop(name, ()):
                self._meet(method, parent, f".{name}")

    def _expand_function(self, function: types.FunctionType) -> None:
        here = id(function)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add_place(Cell(cell, key), here, f", its variable {key!r}")
        self._meet(function.__defaults__, here, ", its defaults")
        self._meet(function.__kwdefaults__, here, ", its defaults")
        if _is_library(function.__module__ or ""):
            # Torch notes on its own functions, at their first call, how a compiler is to take them.
            return
        self._expand_attributes(function)
        known = function.__globals__
        names, stored = _names_in(function.__code__)
        for key in names:
            self._mention(key)
            if key in known:
                value = known[key]
                self._add_name(known, key)
                if isinstance(value, type):
                    self._mention("__init__")
                if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                    for inner in names:
                        if inner in vars(value):
                            self._add_name(vars(value), inner)
        for key in stored:
            self._add_name(known, key)

    def _add_name(self, owner: dict[str, Any], key: str) -> None:
        if (id(owner), key) not in self._named:
            self._named.add((id(owner), key))
            self._add_place(Name(owner, key), 0, f"the global {owner.get('__name__', '?')}.{key}")

    def _add_place(self, place: Place, parent: int, step: str) -> None:
        self.places.append(place)
        self._meet(place.read(), parent, step)


def _dictionary_of(value: object) -> dict[str, Any] | None:
    try:
        # What a thread keeps for itself is told to nobody but its own attribute.
        attributes = (
            value.__dict__ if isinstance(value, threading.local) else object.__getattribute__(value, "__dict__")
        )
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _is_looked_into(kind: type) -> bool:
    """Return whether the attributes of a class's instances are part of a step."""
    module = kind.__module__
    if not isinstance(module, str) or module.startswith(_FOREIGN):
        return False
    top = module.partition(".")[0]
    return top == "torch" or top not in _LIBRARIES or top in _LOOKED_INTO or issubclass(kind, nn.Module)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that a function and those inside it mention, and the globals that they write.

    Names that nobody can write come from a tool which rewrites code, as pytest does assertions, and lead into the tool.
    """
    mentioned, stored = [name for name in code.co_names if name.isidentifier()], list[str]()
    if _STORE_GLOBAL in code.co_code[::2]:
        stored += [str(one.argval) for one in dis.get_instructions(code) if one.opcode == _STORE_GLOBAL]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_mentioned, inner_stored = _names_in(constant)
            mentioned += inner_mentioned
            stored += inner_stored
    return tuple(dict.fromkeys(mentioned)), tuple(dict.fromkeys(stored))
