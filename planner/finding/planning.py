"""`plan`: check what was asked for, profile the step, and plan it for one batch or for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from torch import nn

from ...profiler.allocator import collected
from ...profiler.session import silent
from ...profiler.step import BatchError
from ..budget import BudgetError, check_share, parse_budget
from ..errors import PlanError
from ..options import StepKeywords, check_keywords, own_parameters
from ..plan import Plan
from .effort import Effort, check_effort, check_solver
from .planner import Planner
from .several import plan_for_several


@collected()
def plan(
    model: nn.Module,
    batch: object = None,
    budget: int | str | None = None,
    *,
    batches: Sequence[object] | None = None,
    solver: str = "auto",
    headroom: float = 0.0,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    planner: Planner | None = None,
    check: bool = True,
    race: int = 0,
    progress: Callable[[str], None] | None = None,
    **step: Unpack[StepKeywords],
) -> Plan:
    """Find where to checkpoint so that the step fits the budget and the added time is least.

    The model is left as it was; nothing is applied.

    Args:
        model: The model, on the device it is trained on.
        batch: A mapping is passed as keyword arguments, a tuple or list as positional ones, a tensor alone as one.
        budget: Most bytes at the peak of the whole step: an int, "8GiB", or "60%" of the unplanned peak.
        batches: Several batches, in place of `batch`, that differ in sizes alone: one plan is made whose peak is under
            the budget with each of them, and the added time least with the one that binds. Each is profiled and tried.
        solver: A name from `SOLVERS`: "auto", "dp", "ilp", "sqrt", ...
        headroom: Share of the budget to keep free.
        time_limit_s: Seconds for each solve; None stands for 20. A plan that was cut short says so, with its bound.
        gap: Share of the added time that a plan may be away from the optimum.
        planner: What `Planner.of` returned, to plan several budgets from one profile.
        check: Run the planned and the unmodified step once for real, and plan again without the segments whose replay
            computes something else.
        race: Time so many plans in turn with the unplanned step, of the solver asked for and of others, and return the
            measured best; what is learnt of the operators' times goes into one more search. Takes as many more steps.
        progress: Called with a few words before each phase.
        step: What else the step is: loss, optimizer, accumulation, save_sets, units, ranks, ...; see `StepOptions`.

    Raises:
        InfeasibleBudgetError: No plan fits; it carries the smallest peak found, its plan, and what holds it there.
        BudgetError: The budget, the headroom or the solver's name cannot be read.
        BatchError: The batch, `units` or `ranks` cannot be used.
        PlanError: `planner` was made for another model, batch or step than the one given.
    """
    check_keywords(step, own_parameters(plan))
    check_share("headroom", headroom)
    check_solver(solver, alike=planner.options.alike if planner is not None else step.get("alike", False))
    check_effort(time_limit_s, gap)
    if budget is None:
        raise BudgetError('budget is missing: pass bytes, "8GiB", or "60%" of the unplanned peak')
    parse_budget(budget, 1 << 40)
    if batches is not None:
        _check_alone(batch=batch, planner=planner, race=race, alike=step.get("alike"))
        effort = Effort(solver=solver, time_limit_s=time_limit_s, gap=gap, say=progress or silent)
        return plan_for_several(model, batches, budget, effort, headroom=headroom, check=check, step=step)
    if planner is None:
        planner = Planner.of(model, batch, progress=progress, **step)
    else:
        planner.check_given(model, batch, step)
    return planner.plan(
        budget,
        solver=solver,
        headroom=headroom,
        time_limit_s=time_limit_s,
        gap=gap,
        check=check,
        race=race,
        progress=progress,
    )


def _check_alone(**others: object) -> None:
    """Refuse what cannot be given together with several batches.

    Raises:
        BatchError: `batch` is given, too.
        PlanError: `planner`, `race` or `alike` is, which are about one batch.
    """
    if others.pop("batch") is not None:
        raise BatchError("batch and batches are both given: put the batch among the others, batches=[batch, ...]")
    for name, value in others.items():
        if value:
            raise PlanError(
                f"{name}= is about one batch, and batches= are several: pass the one that is largest in every "
                f"dimension, or leave {name}= out"
            )
