"""Plan where to checkpoint, apply it to a model, verify it."""

# First: it refuses a torch whose private parts are not those that the applier needs.
from ..profiler.torch_version import TorchVersionError

# isort: split
from .answer import Answer, answer
from .applier.apply import Applied, apply
from .budget import BudgetError
from .compare import Comparison, compare
from .differences import Differences, diff
from .errors import ApplyError, InfeasibleBudgetError, PlanError, PlanFileError, PlanMismatchError, ReplayStateError
from .finding.planner import Planner
from .finding.planning import plan
from .finding.pricing import price
from .largest_batch import BatchSearch, largest_batch
from .options import StepOptions
from .pictures.drawing import draw
from .plan import Plan
from .verify import Verification, verify

__all__ = [
    "Answer",
    "Applied",
    "ApplyError",
    "BatchSearch",
    "BudgetError",
    "Comparison",
    "Differences",
    "InfeasibleBudgetError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "Planner",
    "ReplayStateError",
    "StepOptions",
    "TorchVersionError",
    "Verification",
    "answer",
    "apply",
    "compare",
    "diff",
    "draw",
    "largest_batch",
    "plan",
    "price",
    "verify",
]
