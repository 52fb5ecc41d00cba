"""How to solve: with which solver, how long, how closely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from ...solvers import ALIKE, SOLVERS
from ..budget import BudgetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Say how to solve.

    Attributes:
        solver: A name from `SOLVERS`.
        time_limit_s: Seconds for each solve; None stands for the solvers' own limit.
        gap: Share of the added time that a plan may be away from the optimum.
        say: Called with a few words before each phase.
    """

    solver: str
    time_limit_s: float | None
    gap: float
    say: Callable[[str], None]


def check_solver(solver: str, *, alike: object = False) -> None:
    """Check a solver's name.

    Args:
        solver: The name.
        alike: Whether blocks are to be treated alike.

    Raises:
        BudgetError: There is no such solver, or it cannot treat blocks alike.
    """
    if not isinstance(solver, str) or solver not in SOLVERS:
        raise BudgetError(f"unknown solver {solver!r}: choose one of {', '.join(SOLVERS)}")
    if alike and solver not in ALIKE:
        raise BudgetError(
            f"solver {solver!r} cannot treat blocks alike: choose one of {', '.join(ALIKE)}, or leave alike= out"
        )


def check_effort(time_limit_s: object, gap: object) -> None:
    """Check how long and how closely to solve.

    Raises:
        BudgetError: The time limit is not a positive number of seconds, or the gap no share in [0, 1).
    """
    if time_limit_s is not None and not (_is_number(time_limit_s) and time_limit_s > 0):
        raise BudgetError(
            f"time_limit_s must be a positive number of seconds or None, got {time_limit_s!r}: 60 gives a minute"
        )
    if not (_is_number(gap) and 0 <= gap < 1):
        raise BudgetError(f"gap must be a share in [0, 1), got {gap!r}: 0.01 accepts one per cent more added time")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
