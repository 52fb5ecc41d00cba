"""Which variables of a user's files a replay reads: plain data in `SCALE`, `settings.SCALE` or `OPTIONS["scale"]`.

They are a module's own, or those of a function that encloses the code.

What code sets itself is not watched, counters and caches above all: a replay sets it as forward did, or finds it set.
Nor are the variables of installed packages, which no training loop changes.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from .told import PLAIN, plainly

_FOREIGN = frozenset((*sys.stdlib_module_names, "torch", "numpy", "remat"))
"""Libraries whose functions know nothing of a user's attributes; torch's modules are followed, being segments' own."""
_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_LOADS_ENCLOSED = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_STORES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"))
_INSTALLED = ("site-packages", "dist-packages")


class Use(NamedTuple):
    """How code uses a variable.

    Attributes:
        name: The variable.
        inside: Nothing; or that an attribute or an item of it is read, and which.
        enclosed: Whether it is one of a function around the code, not of its module.
    """

    name: str
    inside: tuple[str, Any] | None
    enclosed: bool


@dataclass(frozen=True, slots=True)
class Uses:
    """What one piece of code does with variables of its module and of functions around it.

    Attributes:
        read: How it reads them.
        rebound: Names that it binds anew.
        sets_items: Whether it sets items of anything.
    """

    read: frozenset[Use]
    rebound: frozenset[str]
    sets_items: bool


def uses_in(instructions: list[dis.Instruction]) -> Uses:
    """Return what some code, functions inside it left out, does with variables."""
    read: set[Use] = set()
    rebound: set[str] = set()
    for position, instruction in enumerate(instructions):
        enclosed = instruction.opname in _LOADS_ENCLOSED
        if enclosed or instruction.opname in _LOADS:
            read.add(Use(instruction.argval, _inside(instructions[position + 1 : position + 3]), enclosed))
        elif instruction.opname in _STORES:
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
    """Name a variable, or an attribute or item of one.

    Attributes:
        module: Whose it is, or that of the function that it is enclosed by.
        name: What it is called.
        inside: As in `Use`.
        cell: Identity of what holds it for the functions that share it; None for a module's own.
    """

    module: str
    name: str
    inside: tuple[str, Any] | None
    cell: int | None = None

    @property
    def owner(self) -> str | int:
        """Tell whose it is."""
        return self.module if self.cell is None else self.cell

    def __str__(self) -> str:
        kind, key = self.inside or ("", "")
        shown = f"{self.name}.{key}" if kind == "attribute" else f"{self.name}[{key!r}]" if kind else self.name
        return f"variable {shown!r} of {'' if self.cell is None else 'a function in '}module {self.module!r}"


@dataclass(slots=True)
class Variables:
    """Collect what code reads of its modules' variables, and what it changes itself.

    Attributes:
        stored: Attributes that it sets, of whatever.
    """

    stored: set[str] = field(default_factory=set)
    _read: set[_Variable] = field(default_factory=set)
    # By owner and name.
    _rebound: set[tuple[str | int, str]] = field(default_factory=set)
    # Containers that code hands on, or in a piece of code that sets items: what is in them may be its own doing.
    _handed_on: set[tuple[str | int, str]] = field(default_factory=set)
    # What holds variables of functions, by identity.
    _cells: dict[int, CellType] = field(default_factory=dict)

    def meet(self, uses: Uses, function: FunctionType) -> None:
        """Take up what a function, or one defined in it, does with variables of its module and of functions around."""
        namespace = function.__globals__
        module = namespace.get("__name__")
        if not isinstance(module, str) or not _is_a_users(module, namespace):
            return
        enclosed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._cells.update((id(cell), cell) for cell in enclosed.values())
        for name in uses.rebound:
            self._rebound.add((id(enclosed[name]) if name in enclosed else module, name))
        for name, inside, is_enclosed in uses.read:
            if is_enclosed and name not in enclosed:
                continue  # Made anew in every call.
            variable = _Variable(module, name, inside, id(enclosed[name]) if is_enclosed else None)
            self._read.add(variable)
            if uses.sets_items or inside is None:
                self._handed_on.add((variable.owner, name))

    def watched(self) -> WatchedVariables:
        """Return those that hold plain data and that code does not set."""
        found: list[_Variable] = []
        spaces: list[_Space] = []
        for variable in sorted(self._read, key=lambda variable: (str(variable), variable.cell or 0)):
            name, (kind, key) = variable.name, variable.inside or ("", "")
            space = _space(variable.module) if variable.cell is None else self._cells[variable.cell]
            # A variable may be set as an attribute of its module, too.
            is_set = (variable.owner, name) in (self._handed_on if kind == "item" else self._rebound)
            if not (is_set or {name, key} & self.stored) and _is_plain(variable, space):
                found.append(variable)
                spaces.append(space)
        return WatchedVariables(tuple(found), tuple(spaces))


class WatchedVariables:
    """Read variables; a copy of it reads the same ones, in another process those of modules of the same names.

    Args:
        variables: What to read.
        spaces: Where each is; None finds modules by their names.
    """

    __slots__ = ("_spaces", "_variables")

    def __init__(self, variables: tuple[_Variable, ...] = (), spaces: tuple[_Space, ...] | None = None) -> None:
        self._variables = variables
        # Where a module is not there in another process, nothing changes in it either.
        self._spaces = tuple(_space(variable.module) for variable in variables) if spaces is None else spaces

    def __deepcopy__(self, _: dict[int, Any]) -> WatchedVariables:
        return self  # The code of a copied model is the same code.

    def __reduce__(self) -> tuple[type[WatchedVariables], tuple[tuple[_Variable, ...]]]:
        # A function that encloses others is not found by name; nor can what it encloses be pickled.
        return type(self), (tuple(variable for variable in self._variables if variable.cell is None),)

    def __bool__(self) -> bool:
        return bool(self._variables)

    def now(self) -> Iterator[object]:
        """Return what they hold now: plain data by value, all else by identity."""
        for variable, space in zip(self._variables, self._spaces, strict=True):
            yield plainly(_value(variable, space))

    def words(self) -> list[str]:
        """Name them for errors."""
        return list(map(str, self._variables))


_Space = dict[str, Any] | CellType
"""What holds a variable: its module's names, or a cell that it has for itself."""


def _value(variable: _Variable, space: _Space) -> object:
    value = space.get(variable.name) if isinstance(space, dict) else _contents(space)
    return value if variable.inside is None else _looked_up(value, *variable.inside)


def _contents(cell: CellType) -> object:
    """Return what a cell holds; itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


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


def _is_plain(variable: _Variable, space: _Space) -> bool:
    found = _value(variable, space)
    if variable.inside is None:
        return type(found) in PLAIN and (isinstance(space, CellType) or variable.name in space)
    owner = _value(variable._replace(inside=None), space)
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
