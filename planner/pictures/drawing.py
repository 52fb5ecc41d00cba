"""`draw`: the picture of any value that the library returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...profiler.records import Profile
from ..errors import PlanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(value: Any, **options: Any) -> Figure:
    """Return the picture of a value; a notebook shows it where it is the last line of a cell.

    A profile is drawn as its memory by module. Every other value draws itself: its `plot` is called.

    Args:
        value: A profile, a comparison, a verification, a batch search, a planner or a timeline.
        options: For the picture: `title=`, for a profile `rows=`, for a timeline `by="operators"`.

    Raises:
        PlanError: There is no picture of such a value.
    """
    if isinstance(value, Profile):
        from .memory import module_memory

        return module_memory(value, **options)
    if not hasattr(value, "plot"):
        raise PlanError(
            f"there is no picture of a {type(value).__name__}: draw a profile, a comparison, a verification, a batch "
            "search or a timeline; a plan is drawn by its planner, planner.plot(plan)"
        )
    return value.plot(**options)
