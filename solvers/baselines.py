"""The baselines: a few plans listed one by one, and the cheapest that fits. Time limit and gap play no part in them.

`none` keeps everything, `all` checkpoints every block as a framework's switch does, `uniform` every k-th. `sqrt` and
`greedy` are from Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174
(2016), section 4 and algorithm 3. Blocks are the candidates marked so, which a user would wrap by hand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from .errors import BudgetTooSmallError
from .problem import Problem, Segment
from .simulate import simulate
from .solution import Solution, make_solution

_SIZES = 48
_NO_BLOCKS = "no candidate is marked as a block: the shortest candidate at each place stands for one"
_Stops = dict[int, list[int]]


def none(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Keep everything.

    Raises:
        BudgetTooSmallError: If that does not fit.
    """
    del time_limit_s, gap
    return _cheapest_fitting(problem, [()], solver="none", started_ns=time.perf_counter_ns())


def every_block(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Checkpoint every block.

    Raises:
        BudgetTooSmallError: If that does not fit.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    blocks, note = _blocks_of(problem)
    return _cheapest_fitting(problem, [tuple(blocks)], solver="all", started_ns=started, note=note)


def uniform(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Checkpoint every k-th block, the first one included; nothing checkpointed counts as the largest k.

    Raises:
        BudgetTooSmallError: If no k fits.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    blocks, note = _blocks_of(problem)
    plans = [(), *(tuple(blocks[::step]) for step in range(1, len(blocks) + 1))]
    return _cheapest_fitting(problem, plans, solver="uniform", started_ns=started, note=note)


def sqrt(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Cut the blocks into equal groups, and run each but the last as a segment.

    The number of groups starts at the root of the number of blocks; where that does not fit, every number is tried
    and the cheapest that fits is taken. Single stages stand for blocks where no candidate is marked as one. A group
    that is no candidate itself is covered by the longest candidates inside it.

    Raises:
        BudgetTooSmallError: If no number of groups fits.
    """
    del time_limit_s, gap
    started = time.perf_counter_ns()
    marked = sorted((item.start, item.stop) for item in problem.candidates if item.block)
    units = marked or [(stage, stage + 1) for stage in range(len(problem.stages))]
    stops = _stops_by_start(problem)
    root = max(1, round(math.sqrt(len(units))))
    found = make_solution(problem, _groups(units, stops, root), solver="sqrt", started_ns=started)
    if found.peak_bytes <= problem.budget_bytes:
        return found
    note = f"the root of {len(units)} blocks, {root} segments, does not fit: the cheapest number that fits is taken"
    plans = [_groups(units, stops, groups) for groups in range(1, len(units) + 1)]
    return _cheapest_fitting(problem, plans, solver="sqrt", started_ns=started, note=note)


def greedy(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Grow each segment until its stages save more than a size, for a range of sizes, and take the cheapest that fits.

    Sizes are spaced evenly on a logarithmic scale between the stage that saves least and the whole; each is tried with
    the last segment checkpointed and kept. A segment is the longest candidate from where the last one ended that stays
    within the size.

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
        stops = _stops_by_start(problem)
        for size in np.geomspace(float(positive.min()), float(total[-1]), _SIZES):
            within = {a: [b for b in ends if total[b] - total[a] <= round(float(size))] for a, ends in stops.items()}
            plan = tuple(_cover(within, 0, count))
            plans += [plan, plan[:-1]]
    return _cheapest_fitting(problem, plans, solver="greedy", started_ns=started)


def _cheapest_fitting(
    problem: Problem, plans: Iterable[tuple[Segment, ...]], *, solver: str, started_ns: int, note: str = ""
) -> Solution:
    """Return the plan that adds least time among those that fit the budget; the smaller peak where times are equal.

    Raises:
        BudgetTooSmallError: If none fits; it carries the plan of the smallest peak.
    """
    priced = [(simulate(problem, plan, trace=False), plan) for plan in dict.fromkeys(plans)]
    fitting = [
        (price.added_ns, price.peak_bytes, plan) for price, plan in priced if price.peak_bytes <= problem.budget_bytes
    ]
    if fitting:
        plan = min(fitting, key=lambda item: item[:2])[2]
        return make_solution(problem, plan, solver=solver, started_ns=started_ns, note=note)
    plan = min(priced, key=lambda item: (item[0].peak_bytes, item[0].added_ns))[1]
    raise BudgetTooSmallError(problem, make_solution(problem, plan, solver=solver, started_ns=started_ns, note=note))


def _blocks_of(problem: Problem) -> tuple[list[Segment], str]:
    """Return the blocks as segments, in order, and a note that is empty when they are the model's own.

    Where no candidate is marked as a block, the shortest candidate at each place is taken, left to right.
    """
    marked = sorted((item.start, item.stop) for item in problem.candidates if item.block)
    note = ""
    if not marked:
        marked = sorted((item.start, item.stop) for item in problem.candidates)
        note = _NO_BLOCKS if marked else "the problem has no candidates"
    segments: list[Segment] = []
    for start, stop in marked:
        if not segments or start >= segments[-1].stop:
            segments.append(Segment(start=start, stop=stop))
    return segments, note


def _groups(units: list[tuple[int, int]], stops: _Stops, groups: int) -> tuple[Segment, ...]:
    """Cut units into `groups` equal runs and checkpoint all but the last."""
    cuts = [round(group * len(units) / groups) for group in range(groups + 1)]
    segments: list[Segment] = []
    for first, last in pairwise(cuts[:-1]):
        if first < last:
            segments += _cover(stops, units[first][0], units[last - 1][1])
    return tuple(segments)


def _stops_by_start(problem: Problem) -> _Stops:
    """Return, for each stage where candidates start, where they stop, ascending."""
    stops: _Stops = {}
    for start, stop in sorted((item.start, item.stop) for item in problem.candidates):
        stops.setdefault(start, []).append(stop)
    return stops


def _cover(stops: _Stops, start: int, stop: int) -> list[Segment]:
    """Cover start:stop with candidates inside it, the longest at each place, left to right; the rest stays kept."""
    segments: list[Segment] = []
    position = start
    while position < stop:
        fitting = [end for end in stops.get(position, ()) if end <= stop]
        if fitting:
            segments.append(Segment(start=position, stop=fitting[-1]))
            position = fitting[-1]
        else:
            position += 1
    return segments
