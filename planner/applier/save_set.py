"""Tell torch's selective checkpointing which operator calls of a segment to keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import ApplyError
from ..plan import SavedOperator
from .internals import OPERATOR_TYPES

if TYPE_CHECKING:
    from .session import Session


Kept = tuple[tuple[str, tuple[int, ...]], ...]


class SaveSet:
    """Make the two contexts of one region: keep the n-th calls of the named operators, replay everything else.

    Attributes:
        kept: Pairs of an operator's name and the sorted indices of the calls kept.
    """

    __slots__ = ("kept",)

    def __init__(self, operators: Iterable[SavedOperator], where: str) -> None:
        kept: dict[str, set[int]] = {}
        for saved in operators:
            _resolve(saved.operator, where)
            kept.setdefault(saved.operator, set()).add(saved.index)
        self.kept = tuple((name, tuple(sorted(indices))) for name, indices in kept.items())

    def contexts(self, session: Session) -> tuple[Any, Any]:
        """Return the forward and the replay context of one region; operators the session marks are not counted."""
        return create_selective_checkpoint_contexts(_Policy(self.kept, session))


def traced_contexts(kept: Kept) -> tuple[Any, Any]:
    """Return the two contexts of one region that the compiler traces."""
    return create_selective_checkpoint_contexts(_Policy(kept, None))


class _Policy:
    __slots__ = ("_counts", "_kept", "_session")

    def __init__(self, kept: Kept, session: Session | None) -> None:
        self._kept = {_resolve(name, ""): frozenset(indices) for name, indices in kept}
        self._counts = dict.fromkeys(self._kept, 0)
        self._session = session

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = self._kept.get(operator)
        if kept is None or (self._session is not None and self._session.uncounted):
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = self._counts[operator]
        self._counts[operator] = index + 1
        return CheckpointPolicy.MUST_SAVE if index in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _resolve(name: str, where: str) -> Any:
    parts = name.split(".") if "." in name else ["higher_order", name]
    try:
        found: Any = torch.ops
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, OPERATOR_TYPES):
        raise ApplyError(
            f"segment {where}: the save set names operator {name!r}, which this torch does not have; "
            "expected a name like 'aten.addmm.default'; import the library that defines it, or plan again"
        )
    return found
