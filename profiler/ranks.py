"""Run a step as one of several ranks does: the model sharded by torch itself, over a process group that only pretends.

`fully_shard`, or whatever the user's function does, runs on fake tensors in torch's own code; nothing is re-enacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .internals import FakeTensorMode, data_parallel_on_fakes, private_process_group
from .step import BatchError

Parallelize = Callable[[nn.Module, Any], object]
"""Takes the model and a one-dimensional DeviceMesh over all ranks, and shards the model in place, or returns DDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Say how a model is divided over processes.

    Attributes:
        count: The processes.
        parallelize: Shards the model in place, or puts DDP around it. Every dry run calls it, on fake parameters.
        words: How, in words, for notes.
    """

    count: int
    parallelize: Parallelize
    words: str


@contextmanager
def sharded(model: nn.Module, ranks: Ranks, mode: FakeTensorMode) -> Iterator[nn.Module]:
    """Divide a model on fake parameters in place, as the first of `ranks`; the caller puts its attributes back.

    Args:
        model: The model.
        ranks: How it is divided.
        mode: The mode of its parameters.

    Yields:
        What a step calls: the model, or `DistributedDataParallel` around it.

    Raises:
        BatchError: The function that shards refused; the message is torch's.
    """
    # Imported here: a model that is not sharded needs none of it.
    from torch.distributed.device_mesh import init_device_mesh

    classes = [(module, type(module)) for module in model.modules()]
    with private_process_group(ranks.count), data_parallel_on_fakes(mode):
        try:
            try:
                returned = ranks.parallelize(model, init_device_mesh("cpu", (ranks.count,)))
            except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
                raise BatchError(f"the model cannot be sharded over {ranks.count} ranks: {error}") from error
            yield _entrance(model, returned)
        finally:
            for module, kind in classes:
                module.__class__ = kind


def _entrance(model: nn.Module, returned: object) -> nn.Module:
    if returned is None or returned is model:
        return model
    if isinstance(returned, DistributedDataParallel) and returned.module is model:
        # torch refuses a function whose annotations are text.
        hook: Callable[[None, Any], Any] = lambda _, bucket: _as_it_is(bucket)  # noqa: E731
        returned.register_comm_hook(None, hook)
        return returned
    raise BatchError(
        f"parallelize returned a {type(returned).__name__} around the model: only what shards the model in place "
        "(fully_shard, parallelize_module) can be recorded, or DistributedDataParallel around it"
    )


def _as_it_is(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Take a bucket for what all ranks have reduced it to."""
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


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
