"""One training step as the profiler runs it: how the batch enters the model and where the loss comes from.

Knows nothing of measuring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .absent import is_absent
from .guard import Guard
from .internals import global_hooks, is_compiled
from .repeatable_hooks import Repeatable

Loss = Callable[[Any], torch.Tensor]


class BatchError(ValueError):
    """Raised when a batch cannot be passed to a model or gives no loss to train on."""


@dataclass(frozen=True, slots=True)
class Step:
    """Hold what one training step needs.

    Attributes:
        model: The module whose forward is called.
        args: Positional arguments of its forward.
        kwargs: Keyword arguments of its forward.
        loss: Takes the output to a scalar; None means the output carries it.
        guard: Puts back whatever a run of the step changes.
        holds_output: The model's output is referred to until backward is over; else it goes once there is a loss.
        beside: Tensors that are trained besides the model's parameters (a loss's own), by how they are reached; filled
            in where a step is recorded.
        repeatable_hooks: Which forward hooks of the user's a replay may run again.
        entrance: What is called in place of the model where something is around it (DDP); filled in where a step is
            recorded.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None
    guard: Guard = field(compare=False, repr=False)
    holds_output: bool = True
    beside: tuple[tuple[str, torch.Tensor], ...] = ()
    repeatable_hooks: Repeatable = False
    entrance: nn.Module | None = None

    @staticmethod
    def of(model: nn.Module, batch: object, loss: Loss | None = None, *, holds_output: bool = True) -> Step:
        """Build a step from a user's batch: a mapping is keywords, a tuple or list positions, else one argument.

        Raises:
            BatchError: The model is not a module, has nothing to train, or the batch holds no tensor.
        """
        if not isinstance(model, nn.Module):
            raise BatchError(f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BatchError(
                f"{type(model).__name__} has no parameter that requires a gradient: there is no backward to plan for"
            )
        _check_model(model)
        if loss is not None and not callable(loss):
            raise BatchError(f"loss must be a function of the model's output, got {type(loss).__name__}")
        guard = Guard({"model": model, "loss": loss, "batch": batch, "hooks of all modules": global_hooks()})
        if isinstance(batch, Mapping):
            step = Step(model, (), {str(name): value for name, value in batch.items()}, loss, guard)
        elif isinstance(batch, (tuple, list)):
            step = Step(model, tuple(batch), {}, loss, guard)
        else:
            step = Step(model, (batch,), {}, loss, guard)
        step = replace(step, holds_output=holds_output)
        _check_call(model, step)
        if not step.tensors():
            raise BatchError(
                f"batch holds no tensor (a {type(batch).__name__}): pass a tensor, a tuple of positional arguments "
                "or a mapping of keyword arguments"
            )
        return step

    def tensors(self) -> list[torch.Tensor]:
        """List the batch's tensors."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        """Return the step with every tensor of the batch changed."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """List what may get a gradient, by name: the model's parameters, and those trained beside it."""
        return [*self.model.named_parameters(), *self.beside]

    def forward(self) -> Any:
        """Call the model, with no weights left that autocast cast in an earlier call."""
        torch.clear_autocast_cache()
        return (self.entrance or self.model)(*self.args, **self.kwargs)

    def train(self, before_backward: Callable[[], None] | None = None) -> torch.Tensor:
        """Run forward, loss and backward, the output held as long as the step says; return the loss."""
        with torch.enable_grad():
            output = self.forward()
            loss = self.loss_of(output)
            if not self.holds_output:
                del output
            if before_backward is not None:
                before_backward()
            # A loop leaves autocast before backward, and with it what autocast keeps of its casts.
            torch.clear_autocast_cache()
            loss.backward()
        return loss

    def loss_of(self, output: object) -> torch.Tensor:
        """Take the model's output to the scalar that is differentiated.

        Uses `loss` where given, else `output.loss` or `output["loss"]`, else the mean over the floating-point outputs.

        Raises:
            BatchError: There is no scalar, or it does not depend on a parameter.
        """
        if self.loss is not None:
            try:
                value = self.loss(output)
            except TypeError as error:
                raise BatchError(
                    f"loss(output) failed: {error}. loss takes the model's output alone; targets are bound: "
                    "loss=lambda output: criterion(output, target)"
                ) from error
        else:
            value = carried_loss(output)
            if value is None:
                value = _mean_of_floats(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise BatchError(f"the loss must be one number, got {got}: pass loss=, a function of the model's output")
        if not value.requires_grad:
            raise BatchError("the loss depends on no parameter that requires a gradient: nothing would be trained")
        return value


def carried_loss(output: object) -> Any:
    """Return the loss that an output carries as `output.loss` or `output["loss"]`, or None."""
    value = getattr(output, "loss", None)
    return output.get("loss") if value is None and isinstance(output, Mapping) else value


def raised_in_loss(error: BaseException) -> bool:
    """Say whether an error comes from inside the user's loss."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code is not Step.loss_of.__code__:
        step = step.tb_next
    return step is not None and step.tb_next is not None


def _check_model(model: nn.Module) -> None:
    """Check that a model is of a kind that can be recorded and replayed.

    Raises:
        BatchError: It is not.
    """
    for name, module in model.named_modules():
        where = f"module {name or '(root)'!r} ({type(module).__name__})"
        if isinstance(module, RecursiveScriptModule):
            raise BatchError(f"{where} is compiled by torch.jit.script, whose calls cannot be seen: pass the original")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise BatchError(f"{where} has sparse gradients, which are not counted: pass sparse=False")
    first = {str(parameter.device): name for name, parameter in reversed(list(model.named_parameters()))}
    if len(first) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in sorted(first.items()))
        raise BatchError(
            f"the model's parameters lie on {len(first)} devices ({where}), and a budget is for the memory of one: "
            "move it to one device, or plan each device's part as a model of its own"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise BatchError(f"{name!r} is not initialised (a lazy module): run the model once before planning")


def check_present(model: nn.Module) -> None:
    """Check that a model has memory, as it must to be run.

    Raises:
        BatchError: A parameter or buffer has not; the message says what to do.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_absent(tensor):
            raise BatchError(
                f"{name!r} has no memory (it is {'on meta' if tensor.device.type == 'meta' else 'fake'}): name a card "
                "to plan for, device='h100-80gb', or give the model memory, model.to_empty(device=...)"
            )


def check_eager(model: nn.Module) -> None:
    """Check that no part of a model is compiled: its operators would be out of a recorder's sight.

    Raises:
        BatchError: One is.
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            what = f"module {name.removesuffix('._orig_mod')!r}" if name else "the model"
            raise BatchError(
                f"{what} is compiled already (torch.compile), and what it runs cannot be recorded: plan the model "
                "before that, with cross_operators=False, apply the plan, then compile"
            )


def _check_call(model: nn.Module, step: Step) -> None:
    """Check that forward takes the batch as it will be passed.

    Raises:
        BatchError: It does not.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*step.args, **step.kwargs)
    except TypeError as error:
        given = f"{len(step.args)} positional" if step.args else f"keyword arguments {', '.join(step.kwargs)}"
        raise BatchError(
            f"{type(model).__name__}.forward{signature} cannot be called with this batch ({given}): {error}. A tuple "
            "is passed as positional arguments, a mapping as keyword ones; targets that forward does not take belong "
            "into the loss: loss=lambda output: criterion(output, target)"
        ) from None


def _mean_of_floats(output: object) -> torch.Tensor:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) and hasattr(output, "__dict__"):
        leaves = pytree.tree_leaves(vars(output))
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    differentiable = [leaf for leaf in floats if leaf.requires_grad]
    if not differentiable:
        raise BatchError(
            f"the model's output ({type(output).__name__}) holds no loss and no floating-point tensor that depends on "
            "a parameter: pass loss=, a function of the model's output"
        )
    if len(floats) == 1:
        return floats[0].mean()
    return torch.stack([leaf.float().mean() for leaf in floats]).mean()
