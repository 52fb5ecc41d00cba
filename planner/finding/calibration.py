"""Correct the profile's operator times, by kind, from what plans were measured to add.

What a plan adds is, by the profile, the host's cost of its segments and the sum of what its replays run. Let x be the
nanoseconds that its replays spend in each kind of operator, h the host's cost and y what was measured. The factors f
that make x.f + h meet y are few measurements short of being determined, and measurements are noisy: so they are those
that miss y by least while they stay near 1, in the sense of least squares (ridge regression towards 1), and within
bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...profiler import Profile
from ...profiler.times import Spread
from ...solvers import Solution
from ..bridge.bridge import Bridge

KINDS: dict[str, tuple[str, ...]] = {
    "convolutions": ("convolution",),
    "matrix products and attention": ("mm", "bmm", "addmm", "linear", "matmul", "attention"),
    "normalizations": ("norm",),
}
"""Kinds of operator by what their names contain; all others are "other operators"."""
OTHER = "other operators"
STIFFNESS = 0.25
"""A factor this far from 1 weighs as much as a measurement that is missed by its noise."""
NOISE = 0.01
"""The share of a step by which any measurement may be off."""
BOUNDS = (0.5, 2.0)
"""Beyond these no factor is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Hold what one plan was measured to add, and what it was predicted to spend.

    Attributes:
        replayed_ns: Nanoseconds of replayed operators by kind, by the profile.
        host_ns: The host's cost of its segments.
        added_ns: What was measured, round by round.
        step_ns: The unplanned step.
    """

    replayed_ns: Mapping[str, int]
    host_ns: int
    added_ns: Spread
    step_ns: int

    @property
    def noise_ns(self) -> float:
        """Return how far the measurement may be off: half of what the rounds ranged over, or `NOISE` of a step."""
        return max(1, (self.added_ns.high_ns - self.added_ns.low_ns) / 2, NOISE * self.step_ns)

    @staticmethod
    def of(bridge: Bridge, solution: Solution, *, added_ns: Spread) -> Observation:
        """Take what a solution replays from the bridge that priced it."""
        operators = bridge.profile.operators
        replayed = dict.fromkeys((*KINDS, OTHER), 0)
        for k in bridge.replayed(solution.segments):
            replayed[kind_of(operators[k].operator)] += operators[k].forward_ns
        return Observation(
            replayed_ns=replayed,
            host_ns=solution.added_ns - sum(replayed.values()),
            added_ns=added_ns,
            step_ns=bridge.profile.step_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Hold by what to multiply the times of each kind of operator."""

    by_kind: Mapping[str, float]

    def words(self) -> str:
        """Say what was corrected; "" where nothing was by a twentieth or more."""
        told = [f"{kind} by {factor:.2f}" for kind, factor in self.by_kind.items() if abs(factor - 1) >= 0.05]
        return f"replayed times were corrected by what was measured: {', '.join(told)}" if told else ""


def kind_of(operator: str) -> str:
    """Return an operator's kind: a key of `KINDS`, or `OTHER`."""
    name = operator.split(".")[1] if "." in operator else operator
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def factors(observations: Sequence[Observation]) -> Factors:
    """Find the factors that explain what was measured; see above."""
    kinds = (*KINDS, OTHER)
    weights = np.array([[1 / one.noise_ns] for one in observations])
    replayed = np.array([[one.replayed_ns[kind] for kind in kinds] for one in observations], dtype=float)
    missed = np.array([one.added_ns.median_ns - one.host_ns for one in observations], dtype=float) - replayed.sum(
        axis=1
    )
    rows = np.vstack([replayed * weights, np.eye(len(kinds)) / STIFFNESS])
    wanted = np.concatenate([missed * weights[:, 0], np.zeros(len(kinds))])
    found, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    return Factors(by_kind=dict(zip(kinds, np.clip(1 + found, *BOUNDS).tolist(), strict=True)))


def corrected(profile: Profile, known: Factors) -> Profile:
    """Return a profile whose forward operators take what they were found to take in replays.

    The step's own time stays: it is what added time is a share of.
    """
    operators = tuple(
        replace(operator, forward_ns=int(operator.forward_ns * known.by_kind[kind_of(operator.operator)]))
        if k < profile.loss_stop
        else operator
        for k, operator in enumerate(profile.operators)
    )
    return replace(profile, operators=operators)
