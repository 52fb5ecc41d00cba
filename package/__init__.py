"""Find where to checkpoint a PyTorch model so that the step fits a memory budget and the added time is least.

Everything a user calls is here; torch is imported when a name is first used, not before.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat import integrations, planner, profiler, solvers
    from remat.planner import (
        Answer,
        ApplyError,
        BudgetError,
        InfeasibleBudgetError,
        Plan,
        PlanError,
        PlanFileError,
        PlanMismatchError,
        Planner,
        ReplayStateError,
        answer,
        apply,
        compare,
        diff,
        draw,
        largest_batch,
        plan,
        price,
        verify,
    )
    from remat.profiler import BatchError, DisturbedError, Profile, ProfileFileError, profile

    __version__: str

_PACKAGES = ("integrations", "planner", "profiler", "solvers")
_OF_THE_PROFILER = ("BatchError", "DisturbedError", "Profile", "ProfileFileError", "profile")
"""Every other name that is no package is the planner's."""

__all__ = [
    "Answer",
    "ApplyError",
    "BatchError",
    "BudgetError",
    "DisturbedError",
    "InfeasibleBudgetError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "Planner",
    "Profile",
    "ProfileFileError",
    "ReplayStateError",
    "__version__",
    "answer",
    "apply",
    "compare",
    "diff",
    "draw",
    "integrations",
    "largest_batch",
    "plan",
    "planner",
    "price",
    "profile",
    "profiler",
    "solvers",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("remat")
    if name in _PACKAGES:
        return import_module(f"remat.{name}")
    if name in __all__:
        return getattr(import_module("remat.profiler" if name in _OF_THE_PROFILER else "remat.planner"), name)
    raise AttributeError(f"module 'remat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
