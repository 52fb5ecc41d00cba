"""Run a step with most of its identical blocks left out: in place of each stands its input.

Of a run of identical blocks the first three and the last two are run. The others hand on what they are given, so that
the block after them continues where the block before them ended; `splicing` writes them into the record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from .internals import backward_hooks, forward_hooks, global_forward_hooks, is_in_backward

FIRST, LAST = 3, 2
"""How many blocks are run at a run's beginning and at its end."""
KEPT = FIRST + LAST
PATTERN = FIRST - 1
"""The block that those left out are copied from: the last of those run at the beginning."""


class NotAlikeError(Exception):
    """Raised where a model uses its identical blocks otherwise than as one chain; its step is recorded whole."""


@dataclass(frozen=True, slots=True)
class Run:
    """Name a run of identical blocks.

    Attributes:
        names: The modules' paths, in order.
    """

    names: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the blocks that are run."""
        return (*self.names[:FIRST], *self.names[-LAST:])

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the others."""
        return self.names[FIRST:-LAST]


Role = Callable[[str], Hashable]
"""Returns what else blocks must have in common, for a block's path."""


def runs_of(model: nn.Module, identical: tuple[tuple[str, ...], ...], role: Role | None = None) -> tuple[Run, ...]:
    """Find the runs of which blocks can be left out.

    Args:
        model: The model.
        identical: Its identical blocks.
        role: What else they must have in common.
    """
    if global_forward_hooks():
        return ()
    modules = dict(model.named_modules())
    found: list[Run] = []
    inside: tuple[str, ...] = ()
    for names in identical:
        if names[0].startswith(inside) or any(_is_hooked(modules[name]) for name in names):
            continue
        for part in _parted(names, role):
            if len(part) > KEPT + 1:
                found.append(Run(part))
                inside = (*inside, *(f"{name}." for name in names))
    return tuple(found)


def _is_hooked(module: nn.Module) -> bool:
    return bool(forward_hooks(module) or backward_hooks(module)) or isinstance(module, torch.jit.ScriptModule)


def _parted(names: tuple[str, ...], role: Role | None) -> list[tuple[str, ...]]:
    return [names] if role is None else [tuple(part) for _, part in groupby(names, key=role)]


@contextmanager
def left_out(model: nn.Module, runs: tuple[Run, ...]) -> Iterator[None]:
    """Let blocks hand on their input meanwhile.

    Raises:
        NotAlikeError: A block is called otherwise than with the output of the one before it, and else with what that
            was called with; or it does not return a tensor like that (alone, or first in a tuple without others).
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for run in runs:
            chain = _Chain(modules[name] for name in run.names)
            for number, name in enumerate(run.names):
                module = modules[name]
                stack.callback(module.register_forward_pre_hook(chain.enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(chain.leave).remove)
                if FIRST <= number < len(run.names) - LAST:
                    stack.enter_context(_passing(module, chain))
        yield


@contextmanager
def _passing(module: nn.Module, chain: _Chain) -> Iterator[None]:
    own = vars(module)
    there, before = "forward" in own, own.get("forward")
    own["forward"] = chain.hand_on
    try:
        yield
    finally:
        del own["forward"]
        if there:
            own["forward"] = before


class _Chain:
    """What one run's calls have in common; it holds no tensor."""

    def __init__(self, modules: Iterator[nn.Module]) -> None:
        self._places = {id(module): number for number, module in enumerate(modules)}
        self._others: Hashable = None
        self._form: Hashable = None
        self._output: tuple[int, Any] = -1, None
        self._returned: tuple[None, ...] | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare a call with the one before; a replay does what forward did."""
        if is_in_backward():
            return
        hidden, others = _divided(args, kwargs)
        number, output = self._output
        if not torch.is_grad_enabled():
            raise NotAlikeError("a block is called without gradients")
        if self._places[id(module)] == 0:
            self._others, self._form = others, _form(hidden)
        elif self._places[id(module)] != number + 1 or output() is not hidden:
            raise NotAlikeError("a block is not called with the output of the one before it")
        elif others != self._others:
            raise NotAlikeError("blocks are called with different arguments")

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        """Note what a call returned."""
        if is_in_backward():
            return
        first, *others = output if type(output) is tuple and output else (output,)
        if any(other is not None for other in others) or _form(first) != self._form:
            raise NotAlikeError("a block returns something else than a tensor like its input")
        self._output = self._places[id(module)], weakref.ref(first)
        self._returned = None if first is output else tuple(others)

    def hand_on(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input as the block before returned its output."""
        hidden, _ = _divided(args, kwargs)
        return hidden if self._returned is None else (hidden, *self._returned)


def _divided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Hashable]:
    """Tell what travels from block to block, the first argument, from all others; of those a picture is returned."""
    named = list(kwargs.items())
    hidden, others = (args[0], (args[1:], named)) if args else (named[0][1] if named else None, named[1:])
    return hidden, _picture(others)


def _form(tensor: Any) -> Hashable:
    if not isinstance(tensor, torch.Tensor):
        raise NotAlikeError("what travels from block to block is no tensor")
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _picture(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_picture, value))
    if isinstance(value, dict):
        return type(value), tuple((key, _picture(item)) for key, item in value.items())
    if isinstance(value, (bool, int, float, str, type(None))):
        return type(value), value
    # Whoever calls the blocks holds what is the same in every call.
    return id(value)
