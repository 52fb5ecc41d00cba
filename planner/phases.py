"""What is told of progress: words, and how many phases like this one there are where that is known."""

from __future__ import annotations


class Phase(str):
    """Say what is being done, as words that also know how many like it are over, and how many there are.

    Args:
        words: What is being done.
        done: How many phases are over.
        total: How many there are.
    """

    done: int
    total: int

    def __new__(cls, words: str, done: int, total: int) -> Phase:  # noqa: D102 - the class says it.
        made = super().__new__(cls, f"{words} ({done + 1} of {total})")
        made.done, made.total = done, total
        return made
