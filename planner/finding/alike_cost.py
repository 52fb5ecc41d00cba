"""What it costs to treat blocks alike: a plan against the best that need not, both by the solvers' own figures."""

from __future__ import annotations

from dataclasses import dataclass

from ...solvers import SOLVERS, BudgetTooSmallError, Solution, Status
from ...solvers.alike_space import pattern_changes
from ...solvers.solution import limit_in_force
from ..bridge.bridge import Bridge
from ..budget import format_bytes
from ..phases import Bounded
from .effort import Effort
from .search import Draft

NOTHING_REPEATS = "alike=True: no block of this model repeats, so it was planned as without"
MOST_S = 5.0
"""Seconds for the solve without blocks alike, which takes the longer the more blocks there are."""
_SEARCHING = ("auto", "dp", "ilp")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeCost:
    """Hold what is known of the same problem without blocks alike.

    Attributes:
        words: The patterns and what they cost, as notes of the plan.
        unrestricted: Added time of the best plan found there, at most that of the plan with blocks alike, as a share of
            the unplanned step's time; None where nothing was searched for.
    """

    words: tuple[str, ...]
    unrestricted: float | None = None


def alike_cost(bridge: Bridge, draft: Draft, limit: int, effort: Effort) -> AlikeCost:
    """Solve without blocks alike for the room that a plan with them has, and compare; nothing is dry-run.

    Args:
        bridge: The step's stages, candidates and kinds.
        draft: The plan; what the memory model missed of its peak is taken to be missed of others' as well.
        limit: Bytes that the peak may reach.
        effort: How the plan was found.
    """
    if not bridge.kinds:
        return AlikeCost(words=(NOTHING_REPEATS,))
    patterns = _patterns(bridge, draft)
    if effort.solver not in _SEARCHING:
        return AlikeCost(words=patterns)
    limit_s = min(MOST_S, limit_in_force(effort.time_limit_s))
    effort.say(Bounded("solving without blocks alike, to say what they cost", limit_s))
    plan, step_ns = draft.solution, max(1, bridge.profile.step_ns)
    problem = bridge.problem(max(1, plan.peak_bytes + limit - draft.peak_bytes))
    try:
        free: Solution | None = SOLVERS[effort.solver](problem, time_limit_s=limit_s, gap=effort.gap)
    except BudgetTooSmallError:
        free = None  # A solver may overstate what a plan holds, see `RetentionGraph`.
    added_ns = plan.added_ns if free is None else min(plan.added_ns, free.added_ns)
    proven = plan.added_ns == 0 or (free is not None and free.status is Status.OPTIMAL)
    own, other = 100 * plan.added_ns / step_ns, 100 * added_ns / step_ns
    if proven:
        words = f"costs {own - other:.1f} points" if added_ns < plan.added_ns else "costs nothing"
    else:
        words = f"costs at least {own - other:.1f} points, for that no plan without adds less is not proven"
    words = f"treating blocks alike {words}: {own:.1f} % added, {other:.1f} % without (both predicted)"
    return AlikeCost(words=(*patterns, words), unrestricted=added_ns / step_ns)


def _patterns(bridge: Bridge, draft: Draft) -> tuple[str, ...]:
    """Say for each kind of block whether its pattern changes, and where."""
    found: list[str] = []
    for kind in bridge.kinds:
        names = [bridge.name(bounds[0], bounds[-1]) for bounds in kind.bounds]
        changes = pattern_changes(kind, draft.solution.segments)
        words = f"one pattern, another from {names[changes[0]]} on" if changes else "one pattern"
        found.append(f"{words}, in {len(names)} blocks alike, {names[0]} to {names[-1]}; their times are averaged")
    return tuple(found)


def less_without(bridge: Bridge, draft: Draft, effort: Effort) -> str:
    """Say how far the peak falls without blocks alike, where that is less; "" else."""
    if not bridge.kinds:
        return ""
    problem = bridge.problem(1)
    try:
        free = SOLVERS[effort.solver](problem, time_limit_s=MOST_S, gap=effort.gap).peak_bytes
    except BudgetTooSmallError as error:
        free = error.least_peak_bytes
    less = draft.solution.peak_bytes - free
    if less <= 0:
        return ""
    return (
        f"blocks are treated alike, as asked by alike: without it, plans reach {format_bytes(less)} less, "
        f"{format_bytes(max(0, draft.peak_bytes - less))} (by the solver's memory model)"
    )
