"""`sqrt`: equal segments, about as many as the root of the number of blocks, the last one kept.

Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016), section 4.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

from .blocks import cover, stops_by_start
from .choose import cheapest_fitting
from .problem import Problem, Segment
from .solution import Solution, make_solution


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Cut the blocks into equal groups, and run each but the last as a segment.

    The number of groups starts at the root of the number of blocks; where that does not fit, every number is tried
    and the cheapest that fits is taken. Blocks are the candidates marked so, or single stages where none is. A group
    that is no candidate itself is covered by the longest candidates inside it. Time limit and gap play no part.

    Raises:
        BudgetTooSmallError: If no number of groups fits.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    marked = sorted((item.start, item.stop) for item in problem.candidates if item.block)
    units = marked or [(stage, stage + 1) for stage in range(len(problem.stages))]
    stops = stops_by_start(problem)
    root = max(1, round(math.sqrt(len(units))))
    plan = _plan(units, stops, root)
    found = make_solution(problem, plan, solver="sqrt", started_ns=started)
    if found.peak_bytes <= problem.budget_bytes:
        return found
    note = f"the root of {len(units)} blocks, {root} segments, does not fit: the cheapest number that fits is taken"
    plans = [_plan(units, stops, groups) for groups in range(1, len(units) + 1)]
    return cheapest_fitting(problem, plans, solver="sqrt", started_ns=started, note=note)


def _plan(units: list[tuple[int, int]], stops: dict[int, list[int]], groups: int) -> tuple[Segment, ...]:
    """Cut units into `groups` equal runs and checkpoint all but the last."""
    cuts = [round(group * len(units) / groups) for group in range(groups + 1)]
    segments: list[Segment] = []
    for first, last in pairwise(cuts[:-1]):
        if first < last:
            segments += cover(stops, units[first][0], units[last - 1][1])
    return tuple(segments)
