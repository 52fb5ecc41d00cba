"""What an optimizer adds to the step: its state, and the peak of its own step, by a dry run of a twin of it."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .cards import Card
from .dry_run import on_fakes
from .internals import fakes_take_foreach, local_part
from .ranks import Ranks
from .recorder import Recorder
from .roofline import predicted_ns
from .step import BatchError, Step

NAMES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
}
_WRAPPED = ("optimizer", "_optimizer")
"""Where the wrappers of accelerate, Lightning and learning rate schedules keep the optimizer that they pass on to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Hold what an optimizer adds to a step.

    Attributes:
        state_bytes: Its state.
        temporary_bytes: The most that its step allocates on top of state and gradients.
        step_ns: How long its step should take on a named card, nanoseconds: predicted. None where no card is named.
    """

    state_bytes: int
    temporary_bytes: int
    step_ns: int | None


def optimizer_cost(
    step: Step,
    optimizer: Optimizer | str,
    *,
    round_to: int = 1,
    ranks: Ranks | None = None,
    card: Card | None = None,
) -> OptimizerCost:
    """Find what an optimizer adds to a step.

    The state is that of the steady state (after a first step), in which every further step begins. A live optimizer is
    only read: its twin, made from its class and its groups' settings, steps on fake tensors.

    Args:
        step: The step whose model is trained.
        optimizer: An instance, or a wrapper that holds one as `optimizer`, or a name from `NAMES` (with torch's
            defaults; momentum 0.9 for "sgd").
        round_to: Allocation granularity in bytes.
        ranks: How the model is divided over processes; the state is then that of one of them.
        card: The card that it will step on, with the kernels that torch takes there; None is the model's device.

    Raises:
        BatchError: The name is unknown, the optimizer's parameters are neither the model's nor the loss's, or no twin
            of it can be made or run.
    """
    groups = _groups(step, optimizer)

    def measure(fake_step: Step) -> OptimizerCost:
        fakes = [tensor for _, tensor in fake_step.trained()]
        if ranks is not None:
            fakes = [_own_part(tensor) for tensor in fakes]
        return _measured(_twin(optimizer, groups, fakes), round_to, card)

    return on_fakes(step, measure, ranks=ranks)


def optimizer_named(name: str) -> type[Optimizer]:
    """Return the class that a name from `NAMES` stands for.

    Raises:
        BatchError: There is no such name.
    """
    found = NAMES.get(name.lower())
    if found is None:
        raise BatchError(f"unknown optimizer {name!r}: pass an instance or one of {', '.join(NAMES)}")
    return found


def unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer itself, out of the wrappers around it.

    Raises:
        BatchError: There is none, or it is in a wrapper that is not known.
    """
    held = getattr(optimizer, "__dict__", {})
    inner = next((held[name] for name in _WRAPPED if isinstance(held.get(name), Optimizer)), None)
    if inner is not None:
        return unwrapped(inner)
    others = [name for name, value in held.items() if isinstance(value, Optimizer)]
    if others:
        kind = type(optimizer).__name__
        raise BatchError(
            f"optimizer is a {kind} around another one, and what {kind} adds is not known: pass the one inside it "
            f"(optimizer=optimizer.{others[0]}), with headroom for what {kind} keeps itself"
        )
    if not isinstance(optimizer, Optimizer):
        raise BatchError(f"optimizer must be a torch.optim.Optimizer or a name, got {type(optimizer).__name__}")
    return optimizer


def _groups(step: Step, optimizer: Optimizer | str) -> list[tuple[dict[str, Any], list[int]]]:
    """Return an optimizer's groups: their settings, and their parameters' numbers in `Step.trained`."""
    with step.guard.undisturbed():
        trained = [*step.model.named_parameters(), *step.guard.beside(step.model)]
        if isinstance(optimizer, str):
            own = range(len(list(step.model.parameters())))
            return [({}, [number for number in own if trained[number][1].requires_grad])]
        known = {
            id(tensor): number for number, (name, tensor) in enumerate(trained) if not name.startswith("optimizer")
        }
    groups = unwrapped(optimizer).param_groups
    strangers = sum(id(parameter) not in known for group in groups for parameter in group["params"])
    if strangers:
        raise BatchError(
            f"{strangers} of the optimizer's parameters are neither the model's nor the loss's: build it from "
            "model.parameters()"
        )
    return [
        (
            {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")},
            [known[id(parameter)] for parameter in group["params"]],
        )
        for group in groups
    ]


def _twin(
    optimizer: Optimizer | str, groups: list[tuple[dict[str, Any], list[int]]], fakes: list[torch.Tensor]
) -> Optimizer:
    """Make an optimizer of the same class and settings for other parameters.

    Raises:
        BatchError: The name is unknown, or the class cannot be called with the settings it keeps.
    """
    parameters: list[dict[str, Any]] = [
        {**settings, "params": [fakes[number] for number in numbers]} for settings, numbers in groups
    ]
    if isinstance(optimizer, str):
        named: Any = optimizer_named(optimizer)
        return named(parameters, **({"lr": 1e-3, "momentum": 0.9} if named is torch.optim.SGD else {"lr": 1e-3}))
    inner = unwrapped(optimizer)
    kind: Any = type(inner)
    accepted = inspect.signature(kind).parameters
    settings = {name: copy.deepcopy(value) for name, value in inner.defaults.items() if name in accepted}
    try:
        return kind(parameters, **settings)
    except Exception as error:
        raise BatchError(
            f"no twin of the optimizer can be made to measure its state: {kind.__name__}(groups, "
            f"{', '.join(settings)}) fails: {error}. Pass one of {', '.join(NAMES)}, or plan without optimizer= and "
            "keep headroom for it"
        ) from error


def _measured(twin: Optimizer, round_to: int, card: Card | None) -> OptimizerCost:
    """Step an optimizer on fake tensors twice; the second step has the state that all later ones have."""
    kinds = () if card is None else ("cpu",)
    trained = [parameter for group in twin.param_groups for parameter in group["params"]]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with fakes_take_foreach(*kinds):
        twin.step()
    recorder = Recorder(round_to=round_to, device=trained[0].device)
    for parameter in trained:
        recorder.identify(parameter, "parameter")
        recorder.identify(parameter.grad, "gradient")
    before = len(recorder.lives)
    for state in twin.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.identify(value, "buffer")
    known = len(recorder.lives)
    with recorder, fakes_take_foreach(*kinds):
        twin.step()
    record = recorder.finish()
    fixed = sum(storage.nbytes for storage in record.storages[:known])
    return OptimizerCost(
        state_bytes=sum(storage.nbytes for storage in record.storages[before:known]),
        temporary_bytes=max(0, record.peak_bytes() - fixed),
        step_ns=None if card is None else sum(predicted_ns(operator, card) for operator in record.operators),
    )


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(local_part(tensor).detach().clone(), requires_grad=tensor.requires_grad)
