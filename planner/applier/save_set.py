"""Say which operator calls of a segment to keep, to the region that runs it and to the compiler that traces it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ...profiler.counted import is_counted
from ..errors import ApplyError
from ..plan import SavedOperator
from .internals import OPERATOR_TYPES
from .keeping import Indices, Keep, Kept, Take

if TYPE_CHECKING:
    from .thread_state import ThreadStates

NamedCalls = tuple[tuple[str, tuple[int, ...]], ...]
"""Pairs of an operator's name and the sorted indices of its calls."""


class SaveSet:
    """Make the two contexts of each run of a segment: keep the n-th calls of the named operators, replay all else.

    Attributes:
        names: The calls kept.
    """

    __slots__ = ("_runs", "_told", "_where", "names")

    def __init__(self, operators: Iterable[SavedOperator], where: str) -> None:
        kept: dict[str, set[int]] = {}
        for saved in operators:
            if _find(saved.operator) is None:
                raise ApplyError(
                    f"segment {where}: the save set names operator {saved.operator!r}, which this torch does not "
                    "have; expected a name like 'aten.addmm.default'; import the library that defines it, or plan again"
                )
            kept.setdefault(saved.operator, set()).add(saved.index)
        self.names: NamedCalls = tuple((name, tuple(sorted(indices))) for name, indices in kept.items())
        self._where = where
        self._runs = 0
        self._told = False

    def contexts(self, threads: ThreadStates) -> tuple[Keep, Take]:
        """Return the forward and the replay context of one region."""
        self._runs += 1
        indices, kept = _indices(self.names), Kept()
        return Keep(threads, indices, kept), Take(threads, indices, kept, _nothing if self._runs == 1 else self._tell)

    def _tell(self) -> None:
        """Warn, once, of a replay that could not use what was kept.

        In a segment's first run that is expected: what code makes at its first use it does not make again.
        """
        if self._told:
            return
        self._told = True
        names = ", ".join(name for name, _ in self.names)
        warnings.warn(
            f"segment {self._where}: its replay made other calls of {names} than its forward, so that what was kept "
            "could not be told apart and everything was computed again. Gradients are exact, but such a step takes "
            "longer, and its peak may be above the promised one. Where this comes at every step (is something made in "
            "forward and kept?) plan with save_sets=False; this is said once",
            stacklevel=2,
        )


def _nothing() -> None:
    pass


def traced_contexts(names: NamedCalls) -> tuple[Any, Any]:
    """Return the two contexts of one region that the compiler traces: torch's own, which it knows."""
    return create_selective_checkpoint_contexts(_Policy(_indices(names)))


class _Policy:
    __slots__ = ("_counts", "_kept")

    def __init__(self, kept: Indices) -> None:
        self._kept = kept
        self._counts = dict.fromkeys(kept, 0)

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = self._kept.get(operator)
        if kept is None or not is_counted(operator, args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = self._counts[operator]
        self._counts[operator] = index + 1
        return CheckpointPolicy.MUST_SAVE if index in kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _indices(names: NamedCalls) -> Indices:
    return {_find(name): frozenset(indices) for name, indices in names}


def _find(name: str) -> Any:
    """Return the operator of a name; None where there is none."""
    found: Any = torch.ops
    try:
        for part in name.split(".") if "." in name else ("higher_order", name):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, OPERATOR_TYPES) else None
