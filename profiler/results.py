"""What a training step computes, bit for bit (loss, gradients, buffers, random states), and the memory it takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from .allocator import allocated_peak_bytes
from .devices import device_of
from .step import Step

Values = dict[str, torch.Tensor]
Arm = Callable[[], AbstractContextManager[Any]]
"""Makes the surrounding to run a step in: nothing, or a plan applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Compare one kind of result over all its tensors.

    Attributes:
        compared: How many tensors were compared.
        unequal: Names of those that are not equal bit for bit; two NaNs at one place are equal.
        largest: The largest absolute difference; infinite where shapes, or NaNs, differ.
    """

    compared: int
    unequal: tuple[str, ...]
    largest: float

    def __str__(self) -> str:
        if not self.compared:
            return "none"
        if not self.unequal:
            return f"bitwise equal ({self.compared} compared)"
        return f"{len(self.unequal)} of {self.compared} differ, by up to {self.largest:.3g} (first: {self.unequal[0]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Hold what was computed by the end of the last step run, on the CPU, and the memory that step took.

    Attributes:
        loss: The loss, under "loss".
        gradients: By parameter name.
        buffers: By name, the loss's that a step writes included; and, where hooks step parameters in backward, what
            those then are.
        random_states: Of torch, the device, Python and numpy.
        peak_bytes: The most bytes allocated at any moment, above parameters, buffers and batch.
        cached_bytes: What the allocator had reserved by then beyond the most that was allocated; 0 on a CPU.
        left: What the steps left in Python's objects (counters, lists), as plain data, by how it is reached.
    """

    loss: Values
    gradients: Values
    buffers: Values
    random_states: tuple[Any, ...]
    peak_bytes: int
    cached_bytes: int = 0
    left: dict[str, object] = field(default_factory=dict)

    def differences(self, other: Results) -> tuple[Difference, Difference, Difference]:
        """Compare losses, gradients and buffers."""
        return (
            compare_values(self.loss, other.loss),
            compare_values(self.gradients, other.gradients),
            compare_values(self.buffers, other.buffers),
        )

    def same_random_states(self, other: Results) -> bool:
        """Say whether torch's, Python's and numpy's random states are the same."""
        ours, theirs = self.random_states, other.random_states
        return torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) and ours[2:] == theirs[2:]

    def first_difference(self, other: Results) -> str:
        """Say in words what differs first; "" where nothing does."""
        for name, difference in zip(("loss", "gradients", "buffers"), self.differences(other), strict=True):
            if difference.unequal:
                return f"{name}: {difference}"
        for name in differing(self.left, other.left):
            return f"{name} is another after the step"
        return "" if self.same_random_states(other) else "the random state after the step differs"


def run_steps(
    step: Step,
    arm: Arm,
    steps: int = 1,
    *,
    accumulation: bool = False,
    train: Callable[[], torch.Tensor] | None = None,
) -> Results:
    """Run training steps for real and return what they computed; the model is left as it was.

    Args:
        step: The step.
        arm: What surrounds the steps.
        steps: How many; parameters stay as they are, buffers and random states go on.
        accumulation: Let gradients exist from the beginning of each.
        train: Runs a step, in place of `step.train`.
    """
    model, guard, train = step.model, step.guard, train or step.train
    device = next(model.parameters()).device
    ran: list[torch.Tensor] = []
    with guard.preserved(), arm():
        trained = [*model.named_parameters(), *guard.beside(model)]
        for _ in range(steps - 1):
            _clear_gradients(trained, accumulation)
            train()
        present = _clear_gradients(trained, accumulation)
        place = device_of(device)
        # Inside a caller's autocast an earlier run's casts are still there, and would be freed while it is measured.
        torch.clear_autocast_cache()
        place.release_cached()
        before = place.allocated_bytes()
        peak = allocated_peak_bytes(lambda: ran.append(train()), device)
        beside = [*trained, *guard.buffers_beside(model)]
        written = [(name, tensor) for name, tensor in beside if guard.was_written(tensor)]
        results = Results(
            loss={"loss": _copy(ran[0])},
            gradients={name: _copy(p.grad) for name, p in trained if p.grad is not None},
            buffers={name: _copy(buffer) for name, buffer in (*model.named_buffers(), *written)},
            random_states=_random_states(device),
            peak_bytes=present + peak,
            cached_bytes=max(0, place.reserved_bytes() - before - peak),
        )
    # Where the user says that hooks may run again, what they note is theirs.
    return results if step.repeatable_hooks else replace(results, left=guard.left)


def _clear_gradients(trained: Sequence[tuple[str, torch.Tensor]], accumulation: bool) -> int:
    """Take gradients away, or set them to zero when accumulating; return the bytes they then hold."""
    nbytes = 0
    for _, parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if accumulation and parameter.requires_grad else None
        nbytes += 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()
    return nbytes


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def compare_values(ours: Values, theirs: Values) -> Difference:
    """Compare tensors by name."""
    unequal: list[str] = []
    largest = 0.0
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            unequal.append(name)
            largest = float("inf")
        elif not _same(a, b):
            unequal.append(name)
            gap = (a.double() - b.double()).abs()
            largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
    return Difference(compared=len(ours.keys() | theirs.keys()), unequal=tuple(unequal), largest=largest)


def differing(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """Name what two runs left otherwise, in `Results.left`."""
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit, except that any NaN equals any NaN."""
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def _random_states(device: torch.device) -> tuple[Any, ...]:
    numpy: Any = np.random.get_state(legacy=True)
    return torch.get_rng_state(), device_of(device).random_state(), random.getstate(), numpy[1].tolist(), int(numpy[2])
