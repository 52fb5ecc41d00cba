"""Which known name somebody may have meant who wrote another."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question for the known name that is nearest: "did you mean 'solver'?"; "" where none is near."""
    close = get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else ""
