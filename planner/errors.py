"""The errors of planning and applying: one small tree, every message with a value, a limit and a next step.

All that the library raises, wherever it is defined. A ValueError is for what a user can mend before calling again:

    ValueError
    ├── PlanError                a plan, or what it is asked with
    │   ├── BudgetError          a budget, share, solver or effort that cannot be read
    │   ├── InfeasibleBudgetError    no plan fits; carries the plan of the least peak
    │   ├── PlanFileError        a file that is no plan of this schema
    │   ├── PlanMismatchError    a plan of another model
    │   ├── ApplyError           a segment that cannot be applied, or not replayed as it ran
    │   └── FactoryError         a command that gets no model and batch
    ├── AmountError              an amount of memory that cannot be read; a budget's becomes a BudgetError
    ├── BatchError               a batch, loss, optimizer or option of the step that cannot be used
    ├── DeviceError              a kind of device that steps are not measured on
    ├── CardError                a card whose data sheet is not known
    ├── DisturbedError           a step whose effects could not be undone
    ├── ProfileFileError         a file that is no profile of this schema
    └── BudgetTooSmallError      a solver's; `plan` turns it into an InfeasibleBudgetError
    RuntimeError
    ├── ReplayStateError         backward found the model other than forward left it: gradients would be wrong
    └── DryRunError              fake tensors cannot follow the model; `profile` records a real step instead
    ImportError
    └── TorchVersionError        a torch whose private parts were never checked

What is raised and caught inside: DryRunFailedError (a planned step that fails where the plain one does not),
DeviceFullError (a capacity given to the model of the allocator), NotAlikeError (blocks that a shortened record shows
to differ), TooManySetsError and TooManyStatesError (a graph too large to search).
"""

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
