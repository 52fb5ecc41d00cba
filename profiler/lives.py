"""Sum the lives of storages into bytes alive at each operator, by category; of planned and unplanned steps alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

CATEGORIES = (
    "parameter",
    "buffer",
    "batch",
    "gradient",
    "activation",
    "recomputed",
    "temporary",
    "unsharded",
    "communication",
)


class Life(Protocol):
    """Say what a storage is, how large, and from which operator to which it is alive (see `records.Storage`)."""

    @property
    def nbytes(self) -> int:
        """Return its bytes."""
        ...

    @property
    def kind(self) -> str:
        """Return what it is."""
        ...

    @property
    def born(self) -> int:
        """Return the operator that made it; -1 when it was there before."""
        ...

    @property
    def last(self) -> int | None:
        """Return the last operator during which it is alive; None when it outlives the step."""
        ...


def live_bytes_by_kind(storages: Iterable[Life], *, loss_stop: int, replayed: np.ndarray) -> dict[str, np.ndarray]:
    """Return the bytes alive at each operator by category, without the scratch inside operators.

    What forward or loss made and what is still alive in backward is an "activation"; what replays made is
    "recomputed"; what else is neither parameter, buffer, batch nor gradient is "temporary".

    Args:
        storages: Every storage of the step.
        loss_stop: Operators of forward and loss.
        replayed: Whether each operator of the step belongs to a replay; shape (operators,).
    """
    count = len(replayed)
    change = {category: np.zeros(count + 1, dtype=np.int64) for category in CATEGORIES}
    for storage in storages:
        begin = max(storage.born, 0)
        if storage.last is not None and storage.last < begin:
            continue
        category = storage.kind
        if category == "activation":
            if begin < loss_stop:
                category = "activation" if storage.last is None or storage.last >= loss_stop else "temporary"
            else:
                # The first operator of backward makes the loss's own gradient, outside every replay.
                category = "recomputed" if replayed[begin] and begin > loss_stop else "temporary"
        change[category][begin] += storage.nbytes
        if storage.last is not None:
            change[category][storage.last + 1] -= storage.nbytes
    return {category: np.cumsum(values)[:-1] for category, values in change.items()}
