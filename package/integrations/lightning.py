"""Lightning: a callback that plans a LightningModule's `training_step` at the first batch, before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from remat.planner import Applied, ApplyError, Plan, apply
from remat.profiler import BatchError
from torch import nn

from .first_batch import FirstPlan, FirstPlanKeywords


class PlanCallback(Callback):
    """Plan at the first batch and train under the plan: `Trainer(..., callbacks=[PlanCallback("60%")])`.

    The step is the module's `training_step` under the Trainer's precision, with its optimizer; what it logs
    while planning is dropped. The plan is kept in `default_root_dir`/remat and taken off when training ends.

    Args:
        budget: Most bytes at the peak of the whole step: an int, "8GiB", "60%" of the unplanned peak, or "auto"; see
            `FirstPlan`.
        keywords: `folder`, `reserve`, `solver`, ... of `FirstPlan`, and options of the step, as for `remat.plan`.

    Attributes:
        plan: The plan that the module trains with; None before the first batch.
    """

    def __init__(self, budget: int | str, **keywords: Unpack[FirstPlanKeywords]) -> None:
        self.plan: Plan | None = None
        self._settings = FirstPlan.of(budget, keywords)
        self._applied: Applied | None = None
        self._module: LightningModule | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan, once.

        Raises:
            ApplyError: The module trains in a way that plans do not go with.
        """
        if self._applied is not None:
            return
        _refuse(trainer, pl_module)
        takes_number = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        root = TrainingStep(pl_module, arguments=1 + takes_number)
        known: dict[str, Any] = {
            "loss": _returned_loss,
            "optimizer": trainer.optimizers[0],
            "holds_output": False,
            # Lightning frees gradients between training_step and backward: they are there throughout the forward.
            "accumulation": True,
        }
        given = (batch, batch_idx) if takes_number else (batch,)
        folder = Path(trainer.default_root_dir) / "remat"
        with trainer.precision_plugin.train_step_context():
            self.plan = self._settings.make(root, given, folder=folder, around=lambda: _unlogged(pl_module), **known)
        self._applied, self._module = apply(root, self.plan), pl_module
        # A module would become a part of the module it stands for; a method is none, and is copied with its module.
        pl_module.training_step = root.__call__

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the plan off; the module is as it was."""
        self._take_off()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the plan off; the module is as it was."""
        self._take_off()

    def __repr__(self) -> str:
        return f"<PlanCallback: {self._settings.words(self.plan)}>"

    def _take_off(self) -> None:
        if self._applied is not None:
            self._applied.remove()
        if self._module is not None:
            del self._module.training_step
        self._applied = self._module = None


class TrainingStep(nn.Module):
    """A LightningModule whose forward is its `training_step`: the same parts under the same names, no copies."""

    def __init__(self, module: LightningModule, *, arguments: int) -> None:
        super().__init__()
        for registry in ("_parameters", "_buffers", "_modules"):
            vars(self)[registry] = vars(module)[registry]
        # Past nn.Module, which would take the module for a part.
        vars(self).update(owner=module, step=module.training_step, arguments=arguments)

    @property
    def training(self) -> bool:
        """Return the mode of the module it stands for."""
        return bool(vars(self)["owner"].training)

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # What nn.Module sets when it is made.
        pass

    def forward(self, *given: Any) -> Any:
        """Take the step, with the batch, and with its number where `training_step` has a place for it."""
        return vars(self)["step"](*given[: vars(self)["arguments"]])


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    reason = ""
    if not module.automatic_optimization:
        reason = (
            "automatic_optimization=False, so training_step runs backward itself: plan the network inside of it "
            "beforehand, with remat.plan and remat.apply"
        )
    elif not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        reason = (
            f"with {type(trainer.strategy).__name__} no rank has the whole model: plan beforehand, with units= and "
            "ranks=, and apply the plan on each rank"
        )
    elif getattr(module, "_compiler_ctx", None) is not None:
        reason = (
            "the module is compiled: plan the network inside of it beforehand with cross_operators=False, and apply "
            "the plan before it is compiled"
        )
    if reason:
        raise ApplyError(f"PlanCallback: {reason}")


@contextmanager
def _unlogged(module: LightningModule) -> Iterator[None]:
    """Let a module's steps log nothing; what else they change, planning puts back."""
    attributes = vars(module)
    own = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
    attributes.update(log=_nothing, log_dict=_nothing)
    try:
        yield
    finally:
        del attributes["log"], attributes["log_dict"]
        attributes.update(own)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _returned_loss(output: Any) -> torch.Tensor:
    """Return the loss where Lightning looks for it."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        raise BatchError(
            "training_step returned no loss for the first batch: begin with a batch that it has a loss for"
        )
    return loss
