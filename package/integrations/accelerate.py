"""accelerate: plan at the first batch with what the Accelerator knows of precision, accumulation and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from accelerate import Accelerator, DistributedType
from remat.planner import Applied, PlanError, apply
from remat.planner.applier.apply import applied_to
from torch import nn

from .first_batch import FirstPlan, FirstPlanKeywords

WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
"""Ways of training in which every rank has the whole model."""


def plan_once(
    accelerator: Accelerator,
    model: nn.Module,
    batch: object,
    budget: int | str,
    **keywords: Unpack[FirstPlanKeywords],
) -> Applied:
    """Plan and apply before each step of a loop; calls after the first return at once.

    Precision, accumulation and ranks are the accelerator's; plans are kept in its project folder, where it has one.

    Args:
        accelerator: What prepared the model.
        model: The prepared model.
        batch: What the model is about to be called with, as for `remat.plan`.
        budget: As for `remat.plan`, or "auto"; see `FirstPlan`.
        keywords: As for `remat.integrations.plan_once`; with `loss=` a function of the model's output, and
            `optimizer=` the prepared optimizer.

    Raises:
        PlanError: There can be no plan, for this budget or for this model in this run.
    """
    plain = accelerator.unwrap_model(model)
    applied = applied_to(plain)
    if applied is not None:
        return applied
    if accelerator.distributed_type not in WHOLE:
        raise PlanError(
            f"accelerate trains with {accelerator.distributed_type.value}, where no rank has the whole model: plan "
            "before prepare, with units= and ranks=, and apply the plan on each rank"
        )
    known: dict[str, Any] = {"accumulation": accelerator.gradient_accumulation_steps > 1}
    folder = Path(accelerator.project_dir) / "remat" if accelerator.project_dir else None
    with accelerator.autocast():
        made = FirstPlan.of(budget, keywords).make(plain, batch, folder=folder, **known)
    return apply(plain, made)
