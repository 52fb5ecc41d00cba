"""What an unmodified step repeats bit for bit, value by value, and how far apart its runs are where it does not.

Some kernels add in another order every time (atomics). One pair of runs tells neither which values that concerns nor
how much; several do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .results import Results, Values, compare_values, differing

RUNS = 4
"""Runs of the unmodified step compared with the first."""
WIDER = 4.0
"""How much further than the unmodified step's own runs a planned one may be, in root mean squares."""


class Repeatability:
    """Hold how the values of a step spread over runs of it.

    Attributes:
        spread: By name, of values that did not repeat, the largest root mean square of a difference from the first run.
        random_states_repeat: Whether the random states after the step did.
        varying: What was left in Python's objects that did not.
        compared: How many values there are.
    """

    def __init__(self, first: Results, run: Callable[[], Results], runs: int = RUNS) -> None:
        self.spread: dict[str, float] = {}
        self.random_states_repeat = True
        self.varying: set[str] = set()
        self.compared = len(_values(first))
        for _ in range(runs):
            again = run()
            self.random_states_repeat &= again.same_random_states(first)
            self.varying.update(differing(again.left, first.left))
            for name, apart in _distances(again, first).items():
                self.spread[name] = max(self.spread.get(name, 0.0), apart)

    @property
    def whole(self) -> bool:
        """Return whether everything repeats bit for bit."""
        return not self.spread and not self.varying and self.random_states_repeat

    def difference(self, planned: Results, plain: Results) -> str:
        """Say in words what differs that repeats, or differs by more than runs of the plain step do; "" if nothing."""
        for name, apart in _distances(planned, plain).items():
            own = self.spread.get(name)
            if own is None:
                return f"{name} differs, by {apart:.3g} in the root mean square, and repeats bit for bit unplanned"
            if not apart <= WIDER * own:
                return f"{name} differs by {apart:.3g} in the root mean square, runs of the unplanned step by {own:.3g}"
        for name in differing(planned.left, plain.left):
            if name not in self.varying:
                return f"{name} is another after the step, and repeats unplanned"
        if self.random_states_repeat and not planned.same_random_states(plain):
            return "the random state after the step differs"
        return ""

    def words(self) -> str:
        """Say which values were compared how; "" where all are compared bit for bit."""
        if self.whole:
            return ""
        if not self.spread and self.random_states_repeat:
            return (
                f"each run of the unmodified step leaves {min(self.varying)} otherwise (a measured time?), which "
                "was not compared; all else was, bit for bit"
            )
        first = f", {next(iter(self.spread))} among them" if self.spread else ", but for the random state"
        return (
            f"the unmodified step does not repeat itself bit for bit: {len(self.spread)} of {self.compared} values "
            f"differ between runs{first}; these were compared within its own spread, the others bit for bit"
        )


def _values(results: Results) -> Values:
    gradients = {f"gradient of {name}": value for name, value in results.gradients.items()}
    buffers = {f"buffer {name}": value for name, value in results.buffers.items()}
    return {**results.loss, **gradients, **buffers}


def _distances(ours: Results, theirs: Results) -> dict[str, float]:
    """Return the root mean square of the difference, by name, of the values that are not equal bit for bit."""
    left, right = _values(ours), _values(theirs)
    unequal = compare_values(left, right).unequal
    return {name: _apart(left.get(name), right.get(name)) for name in unequal}


def _apart(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    gap = (ours.double() - theirs.double()).square().nan_to_num(nan=float("inf"))
    return float(gap.mean().sqrt())
