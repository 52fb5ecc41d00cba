"""What a command says: results on standard output, as tables or as JSON, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
        """Show the present phase; where phases are counted, how many are over and how long the others will take.

        On a terminal that is a bar; elsewhere it is a line now and then.
        """
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        live = self._remarks.is_terminal and not self._output.quiet and not self._output.verbose
        with Progress(*columns, console=self._remarks, transient=True, disable=not live) as bar:
            task = bar.add_task("starting", total=None)
            last = time.monotonic() - _QUIET_SECONDS

            def say(words: str) -> None:
                nonlocal last
                total = getattr(words, "total", None)
                if total is not None:
                    bar.update(task, total=total, completed=getattr(words, "done", 0))
                bar.update(task, description=words)
                now = time.monotonic()
                if not live and (self._output.verbose or now - last >= _QUIET_SECONDS):
                    last = now
                    self._line(bar, words)

            yield say

    def _line(self, bar: Progress, words: str) -> None:
        (task,) = bar.tasks
        left = task.time_remaining
        about = "" if left is None or task.finished else f", about {left:.0f} s left"
        self._remarks.print(f"[{task.elapsed or 0:.0f} s{about}] {words}", markup=False)
