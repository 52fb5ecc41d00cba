"""What all ranks of a run must agree on: one plan, made by rank 0, and the smallest of their memories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat.planner import PlanError
from torch import distributed


def several() -> bool:
    """Say whether this process is one of several that train together."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def from_rank_0(make: Callable[[], str]) -> str:
    """Make a text on rank 0 and give it to all ranks, which wait for it.

    Raises:
        PlanError: Making it failed, on the other ranks; rank 0 raises what was raised.
    """
    if not several():
        return make()
    box: list[Any] = ["", ""]
    failure: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:
            # The others wait: they are told before anything else happens.
            box[1], failure = f"{type(error).__name__}: {error}", error
    distributed.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[1]:
        raise PlanError(f"rank 0 could not make the plan that all ranks train with: {box[1]}")
    return str(box[0])


def least(value: int) -> int:
    """Return the smallest of all ranks' values."""
    if not several():
        return value
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return min(values)
