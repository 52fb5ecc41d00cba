"""`price`: what a plan costs that was edited by hand. Its peak is a dry run's, its added time the simulator's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from torch import nn

from ...profiler.allocator import collected
from ...profiler.session import silent
from ...solvers.solution import make_solution
from ..applier.apply import check_subject, unplanned
from ..bridge.bridge import Bridge
from ..bridge.named import NamedSegments
from ..by_name import policy_named
from ..errors import PlanError
from ..options import StepKeywords, check_keywords, own_parameters
from ..plan import Plan
from .dry_runs import DryRunFailedError
from .planner import Found, Planner
from .writing import plan_of

if TYPE_CHECKING:
    from ...solvers import Segment, Solution
    from ..plan import PlannedSegment
    from .search import Draft

SOLVER, STATUS = "edited", "priced"
"""What a priced plan has for its solver and status."""
_NOTE = "the replays were not compared with the unmodified step, which `verify` does"


@collected()
def price(
    model: nn.Module,
    batch: object,
    plan: Plan,
    *,
    planner: Planner | None = None,
    progress: Callable[[str], None] | None = None,
    **step: Unpack[StepKeywords],
) -> Plan:
    """Return a plan with its figures worked out anew; nothing is searched, and nothing is applied.

    For plans that were edited by hand: what goes with a segment by its place (buffers to restore, whether a replay runs
    to its end) is filled in as well. The peak may be over the plan's budget, which stays what it was.

    Args:
        model: The model, as for `plan`. Autocast is switched on as the plan was made under, where none is.
        batch: As for `plan`.
        plan: The plan; its segments count, and how its step is run.
        planner: What `Planner.of` returned for this step, to price several plans from one profile.
        progress: Called with a few words before each phase.
        step: As for `plan`; what is left out is as in the plan: the card, the optimizer, accumulation, holds_output,
            units, ranks, mp_policy, ... Functions (`loss`, `parallelize`), which a plan holds the names of, are given
            again.

    Raises:
        PlanMismatchError: The plan is for another model.
        PlanError: A segment is not of this step, cannot be replayed, or does not go together with another; `planner`
            was made for another step; or a function that the plan was made with is not given.
        BatchError: The batch cannot be used.
    """
    check_keywords(step, own_parameters(price))
    check_subject(model, plan)
    plan.check(model)
    known = plan.circumstances
    with known.as_recorded(elsewhere=bool(step.get("device", known.card))):
        if planner is None:
            planner = Planner.of(model, batch, progress=progress, **{**_step_of(plan, model, step), **step})
        else:
            planner.check_given(model, batch, step)
        return _priced(plan, planner, progress or silent)


def _priced(plan: Plan, planner: Planner, say: Callable[[str], None]) -> Plan:
    say(f"dry run of {len(plan.segments)} segments")
    draft = drafted(planner, plan.segments)
    priced = plan_of(
        Found(planner=planner, draft=draft, notes=(_NOTE,)),
        budget_bytes=draft.peak_bytes,
        headroom=plan.circumstances.headroom,
    )
    return replace(
        priced,
        budget_bytes=plan.budget_bytes,
        lower_bound_overhead=None,
        gap=None,
        solver=SOLVER,
        status=STATUS,
    )


def drafted(planner: Planner, segments: tuple[PlannedSegment, ...]) -> Draft:
    """Dry-run segments that are given by name, and price them.

    Args:
        planner: A planner of the step.
        segments: The segments.

    Raises:
        PlanError: A segment is not of this step, cannot be replayed, or does not go together with another.
    """
    named = NamedSegments(planner.profile, segments)
    bridge = planner.bridge.of_named(named)
    planner = planner.with_bridge(bridge)
    solution = _solution(bridge, named.segments())
    with unplanned(planner.session.step.model), planner.session.step.guard.undisturbed():
        try:
            return planner.search.draft(solution)
        except DryRunFailedError as failed:
            raise failed.cause from None


def _step_of(plan: Plan, model: nn.Module, given: StepKeywords) -> StepKeywords:
    """Return how a plan's step is run, as far as its file holds it.

    Raises:
        PlanError: It was made with a function that is not among those given.
    """
    known = plan.circumstances
    for name, function in {"loss": known.loss, "parallelize": known.parallelize}.items():
        if function and name not in given:
            raise PlanError(
                f"the plan was made with {name}={function}, a function, of which its file holds the name alone: give "
                f"it again, or {name}=None to price the step without it"
            )
    return {
        "device": known.card or None,
        "mp_policy": policy_named(known.mp_policy),
        "reshard_after_forward": known.reshard_after_forward,
        "optimizer": known.optimizer or None,
        "accumulation": known.accumulation,
        "holds_output": known.holds_output,
        "exclude": known.exclude,
        "only": known.only,
        "alike": known.alike,
        "units": [model.get_submodule(path) for path in plan.units],
        "ranks": plan.ranks,
    }


def _solution(bridge: Bridge, segments: tuple[Segment, ...]) -> Solution:
    try:
        return make_solution(bridge.problem(1), segments, solver=SOLVER, started_ns=time.perf_counter_ns())
    except ValueError as error:
        raise PlanError(
            f"the plan's segments do not go together (in stages of this step: {error}); take one of them out"
        ) from None
