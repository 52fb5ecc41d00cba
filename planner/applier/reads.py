"""Which attributes a replay can read: the names that occur in the code it can reach.

A segment's modules share objects with the rest of the model, a configuration mostly, and carry things that their
forward never looks at, a counter say. Only what the code can read decides a replay. Code is followed by name: from the
forward of each module into every method, function and class whose name it mentions. That finds more than is ever run,
and nothing less, unless attributes are read by names made at run time; then everything counts.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from inspect import getattr_static
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ...profiler.repeatable_hooks import remade_by
from .internals import buffers_of, children_of, forward_hook_registries, parameters_of
from .told import CONTAINERS, MOST_ITEMS, PLAIN
from .variables import Uses, Variables, WatchedVariables, is_followed, uses_in

_MOST_FUNCTIONS = 5_000
_NO_EFFECT = frozenset(("CACHE", "PRECALL", "KW_NAMES", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "COPY_FREE_VARS"))
_SETTINGS = ("transformers.configuration_utils", "transformers.generation.", "transformers.integrations.heterogeneity")
"""Configurations look attributes up in a way of their own, but do so by the name asked for, or by `attribute_map`."""
_DYNAMIC = frozenset(("eval", "exec", "attrgetter", "__getstate__", "getmembers"))
_SETTERS = frozenset(("setattr", "delattr", "globals", "vars", "__dict__", "__setattr__"))
"""By which code may set what it mentions."""
_BY_NAME = frozenset(("getattr", "hasattr"))
_NOT_IN_A_CALL = frozenset(
    (
        *("__init__", "__new__", "__repr__", "__str__", "__format__", "__reduce__", "__reduce_ex__", "__getstate__"),
        *("__setstate__", "__dir__", "__sizeof__", "__init_subclass__", "__class__", "__del__", "__copy__"),
        *("__deepcopy__", "__setattr__", "__delattr__", "__hash__"),
    )
)
"""Special methods that nothing calls unless it names them."""
_PLAIN = tuple(PLAIN)


@dataclass(frozen=True, slots=True)
class Mentions:
    """What one piece of code mentions.

    Attributes:
        read: Names it loads, and strings it could pass to getattr.
        stored: Attributes it sets.
        own: Whether it reads attributes of its first argument by names that are made at run time.
        any: Whether it does so of something else.
        uses: What it does with variables of its module and of functions around it, by piece of code.
    """

    read: frozenset[str]
    stored: frozenset[str]
    own: bool
    any: bool
    uses: tuple[Uses, ...]


@cache
def names_in(code: CodeType) -> Mentions:
    """Return what a function's code and the functions inside it mention."""
    read: set[str] = set()
    stored: set[str] = set()
    receivers: list[dis.Instruction | None] = []
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NO_EFFECT]
    for position, instruction in enumerate(instructions):
        name = instruction.argval
        if not isinstance(name, str):
            continue
        if instruction.opname == "STORE_ATTR":
            stored.add(name)
        elif instruction.opname == "LOAD_CONST":
            # It may be handed to getattr, here or elsewhere.
            if name.isidentifier():
                read.add(name)
        elif instruction.opcode in dis.hasname:
            read.add(name)
            if name in _DYNAMIC:
                receivers.append(None)
            elif name == "__dict__":
                receivers.append(instructions[position - 1])
            elif name == "vars":
                receivers.append(instructions[position + 1] if position + 1 < len(instructions) else None)
            elif name in _BY_NAME:
                receivers += _receiver_of_a_made_name(instructions, position)
    inside = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    first = code.co_varnames[0] if code.co_argcount else None
    own = [r is not None and r.opname == "LOAD_FAST" and r.argval == first for r in receivers]
    return Mentions(
        read=frozenset(read.union(*(names.read for names in inside))),
        stored=frozenset(stored.union(*(names.stored for names in inside))),
        own=any(own),
        any=not all(own) or any(names.own or names.any for names in inside),
        uses=(uses_in(instructions), *(uses for names in inside for uses in names.uses)),
    )


def _receiver_of_a_made_name(instructions: list[dis.Instruction], position: int) -> list[dis.Instruction | None]:
    """Return what loads the first argument of a call of getattr whose second is no literal; nothing if it is one.

    None stands for a first argument that takes more than one instruction.
    """
    depth = 0
    loads: list[tuple[int, dis.Instruction]] = []
    for instruction in instructions[position + 1 :]:
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
            break
        if instruction.opname.startswith("CALL") and (instruction.arg or 0) == depth:
            second = [load for after, load in loads if after == 2]
            if second and second[-1].opname == "LOAD_CONST":
                return []
            return [loads[0][1] if loads[1:] and loads[1][0] == 2 else None]
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        loads.append((depth, instruction))
    return [None]


class _Settings:
    """Stand for the owner of a configuration's properties, which are taken to read by name what is asked of them."""


@dataclass(slots=True)
class Reads:
    """Collect the names that a replay of some modules can read.

    Attributes:
        names: The names.
        everything: Whether names are made at run time somewhere, so that any attribute may be read.
        variables: Variables of modules and of enclosing functions that it can read and does not set.
    """

    names: set[str] = field(default_factory=set)
    everything: bool = False
    variables: WatchedVariables = field(default_factory=WatchedVariables)
    # What the functions that were read do with variables.
    _used: Variables = field(default_factory=Variables)
    # Attributes that methods of a class set.
    _stored: dict[type, set[str]] = field(default_factory=dict)
    _functions: set[int] = field(default_factory=set)
    _classes: set[type] = field(default_factory=set)
    # Classes whose methods read their own attributes by names made at run time.
    _whole: set[type] = field(default_factory=set)
    _values: dict[int, Any] = field(default_factory=dict)
    # Methods of classes met, by name, that nothing has mentioned so far.
    _waiting: dict[str, list[tuple[Any, type]]] = field(default_factory=dict)
    _work: list[tuple[FunctionType, type | None]] = field(default_factory=list)

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> Reads:
        """Collect what a replay of these modules' forwards, hooks included, can read."""
        reads = Reads()
        reads._mention("forward")
        for module in modules:
            reads._meet(type(module))
            for value in vars(module).values():
                reads._follow(value)
            for hooks in forward_hook_registries(module):
                # They put names together, but from few parts: no reason to count every attribute there is.
                for made in remade_by(hooks.values()):
                    for name in (made.attribute, *made.reads):
                        reads._mention(name)
                reads._follow_all(hook for hook in hooks.values() if not remade_by([hook]))
        reads._finish()
        if not reads.everything:
            reads.variables = reads._used.watched()
        reads._used = Variables()
        # What was gone through has served; a copy of the planned model shall not copy it.
        for seen in (reads._functions, reads._classes, reads._values, reads._waiting, reads._work):
            seen.clear()
        return reads

    def reads(self, name: str) -> bool:
        """Return whether an attribute of this name can be read."""
        return self.everything or name in self.names

    def mentions(self, names: frozenset[str]) -> bool:
        """Return whether the code mentions one of some names, or could without being seen to."""
        return self.everything or not self.names.isdisjoint(names)

    def whole(self, owner: object) -> bool:
        """Return whether all of an object's attributes count: its class looks them up in a way of its own."""
        return self.everything or any(base in self._whole for base in type(owner).__mro__)

    def reads_of(self, owner: object, name: str) -> bool:
        """Return whether an attribute of an object can be read, under its own or another name."""
        if self.reads(name) or self.whole(owner):
            return True
        # Configurations of transformers have second names for some attributes.
        second: Any = getattr(type(owner), "attribute_map", None)
        return isinstance(second, dict) and any(own == name and self.reads(key) for key, own in second.items())

    def may_come(self, module: nn.Module) -> set[str]:
        """Return the attributes that a module lacks so far, and that its own methods set and read."""
        stored = set[str]().union(*(self._stored.get(base, ()) for base in type(module).__mro__))
        registries = parameters_of(module).keys() | buffers_of(module).keys() | children_of(module).keys()
        lacking = (stored & self.names) - vars(module).keys() - registries
        # A property (a parametrized weight) is computed from what is watched, and anew each time that it is asked for.
        return {name for name in lacking if not isinstance(getattr_static(type(module), name, None), property)}

    def _finish(self) -> None:
        while self._work and not self.everything:
            if len(self._functions) > _MOST_FUNCTIONS:
                self.everything = True
                return
            self._read(*self._work.pop())

    def _read(self, function: FunctionType, owner: type | None) -> None:
        names = names_in(function.__code__)
        if owner is _Settings:
            pass
        elif names.any or (names.own and owner is None):
            self.everything = True
        elif names.own and owner is not None:
            self._whole.add(owner)
        if owner is not None:
            self._stored.setdefault(owner, set()).update(names.stored)
        self._used.stored |= names.stored if names.read.isdisjoint(_SETTERS) else names.stored | names.read
        for uses in names.uses:
            self._used.meet(uses, function)
        for name in names.read - self.names:
            self._mention(name)
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents)
            except ValueError:
                continue
        self._follow_all(function.__defaults__ or ())
        self._follow_all((function.__kwdefaults__ or {}).values())
        for name in names.read & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                if is_followed(value.__name__):
                    self._follow_all(vars(value)[key] for key in names.read & vars(value).keys())
            elif isinstance(value, type):
                self._meet(value, constructed=True)
            else:
                self._follow(value)

    def _mention(self, name: str) -> None:
        self.names.add(name)
        for function, owner in self._waiting.pop(name, ()):
            self._follow(function, owner)

    def _meet(self, kind: type, *, constructed: bool = False) -> None:
        """Let the methods of a class be found by name, and follow the special ones."""
        settings = any(base.__module__.startswith(_SETTINGS) for base in kind.__mro__)
        for base in kind.__mro__:
            if base is nn.Module or base is object or base in self._classes:
                continue
            if not is_followed(base.__module__) and not issubclass(base, nn.Module):
                continue
            self._classes.add(base)
            if settings and base.__module__.startswith(("transformers.", "huggingface_hub.")):
                for name, value in vars(base).items():
                    if isinstance(value, property):
                        self._offer(name, value, _Settings)
                continue
            for name, value in vars(base).items():
                special = name.startswith("__") and name.endswith("__") and name not in _NOT_IN_A_CALL
                if special:
                    self._follow(value, base)
                else:
                    self._offer(name, value, base)
        if constructed and not settings:
            for name in ("__init__", "__new__", "__post_init__"):
                self._follow(getattr(kind, name, None), kind)

    def _offer(self, name: str, value: Any, owner: type) -> None:
        """Follow something once its name is mentioned."""
        if name in self.names:
            self._follow(value, owner)
        else:
            self._waiting.setdefault(name, []).append((value, owner))

    def _follow_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._follow(value)

    def _follow(self, value: Any, owner: type | None = None) -> None:
        """Follow a value that code can reach into the code that it may run; `owner` is the class it is a method of."""
        if isinstance(value, FunctionType):
            if is_followed(value.__module__ or "") or _of_a_module(value):
                self._push(value, owner)
            self._follow_wrapped(value)
            return
        if value is None or isinstance(value, (str, int, float, complex, bytes, BuiltinFunctionType, ModuleType)):
            return
        if id(value) in self._values:
            return
        # Held, so that no other value can take its identity meanwhile.
        self._values[id(value)] = value
        if isinstance(value, MethodType):
            self._follow(value.__func__, type(value.__self__))
            self._follow(value.__self__)
        elif isinstance(value, (staticmethod, classmethod)):
            self._follow(value.__func__, owner if isinstance(value, classmethod) else None)
        elif isinstance(value, property):
            self._follow(value.fget, owner)
        elif isinstance(value, cached_property):
            self._follow(value.func, owner)
        elif isinstance(value, partial):
            self._follow_all((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, CONTAINERS):
            if len(value) <= MOST_ITEMS:
                self._follow_all(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, type):
            self._meet(value, constructed=True)
        elif isinstance(value, nn.Module):
            self._meet(type(value))
        else:
            self._meet(type(value))
            self._follow_wrapped(value)
            inside = getattr(value, "__dict__", None)
            if is_followed(type(value).__module__) and isinstance(inside, dict) and len(inside) <= MOST_ITEMS:
                self._follow_all(list(inside.values()))

    def _follow_wrapped(self, value: Any) -> None:
        wrapped = getattr(value, "__wrapped__", None)
        if callable(wrapped):
            self._follow(wrapped)

    def _push(self, function: FunctionType, owner: type | None) -> None:
        if id(function) not in self._functions:
            self._functions.add(id(function))
            self._work.append((function, owner))


def what_decides(modules: Iterable[nn.Module]) -> frozenset[object]:
    """Return what `Reads.of` depends on: equal answers for equal ones, while the modules live."""
    found: set[object] = set()
    for module in modules:
        found.add(type(module))
        for hooks in forward_hook_registries(module):
            found.update(map(id, hooks.values()))
        for value in vars(module).values():
            if isinstance(value, CONTAINERS) and all(isinstance(item, _PLAIN) for item in value):
                inside = value.values() if isinstance(value, dict) else ()
                found.update(id(item) for item in inside if not isinstance(item, (*_PLAIN, torch.Tensor, nn.Module)))
            elif not isinstance(value, (*_PLAIN, torch.Tensor)):
                found.add(id(value))
    return frozenset(found)


def _of_a_module(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith(("torch.nn.modules.", "torch.ao.nn.", "torch.nn.utils."))
