"""Keep outputs of a region's forward and hand them out in its replay, each to the call that it is the output of.

A save set names "the n-th call of an operator", and so does torch's own selective checkpointing. Where forward made
calls that the replay does not (a table made at first use and kept, weights that autocast casts once), numbers alone
give one call another's output, and gradients are wrong without a word. So more is compared here. For the operators in
question, forward notes in order what is called, on which shapes, and how many tensors autograd had saved before. A
replay goes through the same notes, and must have come to the same place when it ends. It begins and ends where forward
did, hence a call too many on either side shifts all that follow against what autograd saves, or leaves one over. Then
the replay is given up before anyone has seen a result, and runs once more with nothing handed out: exact, but slower.

Casts of weights are left out, of the notes and of the count. Autocast makes them once and keeps them, for as long as
its outermost context lasts: so they come and go, and one that was handed another call's output would hand it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...profiler.counted import is_counted
from .internals import StopReplay, TorchReplay, detached, tensors_saved_in_forward, versions_of

if TYPE_CHECKING:
    from .thread_state import ThreadStates

Indices = dict[Any, frozenset[int]]
"""By operator, the numbers of the calls whose outputs are kept."""


class _Call(NamedTuple):
    """What is noted of a call: enough to tell, in one order of calls, that the replay is where forward was."""

    operator: Any
    saved_before: int
    shapes: tuple[torch.Size, ...]


class _Output(NamedTuple):
    """An output that is kept, and how often its tensors had been changed in place."""

    value: Any
    versions: list[int]

    @property
    def unchanged(self) -> bool:
        return versions_of(_tensors(self.value)) == self.versions


class Kept:
    """What one forward of a region called and kept.

    Attributes:
        calls: The calls of the operators in question, in order.
        outputs: What is kept, by position among the calls; gone once handed out.
        saved: How many tensors autograd saved in the region.
    """

    __slots__ = ("calls", "outputs", "saved")

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.outputs: dict[int, _Output] = {}
        self.saved = 0

    def calls_until_stop(self) -> int:
        """Return how many calls come before a replay is stopped, which is when the last tensor is saved."""
        return sum(call.saved_before < self.saved for call in self.calls)


class _Mode(TorchDispatchMode):
    """See every call of the operators in question, but those that the applier makes itself."""

    # With an operator that takes functions (flex_attention) it is the same.
    supports_higher_order_operators = True

    def __init__(self, threads: ThreadStates, indices: Indices, kept: Kept) -> None:
        super().__init__()
        self._threads = threads
        self._thread = threads.here
        self._indices = indices
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the region stay compiled."""
        return True

    def _noted(self, operator: Any, args: tuple[Any, ...], saved_before: int) -> _Call:
        return _Call(operator, saved_before, tuple([a.shape for a in args if isinstance(a, torch.Tensor)]))


class Keep(_Mode):
    """Note the calls of a region's forward, and keep what is to be kept."""

    def __enter__(self) -> Keep:
        self._thread = self._threads.here
        self._saved = tensors_saved_in_forward()
        self._counts = dict.fromkeys(self._indices, 0)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._kept.saved = len(self._saved)
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wanted = self._indices.get(func)
        if wanted is None or self._thread.uncounted or not is_counted(func, args):
            return func(*args, **(kwargs or {}))
        calls = self._kept.calls
        calls.append(self._noted(func, args, len(self._saved)))
        position, index = len(calls) - 1, self._counts[func]
        self._counts[func] = index + 1
        output = func(*args, **(kwargs or {}))
        if index in wanted:
            value = pytree.tree_map_only(torch.Tensor, detached, output)
            self._kept.outputs[position] = _Output(value, versions_of(_tensors(value)))
        return output


class Take(_Mode):
    """Hand out in a replay what forward kept, for as long as the replay makes the calls that forward made."""

    def __init__(self, threads: ThreadStates, indices: Indices, kept: Kept, differs: Callable[[], None]) -> None:
        super().__init__(threads, indices, kept)
        # What to do where the replay differs, before it runs again.
        self._tell = differs
        self._off = False

    def __enter__(self) -> Take:
        if not self._off:
            self._thread = self._threads.here
            self._replay = TorchReplay()
            self._position = 0
            self._differs = False
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if not self._off:
            del self._replay

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._off or func not in self._indices or self._thread.uncounted or not is_counted(func, args):
            return func(*args, **(kwargs or {}))
        position, calls = self._position, self._kept.calls
        call = self._noted(func, args, self._replay.saved)
        if self._differs or position >= len(calls) or calls[position] != call:
            self._differs = True
            raise _DiffersError
        self._position = position + 1
        # What was handed out before, or changed in place since, is computed again.
        kept = self._kept.outputs.pop(position, None)
        return kept.value if kept is not None and kept.unchanged else func(*args, **(kwargs or {}))

    def run(self, body: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> None:
        """Replay a region's body from its inputs' tensors, once more and without this where it differs from forward."""
        if self._off:
            body(*tensors)
            return
        try:
            body(*tensors)
        except _DiffersError:
            pass
        except StopReplay:
            if self._agrees(self._kept.calls_until_stop()):
                raise
        else:
            if self._agrees(len(self._kept.calls)):
                return
        # Outside of the clauses above: an exception would keep the first try's tensors alive.
        self._kept.outputs.clear()
        self._tell()
        self._off = True
        try:
            self._replay.again(tensors)
        finally:
            self._off = False

    def _agrees(self, calls: int) -> bool:
        return not self._differs and self._position == calls


class _DiffersError(Exception):
    """The replay makes other calls than forward made."""


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
