"""`all`: every block is checkpointed, as a framework's switch for gradient checkpointing does."""

from __future__ import annotations

import time

from .blocks import blocks_of
from .choose import cheapest_fitting
from .problem import Problem
from .solution import Solution


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Checkpoint every block; time limit and gap play no part.

    Raises:
        BudgetTooSmallError: If that does not fit.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    blocks, note = blocks_of(problem)
    return cheapest_fitting(problem, [tuple(blocks)], solver="all", started_ns=started, note=note)
