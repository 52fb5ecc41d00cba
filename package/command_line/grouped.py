"""Options that belong together are the fields of one dataclass; a command takes the dataclass as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer

Command = Callable[..., int | None]


def command(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    """Register a function as a command that returns its exit code.

    A parameter whose type is a dataclass stands for the dataclass's fields, each an option of its own.

    Args:
        app: Where to register it.
        name: The command's name.
    """

    def register(function: Command) -> Command:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            kind = hints[parameter.name]
            if isinstance(kind, type) and is_dataclass(kind):
                groups[parameter.name] = kind
                parameters += _parameters(kind)
            else:
                parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

        def run(**given: Any) -> int | None:
            made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
            return function(**made, **given)

        facts: Any = run
        facts.__doc__ = function.__doc__
        facts.__signature__ = inspect.Signature(parameters)
        facts.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name)(run)
        return function

    return register


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found: list[inspect.Parameter] = []
    for item in fields(group):
        made = item.default_factory() if item.default_factory is not MISSING else item.default
        default = inspect.Parameter.empty if made is MISSING else made
        kind = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(item.name, kind, default=default, annotation=hints[item.name]))
    return found
