"""Find where to checkpoint a PyTorch model so that the step fits a memory budget and the added time is least.

Everything a user calls is here; torch is imported when a name is first used, not before.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat import integrations
    from remat.planner import (
        ApplyError,
        BudgetError,
        InfeasibleBudgetError,
        Plan,
        PlanError,
        PlanFileError,
        PlanMismatchError,
        Planner,
        ReplayStateError,
        apply,
        compare,
        draw,
        largest_batch,
        plan,
        price,
        verify,
    )
    from remat.profiler import BatchError, Profile, profile

    __version__: str

_HOMES = {
    "remat.planner": (
        "ApplyError",
        "BudgetError",
        "InfeasibleBudgetError",
        "Plan",
        "PlanError",
        "PlanFileError",
        "PlanMismatchError",
        "Planner",
        "ReplayStateError",
        "apply",
        "compare",
        "draw",
        "largest_batch",
        "plan",
        "price",
        "verify",
    ),
    "remat.profiler": ("BatchError", "Profile", "profile"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ApplyError",
    "BatchError",
    "BudgetError",
    "InfeasibleBudgetError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "Planner",
    "Profile",
    "ReplayStateError",
    "__version__",
    "apply",
    "compare",
    "draw",
    "integrations",
    "largest_batch",
    "plan",
    "price",
    "profile",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("remat")
    if name == "integrations":
        return import_module("remat.integrations")
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'remat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
