"""Plan at the first batch of a run, once, and apply; what every trainer's integration is made of."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Unpack

import torch
from remat.amounts import AUTO, format_bytes
from remat.planner import Applied, Plan, PlanError, apply
from remat.planner.applier.apply import applied_to
from remat.planner.budget import parse_budget
from remat.planner.finding.effort import check_solver
from remat.planner.finding.planning import plan
from remat.planner.options import StepKeywords, StepOptions, check_keywords
from torch import nn
from torch.utils import _pytree as pytree

from .device_budget import RESERVE, device_budget
from .kept_plans import KeptPlans
from .ranks import from_rank_0, least, several

_log = logging.getLogger("remat")


class FirstPlanKeywords(StepKeywords, total=False):
    """The keywords of `plan_once` and of the callbacks: fields of `FirstPlan`, and options of the step."""

    folder: str | os.PathLike[str] | None
    reserve: int | str
    solver: str
    headroom: float
    time_limit_s: float | None
    progress: Callable[[str], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """Say how to plan once there is a batch.

    Attributes:
        budget: Most bytes at the peak of the whole step: an int, "8GiB", "60%" of the unplanned peak, or "auto": what
            the device has free at that moment, less `reserve`; of several ranks, the least of them.
        folder: Where plans are kept, by model, shapes, precision, options and versions, so that a second start plans
            nothing; None takes the trainer's own folder, and keeps nothing where there is none.
        reserve: What "auto" leaves: bytes, "2GiB", or a share of what is free.
        solver: As for `plan`.
        headroom: As for `plan`.
        time_limit_s: As for `plan`.
        progress: Called with a few words before each phase.
        step: Options of the step, as for `plan`; what a trainer knows itself it fills in.
    """

    budget: int | str
    folder: Path | None = None
    reserve: int | str = RESERVE
    solver: str = "auto"
    headroom: float = 0.0
    time_limit_s: float | None = None
    progress: Callable[[str], None] | None = None
    step: StepKeywords = field(default_factory=StepKeywords)

    @classmethod
    def of(cls, budget: int | str, keywords: FirstPlanKeywords) -> FirstPlan:
        """Take keywords apart, and check what can be checked without a model.

        Raises:
            TypeError: There is no such keyword.
            PlanError: A value cannot be read.
        """
        own = [name.name for name in fields(cls) if name.name not in ("budget", "step")]
        step: Any = {name: value for name, value in keywords.items() if name not in own}
        check_keywords(step, own)
        StepOptions.of(step)
        if budget != AUTO:
            parse_budget(budget, 1 << 40)
        given: dict[str, Any] = {name: value for name, value in keywords.items() if name in own}
        if given.get("folder") is not None:
            given["folder"] = Path(given["folder"])
        check_solver(given.get("solver", "auto"), alike=step.get("alike", False))
        return cls(budget=budget, step=step, **given)

    def make(
        self,
        model: nn.Module,
        batch: object,
        *,
        folder: str | os.PathLike[str] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **known: Unpack[StepKeywords],
    ) -> Plan:
        """Return the plan for a batch, the same on all ranks: a kept one, or one that rank 0 makes and keeps.

        Args:
            model: The model, not a wrapper of it, unsharded, on its device.
            batch: As for `plan`.
            folder: The trainer's own folder, taken where none was asked for.
            around: Surrounds planning alone.
            known: Options of the step that the trainer knows; those asked for go before them.

        Raises:
            PlanError: There can be no plan, for this budget or for this model in this run.
        """
        _refuse_sharded(model)
        step: Any = {**known, **self.step}
        # accelerate's wrapper passes on to the optimizer that it holds.
        step["optimizer"] = getattr(step.get("optimizer"), "optimizer", step.get("optimizer"))
        limit: int | str = self.budget
        if limit == AUTO:
            limit = least(device_budget(model, batch, step.get("optimizer"), self.reserve))
        asked = {**step, "budget": self.budget, "reserve": self.reserve, "solver": self.solver}
        kept = KeptPlans(self.folder or (None if folder is None else Path(folder)), asked, model, batch)

        def text() -> str:
            # Runs on rank 0 alone: what is done is told once.
            found = kept.find()
            if found is not None and not (isinstance(limit, int) and (found.predicted_peak_bytes or 0) > limit):
                _log.info("training under a plan that was kept in %s: %r", kept.path, found)
                return found.to_json()
            with around():
                found = self._plan(model, batch, limit, step)
            kept.keep(found)
            return found.to_json()

        return Plan.from_json(from_rank_0(text))

    def words(self, made: Plan | None) -> str:
        """Return the budget in words, and the plan that came of it, if there is one by now."""
        return f"budget {self.budget!r}, {'waits for the first batch' if made is None else repr(made).strip('<>')}"

    def _plan(self, model: nn.Module, batch: object, limit: int | str, step: StepKeywords) -> Plan:
        """Plan, and log what is done: it takes a while, and trainers show nothing meanwhile.

        Begin and end are logged as warnings, which are seen where nothing is configured.
        """
        count = sum(parameter.numel() for parameter in model.parameters())
        words = format_bytes(limit) if isinstance(limit, int) else limit
        _log.warning(
            "remat: planning at the first batch, which runs some steps and takes from seconds to minutes: "
            "%s parameters, batch %s, budget %s",
            f"{count:,}",
            _shapes(batch),
            words,
        )
        began = time.monotonic()
        found = plan(
            model,
            batch,
            limit,
            solver=self.solver,
            headroom=self.headroom,
            time_limit_s=self.time_limit_s,
            progress=self._say,
            **step,
        )
        _log.warning("remat: planned in %.1f s: %r", time.monotonic() - began, found)
        return found

    def _say(self, words: str) -> None:
        _log.info("planning: %s", words)
        if self.progress is not None:
            self.progress(words)


def plan_once(model: nn.Module, batch: object, budget: int | str, **keywords: Unpack[FirstPlanKeywords]) -> Applied:
    """Plan and apply, in a loop of your own: before each step, with what the step is about to be given.

    The first call plans (or takes a kept plan) and applies it; the calls after that return at once. Call it where
    forward is called: under the same autocast, with the model in train mode.

    Args:
        model: The model, not a wrapper of it.
        batch: As for `plan`.
        budget: As for `plan`, or "auto"; see `FirstPlan`.
        keywords: `folder`, `reserve`, `solver`, ... of `FirstPlan`, and the options of the step: loss, optimizer,
            accumulation, ...

    Raises:
        PlanError: There can be no plan, for this budget or for this model in this run.
    """
    applied = applied_to(model)
    if applied is None:
        applied = apply(model, FirstPlan.of(budget, keywords).make(model, batch))
    return applied


def _shapes(batch: object) -> str:
    """Say what tensors a batch holds, by their names where they have names."""
    found = [(path, leaf) for path, leaf in pytree.tree_leaves_with_path(batch) if isinstance(leaf, torch.Tensor)]
    names = (" ".join(f"{key.key} " for key in path if isinstance(key, pytree.MappingKey)) for path, _ in found)
    return ", ".join(
        f"{name}{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        for name, (_, leaf) in zip(names, found, strict=True)
    )


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse models whose step one rank cannot run by itself.

    Raises:
        PlanError: The model is sharded, or its normalisation talks to other ranks.
    """
    before = (
        "plan before training instead, with units= and ranks= for a model that will be sharded, and apply the plan on "
        "each rank: remat.apply(model, remat.Plan.load(path))"
    )
    sharded = next((name for name, value in model.named_parameters() if hasattr(value, "device_mesh")), None)
    if sharded is not None:
        raise PlanError(f"{sharded!r} is already sharded over ranks, and a plan is made of the whole model: {before}")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and several():
            raise PlanError(f"{name!r} is a SyncBatchNorm, which one rank cannot run while it plans: {before}")
