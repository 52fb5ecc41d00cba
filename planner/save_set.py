"""Tell torch's selective checkpointing which operator calls of a segment to keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .errors import ApplyError
from .internals import OPERATOR_TYPES
from .plan import SavedOperator

if TYPE_CHECKING:
    from .session import Session


class SaveSet:
    """Make the two contexts of one region: keep the n-th calls of the named operators, replay everything else."""

    __slots__ = ("_kept",)

    def __init__(self, operators: Iterable[SavedOperator], where: str) -> None:
        self._kept: dict[str, frozenset[int]] = {}
        for saved in operators:
            _resolve(saved.operator, where)
            self._kept[saved.operator] = self._kept.get(saved.operator, frozenset()) | {saved.index}

    def contexts(self, session: Session) -> tuple[Any, Any]:
        """Return the forward and the replay context of one region; operators the session marks are not counted."""
        kept = {_resolve(name, ""): indices for name, indices in self._kept.items()}
        return create_selective_checkpoint_contexts(_Policy(kept, session))


class _Policy:
    __slots__ = ("_counts", "_kept", "_session")

    def __init__(self, kept: dict[Any, frozenset[int]], session: Session) -> None:
        self._kept = kept
        self._counts = dict.fromkeys(kept, 0)
        self._session = session

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = self._kept.get(operator)
        if kept is None or self._session.uncounted:
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
