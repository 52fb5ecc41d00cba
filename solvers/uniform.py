"""`uniform`: every k-th block is checkpointed, with the k that adds least time and fits."""

from __future__ import annotations

import time

from .blocks import blocks_of
from .choose import cheapest_fitting
from .problem import Problem
from .solution import Solution


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Checkpoint every k-th block, the first one included; nothing checkpointed counts as the largest k.

    Time limit and gap play no part.

    Raises:
        BudgetTooSmallError: If no k fits.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    blocks, note = blocks_of(problem)
    plans = [(), *(tuple(blocks[::step]) for step in range(1, len(blocks) + 1))]
    return cheapest_fitting(problem, plans, solver="uniform", started_ns=started, note=note)
