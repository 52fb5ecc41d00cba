"""`greedy`: segments that each save about equally many bytes; the size is searched under the budget.

Algorithm 3 of Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016).
"""

from __future__ import annotations

import time

import numpy as np

from .blocks import stops_by_start
from .choose import cheapest_fitting
from .problem import Problem, Segment
from .solution import Solution

_SIZES = 48


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Grow each segment until its stages save more than a size, for a range of sizes, and take the cheapest that fits.

    Sizes are spaced evenly on a logarithmic scale between the stage that saves least and the whole; each is tried with
    the last segment checkpointed and kept. A segment is the longest candidate from where the last one ended that stays
    within the size. Time limit and gap play no part.

    Raises:
        BudgetTooSmallError: If no size fits.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    count = len(problem.stages)
    saved = np.zeros(count + 1, dtype=np.int64)
    for tensor in problem.tensors:
        if tensor.holders:
            saved[tensor.holders[0] + 1] += tensor.nbytes
    total = saved.cumsum()
    positive = saved[saved > 0]
    plans: list[tuple[Segment, ...]] = [()]
    if len(positive):
        stops = stops_by_start(problem)
        for size in np.geomspace(float(positive.min()), float(total[-1]), _SIZES):
            plan = _plan(stops, total, count, round(float(size)))
            plans += [plan, plan[:-1]]
    return cheapest_fitting(problem, plans, solver="greedy", started_ns=started)


def _plan(stops: dict[int, list[int]], total: np.ndarray, count: int, size: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    position = 0
    while position < count:
        ends = stops.get(position, [])
        fitting = [stop for stop in ends if total[stop] - total[position] <= size]
        if fitting:
            segments.append(Segment(start=position, stop=fitting[-1]))
            position = fitting[-1]
        else:
            position += 1
    return tuple(segments)
