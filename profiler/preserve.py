"""Run a user's model and leave no trace: gradients, buffers, modes, random states, attributes are put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .devices import all_random_states
from .internals import FakeTensor, tensor_registries

_CONTAINER_DEPTH = 4


@contextmanager
def preserved(model: nn.Module, *, written_parameters: Iterable[str] = ()) -> Iterator[None]:
    """Put back, on leaving, whatever a step changes in a model and around it.

    Restored: `.grad` of every parameter (None meanwhile), the values of buffers and of tensors kept as attributes,
    every module's attributes and the lists, dicts and sets among them, train and eval modes, the generators kept as
    attributes, and the random states of torch (every initialised device), Python and numpy. Objects that only a
    closure reaches are beyond it.

    Args:
        model: The model.
        written_parameters: Names of parameters that forward writes to; their values are copied and restored too.
    """
    restore: list[Callable[[], object]] = [_restorer_of_random_states()]
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    tensors: list[torch.Tensor] = [parameters[name] for name in written_parameters]
    seen: set[int] = set()
    for module in model.modules():
        attributes = vars(module)
        restore.append(_restorer_of_container(attributes, seen, 0))
        tensors += [buffer for buffer in tensor_registries(module)[1].values() if buffer is not None]
        for value in attributes.values():
            if isinstance(value, torch.Generator):
                restore.append(_restorer_of_generator(value))
            elif isinstance(value, torch.Tensor) and value.grad_fn is None:
                tensors.append(value)
    unique = {id(tensor): tensor for tensor in tensors if not _is_fake(tensor)}
    copies = [(tensor, tensor.detach().clone()) for tensor in unique.values()]
    try:
        for parameter in parameters.values():
            parameter.grad = None
        yield
    finally:
        for put_back in reversed(restore):
            put_back()
        with torch.no_grad():
            # Versions do not tell what changed: batch normalisation updates its statistics without counting.
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _restorer_of_random_states() -> Callable[[], None]:
    python, numpy, restore_torch = random.getstate(), np.random.get_state(), all_random_states()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        restore_torch()

    return restore


def _restorer_of_generator(generator: torch.Generator) -> Callable[[], object]:
    state = generator.get_state()
    return lambda: generator.set_state(state)


def _restorer_of_container(container: Any, seen: set[int], depth: int) -> Callable[[], None]:
    """Remember a builtin container's contents, and those of the containers inside it; restore them in place."""
    seen.add(id(container))
    inner = [
        _restorer_of_container(value, seen, depth + 1)
        for value in (container.values() if isinstance(container, dict) else container)
        if isinstance(value, (dict, list, set, deque)) and id(value) not in seen and depth < _CONTAINER_DEPTH
    ]
    contents: Any = dict(container) if isinstance(container, dict) else list(container)

    def restore() -> None:
        current: Any = dict(container) if isinstance(container, dict) else list(container)
        same = len(current) == len(contents) and all(
            a is b for a, b in zip(_flat(current), _flat(contents), strict=True)
        )
        if not same:
            container.clear()
            container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)
        for restore_inner in inner:
            restore_inner()

    return restore


def _flat(contents: dict[Any, Any] | list[Any]) -> list[Any]:
    return [*contents.keys(), *contents.values()] if isinstance(contents, dict) else contents
