"""Measure, once per device, what the host pays for a segment as it is applied, and for keeping operators in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import nn

from ...profiler.devices import device_of
from ...profiler.results import Arm
from ..applier.apply import apply_segments
from ..bridge.candidates import HostCosts
from ..segments import Call, PlannedSegment, SavedOperator

OPERATORS = 20
REPEATS = 15
_MEMBERS = (Call(module="0"), Call(module="1"))
_BARE = PlannedSegment(members=_MEMBERS)
_SELECTIVE = PlannedSegment(members=_MEMBERS, save=(SavedOperator(operator="aten.sin.default", index=0),))


class _Sines(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(OPERATORS // len(_MEMBERS)):
            x = x.sin()
        return x


@lru_cache(maxsize=8)
def host_costs(device: torch.device) -> HostCosts:
    """Time forward and backward of twenty tiny operators: plain, in one segment, in one segment with a save set.

    The fastest of some repeats counts, so that other work on the machine disturbs little. Replaying the operators is
    not counted: a planner prices that by their own times.
    """
    with torch.random.fork_rng(devices=device_of(device).forked):
        model = nn.Sequential(_Sines(), _Sines()).train()
        x = torch.ones(4, device=device, requires_grad=True)
        forward = _fastest(lambda: model(x), device, nullcontext)
        plain, bare, selective = _step_times(model, x, device)
    return HostCosts(max(0, bare - plain - forward), max(0, selective - bare) // OPERATORS)


def _step_times(model: nn.Module, x: torch.Tensor, device: torch.device) -> Iterator[int]:
    arms: list[Arm] = [
        nullcontext,
        *((lambda s=segment: apply_segments(model, [s])) for segment in (_BARE, _SELECTIVE)),
    ]
    for arm in arms:
        yield _fastest(lambda: model(x).sum().backward(), device, arm)


def _fastest(run: Callable[[], object], device: torch.device, arm: Arm) -> int:
    place = device_of(device)
    times: list[int] = []
    with torch.enable_grad(), arm():
        for _ in range(REPEATS):
            start = place.clock_ns()
            run()
            times.append(place.clock_ns() - start)
    return min(times)
