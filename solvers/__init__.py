"""Numbers only: a Problem in, a Solution out, one simulator that prices every plan. Never imports torch."""

from .errors import BudgetTooSmallError
from .problem import Candidate, Kind, Operator, Problem, Segment, Stage, Tensor
from .registry import ALIKE, DRY_RUN_WITH, LEAST_OF_ALL, SOLVERS, Solver
from .simulate import Moment, Simulation, simulate
from .solution import Solution, Status

__all__ = [
    "ALIKE",
    "DRY_RUN_WITH",
    "LEAST_OF_ALL",
    "SOLVERS",
    "BudgetTooSmallError",
    "Candidate",
    "Kind",
    "Moment",
    "Operator",
    "Problem",
    "Segment",
    "Simulation",
    "Solution",
    "Solver",
    "Stage",
    "Status",
    "Tensor",
    "simulate",
]
