"""A time as it was taken: its spread over repeats, and whether it was measured or estimated, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

STEADY = 1.5
"""Repeats of which the longest takes more than this many times the shortest were disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Hold the shortest, the (low) median and the longest of some repeats, in nanoseconds."""

    low_ns: int
    median_ns: int
    high_ns: int

    @staticmethod
    def of(times_ns: Sequence[int]) -> Spread:
        """Sum up repeats."""
        return Spread(low_ns=min(times_ns), median_ns=median_low(times_ns), high_ns=max(times_ns))

    @property
    def is_steady(self) -> bool:
        """Say whether the repeats are near enough to each other to be believed."""
        return self.high_ns <= STEADY * self.low_ns

    def __str__(self) -> str:
        """Return milliseconds, or microseconds below one: "120.3 ms (118.0 to 131.2)"; no range of a single value."""
        return self._words(())

    def words(self, origin: Origin) -> str:
        """Return the same with the word "estimated" where it was: "56.1 ms (estimated)"."""
        return self._words(("estimated",) if origin.is_estimate else ())

    def _words(self, remarks: tuple[str, ...]) -> str:
        unit_ns, unit = (1e3, "µs") if self.median_ns < 1e6 else (1e6, "ms")
        median, low, high = (f"{ns / unit_ns:,.1f}" for ns in (self.median_ns, self.low_ns, self.high_ns))
        told = "; ".join((*([] if low == high else [f"{low} to {high}"]), *remarks))
        return f"{median} {unit}" + (f" ({told})" if told else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Say where a time comes from.

    Attributes:
        source: Whether it was measured or estimated.
        how: In words: by which clock, or from what.
    """

    source: Literal["measured", "estimated"]
    how: str

    @property
    def is_estimate(self) -> bool:
        """Say whether it was estimated."""
        return self.source == "estimated"

    def __str__(self) -> str:
        return f"{self.source}: {self.how}"


def measured(how: str) -> Origin:
    """Return the origin of a measured time."""
    return Origin(source="measured", how=how)


def estimated(how: str) -> Origin:
    """Return the origin of an estimated time."""
    return Origin(source="estimated", how=how)
