"""What a module call changes besides its output: attributes, buffers, arguments, random states.

A replay would change it once more.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from .contents import items_of
from .step_record import CHANGES_ARGUMENT

COMPARED_BYTES = 1 << 20
"""Larger arrays of NumPy are told apart by identity alone."""


def observe(module: nn.Module, inputs: Any, remade: frozenset[str]) -> Callable[[], list[str]]:
    """Remember what a call could change besides its output; return a function that says what it did change.

    Args:
        module: The module called.
        inputs: What with.
        remade: Attributes that its hooks set anew at each call.
    """
    attributes = _attributes(module)
    buffers = _buffer_identities(module)
    arguments = _objects_in(inputs)
    python, numpy = random.getstate(), np.random.get_state(legacy=True)

    def finish() -> list[str]:
        findings: list[str] = []
        now = _attributes(module)
        changed = sorted(
            name
            for name in (attributes.keys() | now.keys()) - remade
            if attributes.get(name) != now.get(name) and not _is_first_time(attributes.get(name), now.get(name))
        )
        if changed:
            findings.append(f"changes its attribute {', '.join(changed)}")
        replaced = sorted(name for name, value in _buffer_identities(module).items() if buffers.get(name) != value)
        if replaced:
            findings.append(f"puts another tensor in place of its buffer {', '.join(replaced)}")
        if _objects_in(inputs) != arguments:
            findings.append(CHANGES_ARGUMENT)
        if random.getstate() != python:
            findings.append("draws from Python's random")
        after: Any = np.random.get_state(legacy=True)
        before: Any = numpy
        if after[2] != before[2] or not np.array_equal(after[1], before[1]):
            findings.append("draws from numpy.random")
        return findings

    return finish


def _buffer_identities(module: nn.Module) -> dict[str, int]:
    return {name: id(buffer) for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)}


def _is_first_time(before: Any, after: Any) -> bool:
    """Say whether a flag was raised: something is installed or warned of once, and never again."""
    return after is True and (before is False or before is None)


def _objects_in(inputs: Any) -> Any:
    """Picture the arguments but for plain tensors among them: operators show who writes to those."""
    leaves = pytree.tree_leaves(inputs)
    held = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [_containers(inputs, held, 0)]


def _containers(value: Any, held: set[int], depth: int) -> Any:
    if isinstance(value, torch.Tensor) and id(value) in held:
        return id(value)
    if isinstance(value, (list, tuple)) and depth < 5:
        return [_containers(item, held, depth + 1) for item in value]
    if type(value) is dict and depth < 5:
        return [(key, _containers(item, held, depth + 1)) for key, item in value.items()]
    return _shape_of(value, depth)


_NOT_THE_MODULES_OWN = ("_forward", "_backward", "_state_dict", "_load_state", "__composable_api_state_key")
"""Beginnings of the names of attributes that hold hooks, and what `fully_shard` keeps."""
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: _shape_of(value, 1)
        for name, value in vars(module).items()
        if name not in _REGISTRIES and not name.startswith(_NOT_THE_MODULES_OWN)
    }


def _shape_of(value: Any, depth: int) -> Any:
    """Reduce a value to what a change of it would change: identities of tensors, contents of containers."""
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        return value
    if isinstance(value, np.ndarray):
        return (id(value), value.tobytes() if value.nbytes <= COMPARED_BYTES else None)
    if isinstance(value, random.Random):
        return (id(value), value.getstate())
    if isinstance(value, np.random.Generator):
        return (id(value), repr(value.bit_generator.state))
    if isinstance(value, weakref.ref):
        return None  # Recurrent layers renew theirs; nothing is kept by one.
    if depth > 5:
        return id(value)
    if isinstance(value, dict):
        return tuple((id(key), _shape_of(item, depth + 1)) for key, item in items_of(value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return tuple(_shape_of(item, depth + 1) for item in items_of(value))
    if isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__") or callable(value):
        return id(value)
    return (id(value), *((name, _shape_of(item, depth + 1)) for name, item in vars(value).items()))
