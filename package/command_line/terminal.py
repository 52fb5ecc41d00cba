"""What a command says: results on standard output, as tables or as JSON, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from .options import Output

Say = Callable[[str], None]
"""Takes a few words on what is being done."""
_QUIET_SECONDS = 10.0
"""Without a terminal, phases are printed as lines, no more often than this."""
_ROWS, _ALL_ROWS = 24, 10_000


class Terminal:
    """Print what a command found, in the way asked for.

    Attributes:
        rows: Most modules that a table lists.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        # Rich takes 80 columns where there is no terminal; a file has room for whole tables.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
        tables = not (output.as_json or output.quiet)
        self.tables = Console(highlight=False, soft_wrap=True, width=width, quiet=not tables)
        self._remarks = Console(stderr=True, highlight=False, soft_wrap=True, quiet=output.quiet)
        self.rows = _ALL_ROWS if output.verbose else _ROWS

    def result(self, data: Callable[[], Mapping[str, Any]]) -> None:
        """Print a result as JSON, where that was asked for."""
        if self._output.as_json:
            print(json.dumps(data(), ensure_ascii=False))

    def say(self, words: str) -> None:
        """Say something about the result: among the tables, or on standard error where the result is JSON."""
        console = self._remarks if self._output.as_json else self.tables
        console.print(words, markup=False)

    def warn(self, words: str) -> None:
        """Say what must not be missed, on standard error."""
        self._remarks.print(f"warning: {words}", markup=False)

    def wrote(self, path: Path, remark: str = "") -> None:
        """Say that a file was written."""
        self.say(f"wrote {path}{remark}")

    @contextmanager
    def progress(self) -> Iterator[Say]:
        """Show the present phase and what is known of the time left, until this is left.

        Where phases are counted that is how many are over and how long the others will take, by the mean of those that
        are over; where a phase is limited, how long it can take at most. On a terminal that is a line that moves;
        elsewhere a line now and then.
        """
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            _LeftColumn(),
        )
        live = self._remarks.is_terminal and not self._output.quiet and not self._output.verbose
        with Progress(*columns, console=self._remarks, transient=True, disable=not live) as bar:
            left = TimeLeft()
            task = bar.add_task("starting", total=None, left=left)
            last = time.monotonic() - _QUIET_SECONDS

            def say(words: str) -> None:
                nonlocal last
                left.note(words)
                # Set outright: the bar's own update leaves a total that is None as it was.
                bar.tasks[0].total, bar.tasks[0].completed = left.total, left.done
                bar.update(task, description=words)
                now = time.monotonic()
                if not live and (self._output.verbose or now - last >= _QUIET_SECONDS):
                    last = now
                    self._line(bar.tasks[0].elapsed or 0, left, words)

            yield say

    def _line(self, elapsed_s: float, left: TimeLeft, words: str) -> None:
        seconds = left.seconds()
        about = "" if seconds is None else f", about {seconds:.0f} s left"
        self._remarks.print(f"[{elapsed_s:.0f} s{about}] {words}", markup=False)


class TimeLeft:
    """What is known of the time left, from the phases told of so far.

    Args:
        clock: What tells seconds.

    Attributes:
        total: How many phases there are; None where they are not counted.
        done: How many of them are over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total: int | None = None
        self.done = 0
        self._began = self._phase_began = clock()
        self._ends: float | None = None

    def note(self, words: str) -> None:
        """Note what is being done from now on; see `remat.planner.phases`, which is not imported for it."""
        now = self._clock()
        limit_s = getattr(words, "limit_s", None)
        self._ends = None if limit_s is None else now + limit_s
        total, done = getattr(words, "total", None), getattr(words, "done", 0)
        if total is not None:
            if done == 0:
                self._began = now
            self.total, self.done, self._phase_began = total, done, now
        elif getattr(words, "over", False):
            self.total, self.done = None, 0

    def seconds(self) -> float | None:
        """Return what counted phases will still take; None before the first one is over."""
        if self.total is None or self.done == 0:
            return None
        each = (self._phase_began - self._began) / self.done
        return max(0.0, each * (self.total - self.done) - (self._clock() - self._phase_began))

    def words(self) -> str:
        """Say what is known; nothing where nothing is."""
        seconds = self.seconds()
        if seconds is not None:
            return f"{self.done} of {self.total} done, about {_clock_words(seconds)} left"
        if self.total is not None:
            return f"{self.done} of {self.total} done"
        if self._ends is not None and self._ends > self._clock():
            return f"at most {_clock_words(self._ends - self._clock())}"
        return ""


def _clock_words(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class _LeftColumn(ProgressColumn):
    """Show the time left, as far as it is known."""

    def render(self, task: Task) -> Text:
        left: TimeLeft = task.fields["left"]
        return Text(left.words(), style="progress.remaining")
