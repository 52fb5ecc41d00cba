"""Places that hold one value each, outside of any container: globals, class attributes, variables, slots."""

from __future__ import annotations

import types
from contextvars import ContextVar
from typing import Any, NamedTuple

MISSING = object()
"""Stands where a name has no value."""


class Name(NamedTuple):
    """A name in a module's globals."""

    owner: dict[str, Any]
    key: str

    def read(self) -> Any:
        """Return its value, or MISSING."""
        return self.owner.get(self.key, MISSING)

    def write(self, value: Any) -> None:
        """Give it a value; MISSING takes it away."""
        if value is MISSING:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = value


class ClassAttribute(NamedTuple):
    """An attribute of a class."""

    owner: type
    key: str

    def read(self) -> Any:
        """Return its value, or MISSING."""
        return vars(self.owner).get(self.key, MISSING)

    def write(self, value: Any) -> None:
        """Give it a value; MISSING takes it away."""
        if value is not MISSING:
            setattr(self.owner, self.key, value)
        elif self.key in vars(self.owner):
            delattr(self.owner, self.key)


class Cell(NamedTuple):
    """A variable that a closure captured."""

    owner: types.CellType
    key: str

    def read(self) -> Any:
        """Return its value, or MISSING."""
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

    def write(self, value: Any) -> None:
        """Give it a value; MISSING takes it away."""
        if value is MISSING:
            del self.owner.cell_contents
        else:
            self.owner.cell_contents = value


class SlotOf(NamedTuple):
    """An attribute that an object keeps in a slot."""

    owner: Any
    key: str
    descriptor: Any

    def read(self) -> Any:
        """Return its value, or MISSING."""
        try:
            return self.descriptor.__get__(self.owner)
        except AttributeError:
            return MISSING

    def write(self, value: Any) -> None:
        """Give it a value; MISSING takes it away."""
        if value is MISSING:
            self.descriptor.__delete__(self.owner)
        else:
            self.descriptor.__set__(self.owner, value)


class Contextual(NamedTuple):
    """A context variable, in the context that is current."""

    owner: ContextVar[Any]
    key: str

    def read(self) -> Any:
        """Return its value, or MISSING."""
        return self.owner.get(MISSING)

    def write(self, value: Any) -> None:
        """Give it a value; to take it away is left to leaving the context (see `contexts.py`)."""
        if value is not MISSING:
            self.owner.set(value)


Place = Name | ClassAttribute | Cell | SlotOf | Contextual
