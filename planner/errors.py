"""The errors of planning and applying: one small tree, every message with a value, a limit and a next step."""

from __future__ import annotations


class PlanError(ValueError):
    """Base of everything a user can mend about a plan."""


class PlanFileError(PlanError):
    """A plan file cannot be read: it is truncated, edited by hand, of another schema, or not a plan."""


class PlanMismatchError(PlanError):
    """A plan was made for another model than the one it meets."""


class ApplyError(PlanError):
    """A plan cannot be applied to this model, or a planned segment cannot be replayed as it ran."""


class ReplayStateError(RuntimeError):
    """What a segment depends on changed between its forward and its replay, so gradients would be wrong."""
