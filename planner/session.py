"""What is going on in one thread: the calls counted so far, the regions open, and which segments may begin now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .internals import parameters_of
from .save_set import SaveSet

if TYPE_CHECKING:
    from .loop import Loop, Run

CallKey = tuple[int, int]


class Level:
    """Hold the segments that may begin in one surrounding: at the top, or inside one segment.

    Attributes:
        singles: Segments of one call, by that call.
        runs: Segments of several calls, by the first of them.
    """

    __slots__ = ("runs", "singles")

    def __init__(self) -> None:
        self.singles: dict[CallKey, Segment] = {}
        self.runs: dict[CallKey, Segment] = {}

    def holds(self, call: CallKey) -> bool:
        """Return whether a segment begins with this call."""
        return call in self.singles or call in self.runs


class Segment:
    """A planned segment with its names resolved to the model's own objects."""

    __slots__ = ("buffers", "calls", "early_stop", "inside", "modules", "parameters", "save", "where")

    def __init__(
        self,
        *,
        where: str,
        calls: tuple[CallKey, ...],
        members: list[nn.Module],
        inside: Level,
        save: SaveSet | None,
        early_stop: bool,
        buffers: list[tuple[nn.Module, str]],
    ) -> None:
        self.where = where
        self.calls = calls
        self.inside = inside
        self.save = save
        self.early_stop = early_stop
        self.buffers = buffers
        self.modules = list(dict.fromkeys(module for member in members for module in member.modules()))
        owned = [parameters_of(module) for module in self.modules]
        self.parameters = [(parameters, name) for parameters in owned for name in parameters]


class Session(threading.local):
    """The state of one planned model in the running thread.

    Attributes:
        level: Segments that may begin now.
        counts: Calls of each planned module so far in this forward; None outside of one.
        loop: The parent's loop between whose member calls we are; None inside a member or without an open run.
        open: Runs begun and not ended, in order.
        suspended: For each member call in progress, the loop it belongs to.
        scopes: How many surroundings that end open runs are in progress.
        replaying: Whether a segment is being replayed.
        uncounted: Whether operators running now are the applier's own.
    """

    def __init__(self, top: Level) -> None:
        self._top = top
        self.level = top
        self.counts: dict[int, int] | None = None
        self.loop: Loop | None = None
        self.open: list[Run] = []
        self.suspended: list[Loop | None] = []
        self.scopes = 0
        self.replaying = False
        self.uncounted = False

    def __reduce__(self) -> tuple[type[Session], tuple[Level]]:
        # A copy or an unpickled session belongs to another model and starts idle.
        return Session, (self._top,)

    def scoped(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `body`, and end every run that it leaves open: properly, or by dropping it after an exception."""
        level, loop, opened, suspended = self.level, self.loop, len(self.open), len(self.suspended)
        self.scopes += 1
        try:
            output = body(*args, **kwargs)
            while len(self.open) > opened:
                self.open[-1].leave()
            return output
        except BaseException:
            while len(self.open) > opened:
                self.open[-1].abandon()
            raise
        finally:
            del self.suspended[suspended:]
            self.scopes -= 1
            self.level, self.loop = level, loop

    def replay(self, level: Level, counts: dict[int, int], body: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call `body` with the calls counted and the segments admitted as they were in forward."""
        outer_level, outer_counts, outer_loop, outer = self.level, self.counts, self.loop, self.replaying
        self.level, self.counts, self.loop, self.replaying = level, dict(counts), None, True
        try:
            self.scoped(body, args, {})
        finally:
            self.level, self.counts, self.loop, self.replaying = outer_level, outer_counts, outer_loop, outer
