"""What a planned call does under torch.compile: the public checkpoint, which the compiler understands.

The generator that eager runs use cannot be traced. So a run's first member runs the whole run inside one checkpoint
and the other members hand its result on. That is exact for a plain run, a loop `x = member(x, ...)` over tensors; but
what the loop sees between members is the run's result, and hooks of the members fire around that.
The compiler flattens nested checkpoints, so child segments are not traced; nor are calls counted: every call of a
module is taken for a planned one.
Where the compiler gives a frame up, the same is done eagerly, in a region of ours that it leaves alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from ..errors import ApplyError
from .internals import eager_backend, warn_of_eager, warn_of_nested
from .save_set import traced_contexts
from .thread_state import BoundSegment

_RANDOM = frozenset(
    (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_"),
        *(
            "multinomial",
            "normal",
            "normal_",
            "uniform_",
            "gumbel_softmax",
            "exponential_",
            "scaled_dot_product_attention",
        ),
    )
)
"""What code that draws random numbers calls."""


class TracedCall:
    """Run a module's forward under one checkpoint.

    Args:
        segment: The segment.
        nested: If the segment has others inside, the name of the plan's first one that has; else nothing.
    """

    def __init__(self, segment: BoundSegment, nested: str) -> None:
        self.segment = segment
        self.nested = nested
        self.draws = segment.watched.reads.mentions(_RANDOM)
        self.options: dict[str, Any] = {"early_stop": segment.early_stop}
        if segment.save is not None:
            self.options["context_fn"] = functools.partial(traced_contexts, segment.save.names)

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the forward's output."""
        if is_dynamo_compiling() and self.nested:
            warn_of_nested(self.nested)
        # The name is read last: the compiler compiles anew for each other name that it has read.
        if is_dynamo_compiling() and self.draws and eager_backend():
            warn_of_eager(self.segment.where)
        return checkpoint(self.body, forward, *args, use_reentrant=False, **self.options, **kwargs)

    def body(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run what the segment holds."""
        return forward(*args, **kwargs)


class TracedFirst(TracedCall):
    """Run all members of a run at the first one's call.

    Attributes:
        left: How many members' calls are still to hand the result on.
    """

    def __init__(self, segment: BoundSegment, nested: str, later: list[nn.Module]) -> None:
        super().__init__(segment, nested)
        self.later = later
        self.left = 0

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the last member's output."""
        output = super().__call__(forward, args, kwargs)
        self.left = len(self.later)
        return output

    def body(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the members one after the other; all get what the first got, but for the first argument."""
        x = forward(*args, **kwargs)
        for module in self.later:
            if not args or not isinstance(x, torch.Tensor):
                raise ApplyError(
                    f"segment {self.segment.where}: torch.compile can only take runs of modules that take one tensor "
                    "as their first positional argument and return one; plan each member as a segment of its own"
                )
            x = module.__dict__["forward"].__self__.original(x, *args[1:], **kwargs)
        return x


class TracedLater:
    """Hand on, at a later member's call, what the first one computed."""

    def __init__(self, first: TracedFirst) -> None:
        self.first = first

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the first argument, if the first member came before."""
        if self.first.left == 0:
            return forward(*args, **kwargs)
        self.first.left -= 1
        return args[0]


class Untraceable:
    """Refuse a planned call that cannot be traced."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise the refusal."""
        raise ApplyError(self.message)


Traced = TracedCall | TracedLater | Untraceable
