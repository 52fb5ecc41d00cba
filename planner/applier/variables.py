"""Which variables of a user's modules a replay reads: plain data in `SCALE`, `settings.SCALE` or `OPTIONS["scale"]`.

What code sets itself is not watched, counters and caches above all: a replay sets it as forward did, or finds it set.
Nor are the variables of installed packages, which no training loop changes.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, cast

from .told import PLAIN, plainly

_FOREIGN = frozenset((*sys.stdlib_module_names, "torch", "numpy", "remat"))
"""Libraries whose functions know nothing of a user's attributes; torch's modules are followed, being segments' own."""
_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_INSTALLED = ("site-packages", "dist-packages")


class Use(NamedTuple):
    """How code uses a variable.

    Attributes:
        name: The variable.
        inside: Nothing; or that an attribute or an item of it is read, and which.
    """

    name: str
    inside: tuple[str, Any] | None


@dataclass(frozen=True, slots=True)
class Uses:
    """What one piece of code does with variables of its module.

    Attributes:
        read: How it reads them.
        rebound: Names that it binds anew.
        sets_items: Whether it sets items of anything.
    """

    read: frozenset[Use]
    rebound: frozenset[str]
    sets_items: bool


def uses_in(instructions: list[dis.Instruction]) -> Uses:
    """Return what some code, functions inside it left out, does with variables of its module."""
    read: set[Use] = set()
    rebound: set[str] = set()
    for position, instruction in enumerate(instructions):
        if instruction.opname in _LOADS:
            read.add(Use(instruction.argval, _inside(instructions[position + 1 : position + 3])))
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            rebound.add(instruction.argval)
    sets_items = any(i.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for i in instructions)
    return Uses(frozenset(read), frozenset(rebound), sets_items)


def _inside(following: list[dis.Instruction]) -> tuple[str, Any] | None:
    names = [instruction.opname for instruction in following]
    if names[:1] == ["LOAD_ATTR"]:
        return "attribute", following[0].argval
    if names == ["LOAD_CONST", "BINARY_SUBSCR"]:
        return "item", following[0].argval
    return None


class _Variable(NamedTuple):
    """Name a variable, or an attribute or item of one."""

    module: str
    name: str
    inside: tuple[str, Any] | None

    def __str__(self) -> str:
        kind, key = self.inside or ("", "")
        shown = f"{self.name}.{key}" if kind == "attribute" else f"{self.name}[{key!r}]" if kind else self.name
        return f"variable {shown!r} of module {self.module!r}"


@dataclass(slots=True)
class Variables:
    """Collect what code reads of its modules' variables, and what it changes itself.

    Attributes:
        stored: Attributes that it sets, of whatever.
    """

    stored: set[str] = field(default_factory=set)
    _read: set[_Variable] = field(default_factory=set)
    _rebound: set[tuple[str, str]] = field(default_factory=set)
    # Containers that code hands on, or in a piece of code that sets items: what is in them may be its own doing.
    _handed_on: set[tuple[str, str]] = field(default_factory=set)

    def meet(self, uses: Uses, namespace: Mapping[str, Any]) -> None:
        """Take up what a function does, in the namespace of its module."""
        module = namespace.get("__name__")
        if not isinstance(module, str) or not _is_a_users(module, namespace):
            return
        self._rebound.update((module, name) for name in uses.rebound)
        for name, inside in uses.read:
            self._read.add(_Variable(module, name, inside))
            if uses.sets_items or inside is None:
                self._handed_on.add((module, name))

    def watched(self) -> WatchedVariables:
        """Return those that hold plain data and that code does not set."""
        found: list[_Variable] = []
        for variable in sorted(self._read, key=str):
            module, name, inside = variable
            kind, key = inside or ("", "")
            # A variable may be set as an attribute of its module, too.
            is_set = (module, name) in (self._handed_on if kind == "item" else self._rebound)
            if not (is_set or {name, key} & self.stored) and _is_plain(variable):
                found.append(variable)
        return WatchedVariables(tuple(found))


class WatchedVariables:
    """Read variables; a copy of it, or one in another process, reads those of the same names.

    Args:
        variables: What to read.
    """

    __slots__ = ("_spaces", "_variables")

    def __init__(self, variables: tuple[_Variable, ...] = ()) -> None:
        self._variables = variables
        # Where a module is not there in another process, nothing changes in it either.
        self._spaces: list[dict[str, Any]] = [_space(variable.module) for variable in variables]

    def __reduce__(self) -> tuple[type[WatchedVariables], tuple[tuple[_Variable, ...]]]:
        return type(self), (self._variables,)

    def __bool__(self) -> bool:
        return bool(self._variables)

    def now(self) -> Iterator[object]:
        """Return what they hold now: plain data by value, all else by identity."""
        for variable, space in zip(self._variables, self._spaces, strict=True):
            yield plainly(_value(variable, space))

    def words(self) -> list[str]:
        """Name them for errors."""
        return list(map(str, self._variables))


def _value(variable: _Variable, space: dict[str, Any]) -> object:
    value = space.get(variable.name)
    return value if variable.inside is None else _looked_up(value, *variable.inside)


def _looked_up(owner: object, kind: str, key: Any) -> object:
    """Return an attribute or an item without running code of its owner's; None where there is none."""
    if kind == "attribute":
        return vars(owner).get(key) if hasattr(owner, "__dict__") else None
    if type(owner) is dict:
        return cast("dict[Any, object]", owner).get(key)
    if type(owner) in (list, tuple) and type(key) is int:
        items = cast("list[object]", owner)
        return items[key] if -len(items) <= key < len(items) else None
    return None


def _is_plain(variable: _Variable) -> bool:
    space = _space(variable.module)
    owner, found = space.get(variable.name), _value(variable, space)
    if variable.inside is None:
        return type(found) in PLAIN and variable.name in space
    if isinstance(owner, ModuleType) and not _is_a_users(owner.__name__, vars(owner)):
        return False
    return found is not None and type(found) in PLAIN


def _space(module: str) -> dict[str, Any]:
    found = sys.modules.get(module)
    return {} if found is None else vars(found)


def _is_a_users(module: str, namespace: Mapping[str, Any]) -> bool:
    """Say whether a module is neither Python's nor an installed package's, and can be found again by its name."""
    file = str(namespace.get("__file__"))
    return is_followed(module) and _space(module) is namespace and not any(part in file for part in _INSTALLED)


def is_followed(module: str) -> bool:
    """Say whether the code of a module may know of a user's attributes and variables."""
    return module.partition(".")[0] not in _FOREIGN
