"""What an optimizer adds to the step: its state, and the peak of its own step, by a dry run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .dry_run import faked
from .internals import fakes_take_foreach
from .recorder import Recorder
from .step import BatchError, Step

NAMES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
}


def optimizer_bytes(step: Step, optimizer: Optimizer | str, *, round_to: int = 1, ranks: int = 1) -> tuple[int, int]:
    """Return the bytes of an optimizer's state and the most its step allocates on top of state and gradients.

    The state is that of the steady state (after a first step), in which every further step begins.

    Args:
        step: The step whose model is trained.
        optimizer: An instance, or a name from `NAMES` (with torch's defaults; momentum 0.9 for "sgd").
        round_to: Allocation granularity in bytes.
        ranks: Processes that every parameter's first dimension is divided over; the largest part counts.

    Raises:
        BatchError: The name is unknown, or the optimizer's parameters are not the model's.
    """
    real = dict(step.model.named_parameters())
    with faked(step) as (fake_step, mode):
        fakes = dict(fake_step.model.named_parameters())
        with mode, fakes_take_foreach():
            if ranks > 1:
                fakes = {name: _first_part(parameter, ranks) for name, parameter in fakes.items()}
            copied = _on_fakes(real, optimizer, fakes)
            trained = [parameter for group in copied.param_groups for parameter in group["params"]]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            copied.step()
            recorder = Recorder(round_to=round_to, device=trained[0].device)
            for parameter in trained:
                recorder.identify(parameter, "parameter")
                recorder.identify(parameter.grad, "gradient")
            before = len(recorder.lives)
            for state in copied.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        recorder.identify(value, "buffer")
            known = len(recorder.lives)
            with recorder:
                copied.step()
            record = recorder.finish()
    state_bytes = sum(storage.nbytes for storage in record.storages[before:known])
    fixed = sum(storage.nbytes for storage in record.storages[:known])
    return state_bytes, max(0, record.peak_bytes() - fixed)


def _first_part(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    part = parameter.detach()[: -(-parameter.shape[0] // ranks)].clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _on_fakes(real: dict[str, nn.Parameter], optimizer: Optimizer | str, fakes: dict[str, nn.Parameter]) -> Optimizer:
    if isinstance(optimizer, str):
        kind = NAMES.get(optimizer.lower())
        if kind is None:
            raise BatchError(f"unknown optimizer {optimizer!r}: pass an instance or one of {', '.join(NAMES)}")
        options: dict[str, Any] = {"lr": 1e-3}
        if kind is torch.optim.SGD:
            options["momentum"] = 0.9
        return kind([parameter for parameter in fakes.values() if parameter.requires_grad], **options)
    if not isinstance(optimizer, Optimizer):
        raise BatchError(f"optimizer must be a torch.optim.Optimizer or a name, got {type(optimizer).__name__}")
    copied = copy.copy(optimizer)
    by_identity = {id(parameter): fakes[name] for name, parameter in real.items()}
    copied.param_groups = []
    for group in optimizer.param_groups:
        strangers = sum(id(parameter) not in by_identity for parameter in group["params"])
        if strangers:
            raise BatchError(
                f"{strangers} of the optimizer's parameters are not the model's: build it from model.parameters()"
            )
        copied.param_groups.append({**group, "params": [by_identity[id(parameter)] for parameter in group["params"]]})
    copied.state = type(optimizer.state)(optimizer.state.default_factory)
    return copied
