"""All solvers by name, with one call shape."""

from __future__ import annotations

from typing import Protocol

from . import auto, baselines
from .chain import alike, dp, dp_nested
from .integer import ilp
from .problem import Problem
from .solution import Solution


class Solver(Protocol):
    """Solve a problem; see the solver's own module for its plan space."""

    def __call__(self, problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
        """Return a plan that fits the budget, or raise `BudgetTooSmallError`.

        `time_limit_s` is `DEFAULT_LIMIT_S` (20 s) unless given; a plan that it cut short says so in its status and
        note, with the bound proven until then.
        """
        ...


SOLVERS: dict[str, Solver] = {
    "none": baselines.none,
    "all": baselines.every_block,
    "uniform": baselines.uniform,
    "sqrt": baselines.sqrt,
    "greedy": baselines.greedy,
    "dp": dp.solve,
    "dp_nested": dp_nested.solve,
    "ilp": ilp.solve,
    "auto": auto.solve,
}

ALIKE: dict[str, Solver] = {
    "none": baselines.none,
    "all": baselines.every_block,
    "dp": alike.solve,
    "ilp": ilp.solve_alike,
    "auto": auto.solve_alike,
}
"""The solvers that treat the blocks of each kind alike (`Problem.kinds`): those two do anyway, and these when asked."""

DRY_RUN_WITH: dict[str, tuple[str, ...]] = {"dp_nested": ("dp",), "auto": ("dp",)}
"""Solvers whose plans are dry-run beside another's. What is alive inside nested replays is foreseen less well, and
what a card reserves beside tensors differs from plan to plan: where that costs rounds of solving for less, `dp` may be
ahead."""

LEAST_OF_ALL = "sqrt"
"""The solver whose plan of least peak is tried where another's does not fit: few and long segments, easily foreseen."""
