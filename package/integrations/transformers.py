"""transformers' Trainer: a callback that plans when the model is first called to train, before that call runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
from remat.planner import Applied, ApplyError, Plan, apply
from remat.profiler import BatchError
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from .first_batch import FirstPlan, FirstPlanKeywords
from .first_call import FirstCall


class PlanCallback(TrainerCallback):
    """Plan at the first batch and train under the plan: `Trainer(..., callbacks=[PlanCallback("60%")])`.

    The step is the Trainer's: its precision, accumulation and optimizer, and the loss that the model returns. The plan
    is kept in `output_dir`/remat and taken off when training ends. Evaluation and generation run as without it.

    Args:
        budget: Most bytes at the peak of the whole step: an int, "8GiB", "60%" of the unplanned peak, or "auto"; see
            `FirstPlan`.
        keywords: `folder`, `reserve`, `solver`, ... of `FirstPlan`, and options of the step, as for `remat.plan`.

    Attributes:
        plan: The plan that the model trains with; None before the first batch.
    """

    def __init__(self, budget: int | str, **keywords: Unpack[FirstPlanKeywords]) -> None:
        self.plan: Plan | None = None
        self._settings = FirstPlan.of(budget, keywords)
        self._waiting: FirstCall | None = None
        self._applied: Applied | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        """Wait for the model's first call.

        Raises:
            ApplyError: The Trainer trains in a way that plans do not go with.
        """
        self._take_off()
        _refuse(args)
        assert model is not None

        def plan_for(batch: dict[str, Any]) -> None:
            # The Trainer that smooths labels takes them out of the batch, and its own loss follows the model.
            smooths = args.label_smoothing_factor > 0 and "labels" not in batch
            known: dict[str, Any] = {
                "loss": _smoothed_loss(args.label_smoothing_factor, model) if smooths else returned_loss,
                "optimizer": optimizer,
                "holds_output": False,
                "accumulation": args.gradient_accumulation_steps > 1,
            }
            folder = Path(args.output_dir or ".") / "remat"
            with _autocast(args):
                self.plan = self._settings.make(model, batch, folder=folder, **known)
            self._applied = apply(model, self.plan)

        self._waiting = FirstCall(model, plan_for)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Take the plan off; the model is as it was."""
        self._take_off()

    def __repr__(self) -> str:
        return f"<PlanCallback: {self._settings.words(self.plan)}>"

    def _take_off(self) -> None:
        if self._waiting is not None:
            self._waiting.take_off()
        if self._applied is not None:
            self._applied.remove()
        self._waiting = self._applied = None


def _refuse(args: TrainingArguments) -> None:
    """Refuse what a plan does not go with, before anything runs.

    Raises:
        ApplyError: Something does not.
    """
    reason = ""
    if args.activation_checkpointing:
        reason = (
            "activation_checkpointing=True (or gradient_checkpointing=True, its older name) is the Trainer's own, and "
            "the two do not stack: leave it out"
        )
    elif args.use_cache:
        reason = "use_cache=True makes a key-value cache in training, which cannot be replayed: leave it out"
    elif args.torch_compile:
        reason = (
            "torch_compile=True traces the model before there is a batch: plan beforehand with cross_operators=False, "
            "and apply the plan to the model that the Trainer is given"
        )
    elif args.n_gpu > 1:
        reason = (
            "the Trainer trains on several GPUs in one process, by nn.DataParallel, which replicates the model: start "
            "with torchrun, or show it one GPU"
        )
    elif args.deepspeed or args.fsdp:
        reason = (
            "with FSDP or DeepSpeed no rank has the whole model: plan beforehand, with units= and ranks=, and apply "
            "the plan to the model that the Trainer is given"
        )
    if reason:
        raise ApplyError(f"PlanCallback: {reason}")


def _autocast(args: TrainingArguments) -> torch.autocast:
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    return torch.autocast(args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16)


def _smoothed_loss(factor: float, model: nn.Module) -> Callable[[Any], torch.Tensor]:
    """Return the Trainer's loss with smoothed labels, on labels made from the output: a plan knows no values."""
    smoother = LabelSmoother(epsilon=factor)
    shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def smoothed_loss(output: Any) -> torch.Tensor:
        logits = output["logits"] if isinstance(output, dict) else output[0]
        labels = torch.ones(logits.shape[:-1], dtype=torch.long, device=logits.device)
        return smoother(output, labels, shift_labels=shifts)

    return smoothed_loss


def returned_loss(output: Any) -> torch.Tensor:
    """Return the loss where the Trainer looks for it.

    Raises:
        BatchError: There is none.
    """
    if isinstance(output, dict) and output.get("loss") is None:
        raise BatchError(
            "the model returns no loss, so the Trainer computes it outside (compute_loss_func): give PlanCallback a "
            "loss= that makes its labels from the output, as in loss=lambda out: F.cross_entropy("
            "out.logits.flatten(0, 1), torch.zeros(out.logits.shape[:2].numel(), dtype=torch.long)); a plan does not "
            "depend on their values"
        )
    return output["loss"] if isinstance(output, dict) else output[0]
