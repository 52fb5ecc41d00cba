"""What is going on in one thread: the calls counted so far, the regions open, and which segments may begin now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .save_set import SaveSet
from .state import Watched

if TYPE_CHECKING:
    from .loop import Loop, Run

CallKey = tuple[int, int]
NO_SCOPE = -1


class Level:
    """Hold the segments that may begin in one surrounding: at the top, or inside one segment.

    Attributes:
        singles: Segments of one call, by that call.
        runs: Segments of several calls, by the first of them.
        begins: The first calls of all of them.
    """

    __slots__ = ("begins", "runs", "singles")

    def __init__(self) -> None:
        self.begins: set[CallKey] = set()
        self.singles: dict[CallKey, BoundSegment] = {}
        self.runs: dict[CallKey, BoundSegment] = {}

    def add(self, segment: BoundSegment) -> None:
        """Admit a segment."""
        (self.singles if len(segment.calls) == 1 else self.runs)[segment.calls[0]] = segment
        self.begins.add(segment.calls[0])

    def all_begins(self) -> set[CallKey]:
        """Return the first calls of these segments and of those inside them."""
        inside = [segment.inside.all_begins() for segment in (*self.singles.values(), *self.runs.values())]
        return self.begins.union(*inside)

    def calls(self) -> dict[CallKey, str]:
        """Return all members' calls of these segments and of those inside them, with their segments' names."""
        found: dict[CallKey, str] = {}
        for segment in (*self.singles.values(), *self.runs.values()):
            found.update(dict.fromkeys(segment.calls, segment.where))
            found.update(segment.inside.calls())
        return found

    def mark(self, *, removed: bool) -> None:
        """Note whether the plan is taken off the model, so that nothing can begin inside a replay."""
        for segment in (*self.singles.values(), *self.runs.values()):
            segment.removed = removed
            segment.inside.mark(removed=removed)


class BoundSegment:
    """A planned segment with its names resolved to the model's own objects."""

    __slots__ = (
        *(
            "around",
            "buffers",
            "calls",
            "early_stop",
            "inside",
            "modules",
            "remade",
            "removed",
            "save",
            "scope",
            "watched",
            "where",
        ),
    )

    def __init__(
        self,
        *,
        where: str,
        calls: tuple[CallKey, ...],
        modules: list[nn.Module],
        watched: Watched,
        inside: Level,
        save: SaveSet | None,
        early_stop: bool,
        buffers: list[tuple[nn.Module, str]],
        remade: list[tuple[nn.Module, str]],
        scope: int,
        around: frozenset[int],
    ) -> None:
        self.where = where
        self.removed = False
        self.calls = calls
        # Keys of the modules around a run's members.
        self.around = around
        self.inside = inside
        self.save = save
        self.early_stop = early_stop
        self.buffers = buffers
        # Attributes that hooks set anew at each call, in a replay too.
        self.remade = remade
        # Key of the module in whose loop a run must end at the latest.
        self.scope = scope
        self.modules = modules
        self.watched = watched


class ThreadState:
    """The state of one planned model in one thread.

    It is idle until the outermost planned call with gradients, and again after it, whatever happened inside:

        idle ── outermost call ──> counting ── a single call's region ──> inside it ── its end ──> counting
         │                            └── a run's first member ──> in a loop <──> in a member ── the last one's end ──┘
         └── backward unpacks ──> replaying: as counting or, where no segment is inside, with nothing counted

        idle             counts None, level the top's, loop None, open empty
        counting         counts a dictionary; level holds what may begin here; loop None
        inside a region  level is the segment's `inside`; loop None
        in a loop        loop records the parent's operators; open ends with its runs, level is inside the last of them
        in a member      loop None again, and held by the member's call until it returns
        replaying        level and counts as the region's forward had them; what was there before comes back at its end

    Attributes:
        level: Segments that may begin now.
        counts: Calls with gradients of each planned module so far in this forward; None outside of one, and in the
            replay of a segment with none inside, where no call can begin one. Calls without gradients are not planned,
            and how many come before the others (recycling, self-conditioning) may differ from step to step.
        loop: The parent's loop between whose member calls we are; None inside a member or without an open run.
        open: Runs begun and not ended, in order.
        uncounted: Whether operators running now are the applier's own.
        cut: Names of the segments of this forward that were ended before their last call came.
    """

    __slots__ = ("counts", "cut", "level", "loop", "open", "uncounted")

    def __init__(self, top: Level) -> None:
        self.level = top
        self.counts: dict[int, int] | None = None
        self.loop: Loop | None = None
        self.open: list[Run] = []
        self.uncounted = False
        self.cut: list[str] = []

    def scoped(self, scope: int | None, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `body`, and end the runs begun in it that belong to this scope (None: all), or drop them if it raises.

        A run may begin in one container and end in another; it belongs to the nearest container around both.
        """
        before = self.open.copy()
        level, loop = self.level, self.loop
        try:
            output = body(*args, **kwargs)
            while any(scope is None or run.segment.scope == scope for run in self.open if run not in before):
                self.cut.append(self.open[-1].segment.where)
                self.open[-1].leave()
            return output
        except BaseException:
            while self.open and self.open[-1] not in before:
                self.open[-1].abandon()
            raise
        finally:
            if self.open == before:
                self.level, self.loop = level, loop

    def replay(self, level: Level, counts: dict[int, int], body: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call `body` with the calls counted and the segments admitted as they were in forward."""
        outer = self.level, self.counts, self.loop
        self.level, self.counts, self.loop = level, None, None
        try:
            if not level.begins:
                body(*args)
            else:
                self.counts = counts.copy()
                self.scoped(None, body, args, {})
        finally:
            self.level, self.counts, self.loop = outer


class ThreadStates(threading.local):
    """The state of one planned model in each thread: `here` is the running thread's."""

    def __init__(self, top: Level) -> None:
        self.top = top
        self.here = ThreadState(top)

    def __reduce__(self) -> tuple[type[ThreadStates], tuple[Level]]:
        # A copy or an unpickled planned model is another model; its threads' states start idle.
        return ThreadStates, (self.top,)
