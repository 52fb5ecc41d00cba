"""Measure, once per device, what the host pays for a checkpointed region and for selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .devices import device_of

_OPERATORS = 20
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Hold host costs in nanoseconds: per region and step, and per operator of a selective region and step."""

    region_ns: int
    selective_operator_ns: int


@lru_cache(maxsize=8)
def host_costs(device: torch.device) -> HostCosts:
    """Time forward and backward of twenty tiny operators: plain, in one region, in one selective region.

    The fastest of some repeats counts, so that other work on the machine disturbs little. Replaying the operators is
    not counted: a planner prices that by their own times.
    """
    with torch.random.fork_rng(devices=device_of(device).forked):
        x = torch.ones(4, device=device, requires_grad=True)
        forward = _fastest(lambda: _chain(x), device)
        plain = _fastest(lambda: _backward(_chain(x)), device)
        region = _fastest(lambda: _backward(_region(x, None)), device)
        selective = _fastest(lambda: _backward(_region(x, _contexts)), device)
    region_ns = max(0, region - plain - forward)
    return HostCosts(region_ns, max(0, selective - region) // _OPERATORS)


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_OPERATORS):
        x = x.sin()
    return x


def _region(x: torch.Tensor, contexts: Callable[[], Any] | None) -> torch.Tensor:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    result: torch.Tensor = checkpoint(_chain, x, use_reentrant=False, **options)  # pyright: ignore[reportAssignmentType]
    return result


def _backward(y: torch.Tensor) -> None:
    y.sum().backward()


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_recompute)


def _recompute(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _fastest(run: Callable[[], Any], device: torch.device) -> int:
    place = device_of(device)
    times: list[int] = []
    with torch.enable_grad():
        for _ in range(_REPEATS):
            start = place.clock_ns()
            run()
            times.append(place.clock_ns() - start)
    return min(times)
