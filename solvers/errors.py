"""Errors of the solvers that a user can mend."""

from __future__ import annotations

from .problem import Problem
from .solution import Solution


class BudgetTooSmallError(ValueError):
    """Say that no plan of the solver's plan space fits the budget, and what the least budget is.

    Attributes:
        least_peak_bytes: Smallest peak that this solver's plans reach; solving with it as the budget succeeds.
        solution: The plan that reaches it.
    """

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self.least_peak_bytes = solution.peak_bytes
        self.solution = solution
        reason = ""
        if problem.floor_bytes > problem.budget_bytes:
            reason = (
                f" Moments that no plan changes, the optimizer's step among them, take {problem.floor_bytes} bytes."
            )
        elif problem.fixed_bytes > problem.budget_bytes:
            reason = (
                f" Parameters, buffers, the batch and the optimizer's state alone take {problem.fixed_bytes} bytes."
            )
        super().__init__(
            f"no plan of solver {solution.solver!r} fits a budget of {problem.budget_bytes} bytes: the least peak it "
            f"reaches is {self.least_peak_bytes} bytes.{reason} Raise the budget by "
            f"{self.least_peak_bytes - problem.budget_bytes} bytes, make the batch smaller, or try another solver."
        )
