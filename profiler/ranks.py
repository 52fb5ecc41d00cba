"""Run a step as one of several ranks does: the model sharded by torch itself, over a process group that only pretends.

`fully_shard`, or whatever the user's function does, runs on fake tensors in torch's own code; nothing is re-enacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from .internals import private_process_group
from .step import BatchError

Parallelize = Callable[[nn.Module, Any], object]
"""Takes the model and a one-dimensional DeviceMesh over all ranks, and shards the model in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Say how a model is divided over processes.

    Attributes:
        count: The processes.
        parallelize: Shards the model in place. It is called in every dry run, on fake parameters.
        words: How, in words, for notes.
    """

    count: int
    parallelize: Parallelize
    words: str


@contextmanager
def sharded(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Divide a model on fake parameters in place, as the first of `ranks`; the caller puts its attributes back.

    Raises:
        BatchError: The function that shards refused; the message is torch's.
    """
    # Imported here: a model that is not sharded needs none of it.
    from torch.distributed.device_mesh import init_device_mesh

    classes = [(module, type(module)) for module in model.modules()]
    with private_process_group(ranks.count):
        try:
            try:
                returned = ranks.parallelize(model, init_device_mesh("cpu", (ranks.count,)))
            except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
                raise BatchError(f"the model cannot be sharded over {ranks.count} ranks: {error}") from error
            if returned is not None and returned is not model:
                raise BatchError(
                    f"parallelize returned a {type(returned).__name__} around the model: only what shards the model in "
                    "place (fully_shard, parallelize_module) can be recorded"
                )
            yield
        finally:
            for module, kind in classes:
                module.__class__ = kind


def by_fully_shard(
    units: Iterable[str], *, policy: Any = None, reshard_after_forward: bool | int | None = None
) -> Parallelize:
    """Return a function that calls `fully_shard` on each unit, inner ones first, and on the root around them.

    Args:
        units: Paths of modules.
        policy: A `MixedPrecisionPolicy`; None is `fully_shard`'s default, none.
        reshard_after_forward: As in `fully_shard`, for the units; the root keeps torch's default.
    """
    paths = tuple(units)

    def parallelize(model: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        options: dict[str, Any] = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
        order = [name for name, _ in model.named_modules() if name in paths and name]
        of_units: dict[str, Any] = dict(options)
        if reshard_after_forward is not None:
            of_units["reshard_after_forward"] = reshard_after_forward
        for name in reversed(order):
            fully_shard(model.get_submodule(name), **of_units)
        fully_shard(model, **options)

    return parallelize
