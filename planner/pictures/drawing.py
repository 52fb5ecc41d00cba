"""`draw`: the picture of any value that the library returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import PlanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(value: Any, **options: Any) -> Figure:
    """Return the picture of a value; a notebook shows it where it is the last line of a cell.

    Every value draws itself: its `plot` is called.

    Args:
        value: A profile, a plan, a comparison, a verification, a batch search, a planner or a timeline.
        options: For the picture: `title=`, for a profile `rows=`, for a timeline `by="operators"`.

    Raises:
        PlanError: There is no picture of such a value.
    """
    if not hasattr(value, "plot"):
        raise PlanError(
            f"there is no picture of a {type(value).__name__}: draw a profile, a plan, a comparison, a verification, a "
            "batch search, a planner or a timeline"
        )
    return value.plot(**options)
