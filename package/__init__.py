"""Find where to checkpoint a PyTorch model so that the step fits a memory budget and the added time is least.

Everything a user calls is here; torch is imported when a name is first used, not before.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.planner import Plan, apply, compare, largest_batch, plan, verify
    from remat.profiler import Profile, profile

    __version__: str

_HOMES = {
    **dict.fromkeys(("Plan", "apply", "compare", "largest_batch", "plan", "verify"), "remat.planner"),
    **dict.fromkeys(("Profile", "profile"), "remat.profiler"),
}

__all__ = ["Plan", "Profile", "__version__", "apply", "compare", "largest_batch", "plan", "profile", "verify"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("remat")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'remat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
