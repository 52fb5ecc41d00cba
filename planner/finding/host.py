"""Measure, once per device, what the host pays for a segment as it is applied, and for keeping operators in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import nn

from ...profiler.devices import Device, device_of
from ...profiler.results import Arm
from ..applier.apply import apply_segments
from ..bridge.host_costs import SWEEP_BYTES, HostCosts, HostCostsByCache
from ..segments import Call, PlannedSegment, SavedOperator

FEW, MANY = 1, 8
"""Operators in each of a segment's two members: what both numbers cost tells the segment's cost from an operator's."""
REPEATS = 10
_MEMBERS = (Call(module="0"), Call(module="1"))
_BARE = PlannedSegment(members=_MEMBERS)
_SELECTIVE = PlannedSegment(members=_MEMBERS, save=(SavedOperator(operator="aten.sin.default", index=0),))


class _Sweep:
    """Drive the host's code out of its caches, and count the time that takes."""

    def __init__(self, place: Device, nbytes: int) -> None:
        self.taken_ns = 0
        self._clock = place.clock_ns
        self._swept = torch.ones(nbytes, dtype=torch.uint8)

    def __call__(self, *_: object) -> None:
        if self._swept.numel():
            start = self._clock()
            self._swept.max()
            self.taken_ns += self._clock() - start


class _Sines(nn.Module):
    """Run tiny operators, each behind a sweep in forward, in replays and in backward."""

    def __init__(self, count: int, sweep: _Sweep) -> None:
        super().__init__()
        self.count, self.sweep = count, sweep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            self.sweep()
            x = x.sin()
            x.register_hook(self.sweep)
        return x


@lru_cache(maxsize=8)
def host_costs(device: torch.device) -> HostCostsByCache:
    """Time forward and backward of a few tiny operators: plain, in one segment, in one segment with a save set.

    The fastest of some repeats counts, so that other work on the machine disturbs little. Replaying the operators is
    not counted: a planner prices that by their own times. A card's operators do not sweep its host's caches.
    """
    with torch.random.fork_rng(devices=device_of(device).forked):
        warm = _costs(device, 0)
        cold = _costs(device, SWEEP_BYTES) if device.type == "cpu" else warm
    return HostCostsByCache(warm=warm, cold=cold)


def _costs(device: torch.device, sweep_bytes: int) -> HostCosts:
    few, many = (_added_ns(device, count, sweep_bytes) for count in (FEW, MANY))
    bare_ns, selective_ns = ((b - a) / (len(_MEMBERS) * (MANY - FEW)) for a, b in zip(few, many, strict=True))
    return HostCosts(
        region_ns=max(0, int(few[0] - len(_MEMBERS) * FEW * bare_ns)),
        saved_ns=max(0, int(bare_ns)),
        selective_ns=max(0, int(selective_ns)),
    )


def _added_ns(device: torch.device, count: int, sweep_bytes: int) -> tuple[int, int]:
    """Return what one segment adds to a step, its replay apart, and what a save set adds to that."""
    place = device_of(device)
    sweep = _Sweep(place, sweep_bytes)
    model = nn.Sequential(_Sines(count, sweep), _Sines(count, sweep)).train()
    x = torch.ones(4, device=device, requires_grad=True)

    def fastest(run: Callable[[], object], arm: Arm) -> int:
        times: list[int] = []
        with torch.enable_grad(), arm():
            for _ in range(REPEATS):
                sweep.taken_ns, start = 0, place.clock_ns()
                run()
                times.append(place.clock_ns() - start - sweep.taken_ns)
        return min(times)

    def step() -> None:
        model(x).sum().backward()

    forward = fastest(lambda: model(x), nullcontext)
    plain = fastest(step, nullcontext)
    bare, selective = (fastest(step, lambda s=segment: apply_segments(model, [s])) for segment in (_BARE, _SELECTIVE))
    return bare - plain - forward, selective - bare
