"""Numbers only: a Problem in, a Solution out, one simulator that prices every plan. Never imports torch."""

from .problem import Candidate, Operator, Problem, Segment, Stage, Tensor
from .simulate import Moment, Simulation, simulate

__all__ = [
    "Candidate",
    "Moment",
    "Operator",
    "Problem",
    "Segment",
    "Simulation",
    "Stage",
    "Tensor",
    "simulate",
]
