"""What the host pays for a segment as it is applied: for itself, for tensors saved in it, for operators looked at.

The host's code is slower after a large operator, whose operands drove it out of the processor's caches. So each cost
is held twice, and an operator is counted between the two by the bytes it moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...profiler.records import Profile

SWEEP_BYTES = 4 << 20
"""An operator that moves as many bytes leaves the host's caches cold: twice the second-level cache of a common core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Hold costs in nanoseconds a step.

    Attributes:
        region_ns: Of a segment.
        saved_ns: Of each tensor that autograd saves in a segment, beyond the operator's own time in the replay.
        selective_ns: Of each operator in a segment with a save set.
    """

    region_ns: int = 0
    saved_ns: int = 0
    selective_ns: int = 0


ASSUMED = HostCosts(region_ns=200_000, saved_ns=20_000, selective_ns=20_000)
"""What a common core takes, in round numbers, beside estimated times of operators, which are as rough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCostsByCache:
    """Hold the same costs where caches are warm, and behind operators that move `SWEEP_BYTES` or more."""

    warm: HostCosts = HostCosts()
    cold: HostCosts = HostCosts()


class HostTimes:
    """Say what the host pays for a segment of a profile's operators."""

    def __init__(self, profile: Profile, costs: HostCostsByCache) -> None:
        moved = np.array([operator.moved_bytes for operator in profile.operators], dtype=float)
        self._cold = np.minimum(1.0, moved / SWEEP_BYTES)
        self._costs = costs
        saved = np.zeros(len(profile.operators))
        for storage in profile.storages:
            for k in storage.saved_by:
                saved[k] += 1
        self._saved_before = self._before(saved, costs.warm.saved_ns, costs.cold.saved_ns)
        ones = np.ones(len(profile.operators))
        self._selective_before = self._before(ones, costs.warm.selective_ns, costs.cold.selective_ns)

    def _before(self, count: np.ndarray, warm_ns: int, cold_ns: int) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(count * (warm_ns + (cold_ns - warm_ns) * self._cold))])

    def replay_ns(self, first: int, stop: int) -> int:
        """Return what a segment costs whose replay runs the operators [first, stop)."""
        warm, cold = self._costs.warm.region_ns, self._costs.cold.region_ns
        region_ns = warm + (cold - warm) * self._cold[first:stop].max(initial=0.0)
        return int(region_ns + self._saved_before[stop] - self._saved_before[first])

    def selective_ns(self, first: int, end: int) -> int:
        """Return what a save set adds to that in a segment of the operators [first, end)."""
        return int(self._selective_before[end] - self._selective_before[first])
