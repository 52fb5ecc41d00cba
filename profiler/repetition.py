"""Which blocks of a model are identical: neighbours in one list that differ in the values of their weights alone.

Looks at modules and runs nothing; what a block does with what it is given is not known here.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .internals import tensor_hooks, tensor_registries

_PLAIN = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class _Block:
    """What two blocks are compared by.

    Attributes:
        signature: All that must be equal.
        numbers: Integers that may count the blocks, `layer_idx` above all.
    """

    signature: Hashable
    numbers: tuple[int, ...]


def identical_blocks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Find the runs of identical blocks of a model: neighbours in one ModuleList or Sequential, two at least.

    Blocks are identical that have the same classes throughout, the same training flags, hooks and forward, parameters
    and buffers of the same shape, dtype, strides and device that train alike, and equal attributes. An integer
    attribute may also rise by one from each block to the next. A block that shares a tensor or a module with anything
    outside of it is identical to none; so is one with an attribute that cannot be compared. Lists inside of blocks are
    looked into as well.

    Returns:
        By run, the modules' names in the order of the list.
    """
    uses = _uses(model)
    return tuple(
        tuple(f"{name}.{child}" if name else child for child in run)
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for run in _runs({child: _block(block, uses) for child, block in module.named_children()})
    )


def _uses(model: nn.Module) -> Counter[int]:
    """Count by how many modules of a model each tensor is held, and each module."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(held) for held in _held(module))
    return uses


def _held(module: nn.Module) -> Iterator[object]:
    for registry in (*tensor_registries(module), vars(module)["_modules"]):
        yield from (held for held in registry.values() if held is not None)
    yield from (value for value in vars(module).values() if isinstance(value, (torch.Tensor, nn.Module)))


def _runs(blocks: dict[str, _Block]) -> list[tuple[str, ...]]:
    runs: list[list[str]] = []
    steps: tuple[int, ...] | None = None
    before: _Block | None = None
    for name, block in blocks.items():
        found = None
        if before is not None and block.signature == before.signature:
            found = tuple(now - then for now, then in zip(block.numbers, before.numbers, strict=True))
        if found is not None and set(found) <= {0, 1} and (len(runs[-1]) == 1 or found == steps):
            runs[-1].append(name)
            steps = found
        else:
            runs.append([name])
        before = block
    return [tuple(run) for run in runs if len(run) > 1]


def _block(block: nn.Module, uses: Counter[int]) -> _Block:
    inside: Counter[int] = Counter(id(held) for module in block.modules() for held in _held(module))
    shared = any(uses[key] != count for key, count in inside.items()) or uses[id(block)] != 1
    places = {id(module): place for place, module in enumerate(block.modules())}
    tensors: dict[int, int] = {}
    hooks: dict[int, int] = {}
    numbers: list[int] = []

    def pictured(value: Any, depth: int = 0) -> Hashable:
        if isinstance(value, torch.Tensor):
            first = id(value) not in tensors
            return tensors.setdefault(id(value), len(tensors)), _metadata(value) if first else None
        if isinstance(value, nn.Module):
            return "module", places.get(id(value), id(value))
        if type(value) is int:
            numbers.append(value)
            return "number"
        if type(value) is OrderedDict and all(type(key) is int for key in value):
            # Hooks, by torch's running number of them.
            return tuple((hooks.setdefault(key, len(hooks)), pictured(hook)) for key, hook in value.items())
        return _pictured(value, lambda item: pictured(item, depth + 1), depth)

    signature: list[Hashable] = [id(block)] if shared else []
    for path, module in block.named_modules(remove_duplicate=False):
        own = [(name, pictured(value)) for name, value in vars(module).items() if name not in _REGISTRIES]
        held = [(name, pictured(value)) for registry in tensor_registries(module) for name, value in registry.items()]
        signature.append((path, places[id(module)], type(module), frozenset(own), tuple(held)))
    return _Block(tuple(signature), tuple(numbers))


def _pictured(value: Any, pictured: Callable[[Any], Hashable], depth: int) -> Hashable:
    """Reduce an attribute to what equals that of an identical block; what cannot be compared equals itself alone."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, functools.partial):
        return "partial", pictured(value.func), pictured(value.args), pictured(value.keywords)
    if isinstance(value, MethodType):
        return "method", value.__func__, pictured(value.__self__)
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return "one object", id(value)
    if depth < 4 and isinstance(value, dict):
        return type(value), tuple((pictured(key), pictured(item)) for key, item in dict.items(value))
    if depth < 4 and isinstance(value, (set, frozenset)):
        return (type(value), frozenset(value)) if all(isinstance(item, (*_PLAIN, int)) for item in value) else id(value)
    if depth < 4 and isinstance(value, (list, tuple)):
        return type(value), tuple(map(pictured, value))
    return "one object", id(value)


def _metadata(tensor: torch.Tensor) -> Hashable:
    hooks = tuple(id(hook) for hooks in tensor_hooks(tensor) for hook in hooks.values())
    layout = tuple(tensor.shape), tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, layout, tensor.requires_grad, tensor.is_leaf, hooks
