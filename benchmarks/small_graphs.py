"""Three small steps, and how a recorded step becomes a problem of at most some twenty nodes, each of them a stage.

A node is an operator with the views around it; the cheapest neighbours are merged until few enough are left. What a
node makes that others read, or that backward needs, are the problem's tensors, freed at their last reader. All other
bytes alive beyond the fixed ones (gradients, temporaries, workspace) are extras, the same under every plan.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from remat.planner.bridge.bridge import Bridge
from remat.planner.bridge.host_costs import HostCostsByCache
from remat.profiler import Profile
from remat.profiler.records import StageSpan
from remat.profiler.step_record import Operator as Call
from remat.profiler.step_record import Storage
from remat.solvers import Candidate, Operator, Problem, Stage, Tensor
from torch import nn
from torch.nn import functional as F  # noqa: N812

NEGLIGIBLE = 1e-3
"""Storages below this share of the largest (means, deviations) are left to the extras."""


class TransformerBlock(nn.Module):
    """GPT-2's block, its attention written out so that scores and probabilities are tensors of their own."""

    def __init__(self, width: int = 256, heads: int = 8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Return a sequence of the same shape."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(self.norm1(x)).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        heads = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + self.join(heads)
        return x + self.mlp(self.norm2(x))


class ResidualBlock(nn.Module):
    """ResNet-50's bottleneck with a projection shortcut."""

    def __init__(self, inside: int = 64, width: int = 32, outside: int = 128):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        """Return an image of `outside` channels."""
        return F.relu(self.body(x) + self.shortcut(x))


class SmallUNet(nn.Module):
    """Two levels, one convolution each; the skip tensors wait for the way up."""

    def __init__(self, channels: int = 16):
        super().__init__()
        c = channels
        self.down = nn.ModuleList([_layer(3, c), _layer(c, 2 * c)])
        self.middle = _layer(2 * c, 4 * c)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2), nn.ConvTranspose2d(2 * c, c, 2, stride=2)]
        )
        self.up = nn.ModuleList([_layer(4 * c, 2 * c), _layer(2 * c, c)])
        self.head = nn.Conv2d(c, 4, 1)

    def forward(self, image):
        """Return four channels for every pixel."""
        skips = []
        for down in self.down:
            skips.append(down(image))
            image = F.max_pool2d(skips[-1], 2)
        image = self.middle(image)
        for grow, up in zip(self.grow, self.up, strict=True):
            image = up(torch.cat([grow(image), skips.pop()], 1))
        return self.head(image)


def _layer(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU())


GRAPHS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer block": lambda: (TransformerBlock(), torch.randn(8, 128, 256)),
    "residual block": lambda: (ResidualBlock(), torch.randn(16, 64, 32, 32)),
    "U-Net, 2 levels": lambda: (SmallUNet(), torch.randn(8, 3, 64, 64)),
}


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """Return the loss of all three."""
    return output.square().mean()


def node_problem(profile: Profile, most_nodes: int) -> Problem:
    """State a recorded step as a problem of at most `most_nodes` stages, every interval of them a candidate.

    Neither regions nor save sets cost the host any time here, so only recomputation counts. The budget is 0, to be
    replaced.
    """
    bounds = _bounds(profile, most_nodes)
    largest = max(storage.nbytes for storage in profile.storages if storage.kind == "activation")
    node = [bisect_right(bounds, k) - 1 for k in range(profile.loss_stop)]
    by_fate: dict[tuple, list[Storage]] = defaultdict(list)
    for storage in profile.storages:
        if storage.kind != "activation" or not 0 <= storage.born < profile.loss_stop:
            continue
        holders = tuple(sorted({node[k] for k in storage.saved_by}))
        readers = {node[k] for k in storage.read_by if not profile.operators[k].is_view} | set(holders)
        consumers = tuple(sorted(reader for reader in readers if reader > node[storage.born]))
        if storage.nbytes >= NEGLIGIBLE * largest and (holders or consumers):
            by_fate[node[storage.born], holders, consumers].append(storage)
    tensors = tuple(
        Tensor(
            nbytes=sum(storage.nbytes for storage in storages),
            producer=producer,
            holders=holders,
            consumers=consumers,
            last_alive=max((producer, *consumers)),
        )
        for (producer, holders, consumers), storages in by_fate.items()
    )
    stages = _stages(profile, bounds, [storage for storages in by_fate.values() for storage in storages])
    operators = tuple(
        Operator(
            stage=i,
            forward_ns=stage.forward_ns,
            outputs=tuple(t for t, tensor in enumerate(tensors) if tensor.producer == i),
        )
        for i, stage in enumerate(stages)
    )
    return Problem(
        stages=stages,
        tensors=tensors,
        candidates=_candidates(stages, tensors),
        operators=operators,
        fixed_bytes=profile.fixed_bytes(),
        budget_bytes=0,
        step_ns=profile.step_ns,
    )


def at_module_calls(problem: Problem, profile: Profile, most_nodes: int) -> Problem:
    """Keep of the candidates those that the planner would offer, which begin and end at module calls."""
    spans = tuple(
        StageSpan(name="", call=-1, is_call=False, start=start, stop=stop)
        for start, stop in pairwise(_bounds(profile, most_nodes))
    )
    bridge = Bridge(replace(profile, stages=spans), HostCostsByCache())
    offered = {(candidate.start, candidate.stop) for candidate in bridge.candidates}
    return replace(problem, candidates=tuple(c for c in problem.candidates if (c.start, c.stop) in offered))


def _bounds(profile: Profile, most_nodes: int) -> list[int]:
    """Cut forward and loss into nodes. What makes nothing goes with the next node of its module call, or the last."""
    calls = profile.operators[: profile.loss_stop]
    bounds: list[int] = []
    taken = 0
    for k, call in enumerate(calls):
        if call.output_bytes:
            first = k
            while first > taken and (calls[first - 1].call == call.call or not bounds):
                first -= 1
            bounds.append(first)
            taken = k + 1
    bounds.append(profile.loss_stop)
    while len(bounds) - 1 > most_nodes:
        lightest = min(range(1, len(bounds) - 1), key=lambda i: _time(calls[bounds[i - 1] : bounds[i + 1]]))
        del bounds[lightest]
    return bounds


def _time(calls: tuple[Call, ...]) -> int:
    return sum(call.forward_ns for call in calls)


def _stages(profile: Profile, bounds: list[int], modelled: list[Storage]) -> tuple[Stage, ...]:
    """Leave to the extras what is alive besides the fixed bytes and the modelled storages."""
    others = profile.live_bytes() - profile.fixed_bytes()
    for storage in modelled:
        others[storage.born : len(others) if storage.last is None else storage.last + 1] -= storage.nbytes
    backward: dict[int, list[int]] = defaultdict(list)
    for k in range(profile.loss_stop, len(profile.operators)):
        backward[bisect_right(bounds, profile.operators[k].forward_of) - 1].append(k)
    names = set(map(id, modelled))
    waiting = np.zeros(len(others), dtype=np.int64)  # What each operator finds alive, its own results left out.
    for storage in profile.storages:
        if storage.born >= 0 and id(storage) not in names:
            waiting[storage.born + 1 : len(others) if storage.last is None else storage.last + 1] += storage.nbytes
    stages: list[Stage] = []
    entry = 0  # Where a node has no backward of its own, the next one in order of backward begins with the same.
    for i, (start, stop) in enumerate(pairwise(bounds)):
        entry = int(waiting[min(backward[i])]) if backward[i] else entry
        stages.append(
            Stage(
                name=" ".join(
                    call.operator.split(".")[1] for call in profile.operators[start:stop] if call.output_bytes
                ),
                forward_ns=_time(profile.operators[start:stop]),
                forward_extra_bytes=int(others[start:stop].max()),
                backward_extra_bytes=int(others[backward[i]].max()) if backward[i] else entry,
                entry_extra_bytes=entry,
            )
        )
    return tuple(stages)


def _candidates(stages: tuple[Stage, ...], tensors: tuple[Tensor, ...]) -> tuple[Candidate, ...]:
    """List every interval that saves something; a replay stops where its last saved tensor has been seen."""
    holders = {holder for tensor in tensors for holder in tensor.holders}
    own = {tensor.producer for tensor in tensors if tensor.producer in tensor.holders}
    found: list[Candidate] = []
    for start in range(len(stages)):
        for stop in range(start + 1, len(stages) + 1):
            last = max((holder for holder in holders if start <= holder < stop), default=None)
            if last is not None:
                end = last + (last in own)
                replay_ns = sum(stage.forward_ns for stage in stages[start:end])
                inside = tuple(range(start, end))
                found.append(Candidate(start=start, stop=stop, replay_ns=replay_ns, operators=inside))
    return tuple(found)
