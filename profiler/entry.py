"""What a step reads that was there before it: besides the model and batch, tables in attributes, a loss's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .internals import is_plain_tensor, storage_key


class _Reads(TorchDispatchMode):
    """Sort tensors by whether their storage was made under the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.read: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A literal is handed over as a tensor that no operator made.
        literal = func is torch.ops.aten.lift_fresh.default
        for key, tensor in _storages((args, kwargs)):
            if literal:
                self.made.add(key)
            elif key not in self.made:
                self.read.setdefault(key, tensor.detach())
        out = func(*args, **kwargs)
        # What was there before is alive all along, so that what is made meanwhile never takes its key.
        self.made.update(key for key, _ in _storages(out) if key not in self.read)
        return out


def read_from_before(run: Callable[[], Any]) -> list[torch.Tensor]:
    """Run something and return a tensor for each storage that it read and did not make."""
    with _Reads() as reads:
        run()
    return list(reads.read.values())


def _storages(tree: Any) -> list[tuple[int, torch.Tensor]]:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and is_plain_tensor(leaf)]
    return [(storage_key(leaf.untyped_storage()), leaf) for leaf in leaves]
