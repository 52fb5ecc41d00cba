"""The errors of planning and applying: one small tree, every message with a value, a limit and a next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan


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


class InfeasibleBudgetError(PlanError):
    """No plan of the solver fits the budget.

    Attributes:
        least_peak_bytes: The smallest peak reached; planning with it as the budget succeeds.
        plan: The plan that reaches it.
    """

    def __init__(self, message: str, *, least_peak_bytes: int, plan: Plan) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes
        self.plan = plan
