"""What is told of progress: words that may know how many phases like theirs there are, or how long theirs can take."""

from __future__ import annotations

from collections.abc import Callable


class Phase(str):
    """Say what is being done, as words that also know how many like it are over, and how many there are.

    What is said in plain words after it is a part of it; the last one ends with `Over`.

    Args:
        words: What is being done.
        done: How many phases are over.
        total: How many there are; they take about as long as one another.
    """

    done: int
    total: int

    def __new__(cls, words: str, done: int, total: int) -> Phase:  # noqa: D102 - the class says it.
        made = super().__new__(cls, f"{words} ({done + 1} of {total})")
        made.done, made.total = done, total
        return made


class Over(str):
    """Say what is being done after the last of counted phases."""

    over = True


class Bounded(str):
    """Say what is being done, as words that also know how long it can take.

    Args:
        words: What is being done.
        limit_s: Most seconds that it takes.
    """

    limit_s: float

    def __new__(cls, words: str, limit_s: float) -> Bounded:  # noqa: D102 - the class says it.
        made = super().__new__(cls, words)
        made.limit_s = limit_s
        return made


def as_a_part(say: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Return what says phases as plain words, because they are a part of a counted one."""
    return None if say is None else lambda words: say(words if isinstance(words, Bounded) else str(words))
