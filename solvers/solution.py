"""What every solver returns, and the one way to make it: the simulator prices the segments."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from .problem import Problem, Segment
from .simulate import simulate

DEFAULT_LIMIT_S = 20.0
"""Seconds after which `dp`, `dp_nested`, `ilp` and `auto` return the best plan known, where no limit is given."""


def limit_in_force(time_limit_s: float | None) -> float:
    """Return the seconds that a solver may take: those given, else `DEFAULT_LIMIT_S`."""
    return DEFAULT_LIMIT_S if time_limit_s is None else time_limit_s


class Status(StrEnum):
    """Say how much is proven about a solution.

    Attributes:
        OPTIMAL: No plan of the solver's plan space that fits the budget adds less time.
        FEASIBLE: The plan fits the budget; nothing, or only `lower_bound_ns`, is proven about better ones.
        TIME_LIMIT: As feasible, and the search was cut short by its time limit.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Hold a plan that fits the budget.

    Attributes:
        solver: Name of the solver whose plan it is, as in `SOLVERS`.
        segments: The chosen segments, a tree.
        peak_bytes: Peak of the whole step by `simulate`.
        added_ns: Time of all replays by `simulate`, in nanoseconds.
        status: What is proven.
        lower_bound_ns: No plan in the solver's plan space adds less, in nanoseconds. 0 where nothing is proven.
        wall_ns: What solving took, in nanoseconds.
        note: What a reader must know: a fallback, an approximation, a limit that was hit. Empty when nothing.
    """

    solver: str
    segments: tuple[Segment, ...]
    peak_bytes: int
    added_ns: int
    status: Status
    lower_bound_ns: int
    wall_ns: int
    note: str = ""

    @property
    def gap(self) -> float:
        """Return how far the plan may be from the best, as a share of its added time: 0 when proven optimal."""
        return (self.added_ns - self.lower_bound_ns) / self.added_ns if self.added_ns else 0.0

    def count_segments(self) -> int:
        """Return the number of segments at any depth."""
        return sum(1 for segment in self.segments for _ in segment.walk())


def make_solution(
    problem: Problem,
    segments: tuple[Segment, ...],
    *,
    solver: str,
    started_ns: int,
    status: Status = Status.FEASIBLE,
    lower_bound_ns: int = 0,
    note: str = "",
) -> Solution:
    """Price segments with the simulator and wrap them up; a bound above the price is cut to it.

    Args:
        problem: The problem they solve.
        segments: The plan.
        solver: Name of the solver.
        started_ns: `time.perf_counter_ns()` when it started.
        status: What is proven; a plan that adds nothing is optimal whatever is said.
        lower_bound_ns: Proven bound on the added time.
        note: What a reader must know.
    """
    price = simulate(problem, segments, trace=False)
    if price.added_ns == 0:
        status = Status.OPTIMAL
    return Solution(
        solver=solver,
        segments=segments,
        peak_bytes=price.peak_bytes,
        added_ns=price.added_ns,
        status=status,
        lower_bound_ns=price.added_ns if status is Status.OPTIMAL else min(lower_bound_ns, price.added_ns),
        wall_ns=time.perf_counter_ns() - started_ns,
        note=note,
    )
