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
        """Return milliseconds: "120.3 ms (118.0 to 131.2)"."""
        return f"{self.median_ns / 1e6:,.1f} ms ({self.low_ns / 1e6:,.1f} to {self.high_ns / 1e6:,.1f})"


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
