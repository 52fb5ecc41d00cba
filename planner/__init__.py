"""Plan where to checkpoint, apply it to a model, verify it."""

from .apply import Applied, apply
from .budget import BudgetError
from .errors import ApplyError, InfeasibleBudgetError, PlanError, PlanFileError, PlanMismatchError, ReplayStateError
from .plan import Plan
from .planning import Planner, plan
from .verify import Verification, verify

__all__ = [
    "Applied",
    "ApplyError",
    "BudgetError",
    "InfeasibleBudgetError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "Planner",
    "ReplayStateError",
    "Verification",
    "apply",
    "plan",
    "verify",
]
