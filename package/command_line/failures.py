"""How a command ends: its exit code, and what went wrong in one line."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from enum import IntEnum
from types import FrameType
from typing import Any

import remat


class Code(IntEnum):
    """Say how a command ended."""

    DONE = 0
    NOT_CONFIRMED = 1
    USAGE = 2
    INFEASIBLE = 3
    MISMATCH = 4
    OUT_OF_MEMORY = 5
    INTERNAL = 70
    INTERRUPTED = 130


MEANINGS: Mapping[Code, str] = {
    Code.DONE: "done",
    Code.NOT_CONFIRMED: "not exact or over budget (verify, price), or not the same (diff)",
    Code.USAGE: "a mistake in what was typed, in the factory or in a file",
    Code.INFEASIBLE: "no plan fits the budget",
    Code.MISMATCH: "the plan is for another model",
    Code.OUT_OF_MEMORY: "the device's memory ran out",
    Code.INTERNAL: "an error of remat's own",
    Code.INTERRUPTED: "interrupted",
}


def code_of(error: BaseException) -> Code:
    """Return the exit code that an error stands for."""
    if isinstance(error, KeyboardInterrupt):
        return Code.INTERRUPTED
    # Usage errors; typer carries its own copy of click, so their class has no public name.
    if hasattr(error, "format_message") or isinstance(error, OSError):
        return Code.USAGE
    if "remat.planner" not in sys.modules:
        return Code.INTERNAL
    import torch
    from remat.planner import InfeasibleBudgetError, PlanMismatchError

    kinds: list[tuple[type[Exception], Code]] = [
        (InfeasibleBudgetError, Code.INFEASIBLE),
        (PlanMismatchError, Code.MISMATCH),
        (torch.OutOfMemoryError, Code.OUT_OF_MEMORY),
    ]
    # Every class of error that the library has is for what its user can mend.
    of_ours = any(kind.__module__.startswith("remat.") for kind in type(error).__mro__)
    otherwise = Code.USAGE if of_ours else Code.INTERNAL
    return next((code for kind, code in kinds if isinstance(error, kind)), otherwise)


def words_of(error: BaseException, code: Code) -> str:
    """Return what went wrong, in one line."""
    if code is Code.INTERRUPTED:
        return "interrupted"
    if code is Code.INTERNAL:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"internal error: {type(error).__name__}: {_line(error)} (line {where.lineno} of {where.filename}); "
            "--verbose shows where it arose; please report it"
        )
    if isinstance(error, OSError):
        return f"{error.filename or 'file'}: {error.strerror or error}"
    format_message: Any = getattr(error, "format_message", None)
    if format_message is None:
        return _line(error)
    words = " ".join(format_message().split())
    return f"{words.removesuffix('.')}{_hint(error, words)}" if words else words


def _hint(error: Any, words: str) -> str:
    """Return what continues a usage error: examples of an option that is missing, or what may have been meant."""
    if words.startswith("Missing option"):
        _, found, examples = (error.param.help or "").rpartition("Example")
        return f": such as {examples.lstrip('s: ')}" if found else "."
    strange = re.fullmatch(r"No such command '([^']+)'\.", words)
    if strange is None:
        return "." if words.endswith(".") else ""
    if strange[1] in remat.__all__:
        return f": it is there in Python only, remat.{strange[1]}"
    return f": choose one of {', '.join(error.ctx.command.commands)}"


def raised_in_subject(error: BaseException, model: Any) -> str:
    """Say what of the user's an error comes from: a module, by path and class, or the loss; "" where from neither.

    Args:
        error: What was raised.
        model: The model that was run.
    """
    paths = {id(module): name or "(root)" for name, module in model.named_modules()}
    found = ""
    for frame in _frames(error):
        module = frame.f_locals.get("self")
        if id(module) in paths:
            found = f"{paths[id(module)]} ({type(module).__name__})"
        elif ".planner.applier." in f".{frame.f_globals.get('__name__', '')}.":
            # What fails under a plan, and did not without one, is not the model's fault.
            return ""
    from remat.profiler.step import raised_in_loss

    if raised_in_loss(error):
        return "the loss"
    return f"the model in {found}" if found else ""


def _frames(error: BaseException) -> Iterator[FrameType]:
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
