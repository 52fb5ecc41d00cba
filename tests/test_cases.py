"""What breaks naive checkpointing, one model of each kind: handled, planned around, or refused with the reason."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque

import numpy as np
import pytest
import torch
from remat.planner import InfeasibleBudgetError, apply, verify
from remat.planner.finding.planner import Planner
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH = 32


def mean_square(out):
    return out.square().mean()


class Chain(nn.Module):
    """Call blocks in turn, with a residual around each."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Plain(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def body(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return self.body(x)


class BatchNormed(Plain):
    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x):
        return self.body(self.norm(x))


def batch_norms():
    return Chain([BatchNormed(None if i == 1 else 0.1) for i in range(4)]), torch.randn(64, WIDTH) + 1


class RunningAverage(Plain):
    """A buffer that forward reads, and then replaces or writes."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = self.body(x / self.scale.clone())
        with torch.no_grad():
            new = 0.9 * self.scale + 0.1 * y.abs().mean(0)
            if self.how == "written":
                self.scale.copy_(new)
            else:
                self.scale = new
            self.steps += 1
        return y


def running_averages_written():
    return Chain([RunningAverage("written") for _ in range(4)]), torch.randn(64, WIDTH)


def running_averages_replaced():
    return Chain([RunningAverage("replaced") for _ in range(4)]), torch.randn(64, WIDTH)


class Noisy(Plain):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "generator":
            self.generator = torch.Generator().manual_seed(7)

    def forward(self, x):
        y = self.body(x)
        if self.kind == "generator":
            return y * torch.rand(y.shape, generator=self.generator)
        if self.kind == "python":
            return y * random.random()
        if self.kind == "numpy":
            return y * float(np.random.rand())
        if self.kind == "depth":
            return y if random.random() < 0.5 else torch.zeros_like(y)
        return F.dropout(y, 0.3)


def private_generators():
    return Chain([Noisy(kind) for kind in ("generator", "dropout") * 2]), torch.randn(64, WIDTH)


def python_random():
    return Chain([Noisy(kind) for kind in ("python", "dropout") * 2]), torch.randn(64, WIDTH)


def numpy_random():
    return Chain([Noisy(kind) for kind in ("numpy", "dropout") * 2]), torch.randn(64, WIDTH)


def stochastic_depth():
    return Chain([Noisy(kind) for kind in ("depth", "dropout") * 2]), torch.randn(64, WIDTH)


class Experts(nn.Module):
    """Top-1 routing that the load so far corrects; a loss term is left in a list."""

    def __init__(self, count=3):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList([Plain() for _ in range(count)])
        self.load, self.terms = None, []

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = (scores if self.load is None else scores - self.load / self.load.sum()).argmax(-1)
        counts = torch.bincount(chosen, minlength=len(self.experts)).float()
        self.load = counts if self.load is None else self.load + counts
        self.terms[:] = [(scores.mean(0) * counts).sum()]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return out


class Routed(Chain):
    def forward(self, x):
        out = super().forward(x)
        return out.square().mean() + sum(block.terms[0] for block in self.blocks)


def experts():
    return Routed([Experts() for _ in range(3)]), torch.randn(64, WIDTH), lambda out: out


class Queue(Plain):
    """Negatives from a queue of past outputs, as in momentum contrast; the pointer is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(128, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        y = self.body(x)
        out = y + (y @ self.queue.clone().t()).softmax(-1) @ self.queue.clone()
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[at : at + len(y)] = y
            self.pointer[0] = (at + len(y)) % len(self.queue)
        return out


def queues():
    return Chain([Queue() for _ in range(3)]), torch.randn(32, WIDTH)


class Adapter(Plain):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.body(x) + self.b(self.a(x))


def frozen_prefix_and_adapters():
    return Chain([*(Plain().requires_grad_(False) for _ in range(2)), *(Adapter() for _ in range(4))]), torch.randn(
        64, WIDTH
    )


def frozen_tail():
    tail = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).requires_grad_(False)
    return nn.Sequential(Chain([Plain() for _ in range(3)]), tail), torch.randn(64, WIDTH)


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        wide = (3, 16, 16, 32)
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2 if a > 3 else 1, 1), nn.GELU(), nn.Conv2d(b, b, 3, 1, 1), nn.GELU())
            for a, b in itertools.pairwise(wide)
        )

    def forward(self, x):
        for level in self.levels:
            x = level(x)
        return x


def pyramid():
    return Pyramid(), torch.randn(2, 3, 24, 24)


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Plain() for _ in range(3)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU()) for _ in range(3)])

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        for up in self.up:
            x = up(torch.cat([x, skips.pop()], -1))
        return x


def skips():
    return Skips(), torch.randn(128, WIDTH)


def leaky_tails():
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(0.1, 0.9)) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(128, WIDTH)


class InPlace(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.how == "view":
            x[:, :8].mul_(0.5)
        else:
            F.relu_(x)
        return self.linear(x)


def in_place_starts():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(InPlace("whole") for _ in range(4))), torch.randn(256, WIDTH)


def in_place_on_a_view():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(InPlace("view") for _ in range(4))), torch.randn(256, WIDTH)


class Cache:
    def __init__(self):
        self.kept = {}


class Attention(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.qkv, self.out, self.mlp = (
            number,
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            Plain(),
        )

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            kept = cache.kept if isinstance(cache, Cache) else cache
            if self.number in kept:
                k, v = torch.cat([kept[self.number][0], k], 1), torch.cat([kept[self.number][1], v], 1)
            kept[self.number] = (k, v)
        x = x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return x + self.mlp(x)


class Cached(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.blocks, self.last = kind, nn.ModuleList([Attention(i) for i in range(3)]), None

    def forward(self, x, use_cache=True):
        cache = self.last = (Cache() if self.kind == "object" else {}) if use_cache else None
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


def cache_objects():
    return Cached("object"), {"x": torch.randn(4, 16, WIDTH), "use_cache": True}


def cache_dicts():
    return Cached("dict"), {"x": torch.randn(4, 16, WIDTH)}


class Tapped(Chain):
    """Hooks keep a hidden tensor of each block, and the loss uses them."""

    def __init__(self):
        super().__init__([Plain() for _ in range(4)])
        self.taps = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, given, out: self.taps.append(out))

    def forward(self, x):
        self.taps.clear()
        out = super().forward(x)
        return out.square().mean() + sum(tap.square().mean() for tap in self.taps)


class Measured(Chain):
    """Keeps in a buffer of each block how large its output was, once the block has run."""

    def __init__(self):
        super().__init__([Plain() for _ in range(4)])
        for block in self.blocks:
            block.register_buffer("size", torch.zeros(()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                block.size.add_(x.detach().square().mean())
        return x


def measured_from_outside():
    return Measured(), torch.randn(64, WIDTH)


def taps():
    return Tapped(), torch.randn(64, WIDTH), lambda out: out


def hooks_that_change_outputs():
    model = Chain([Plain() for _ in range(4)])
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, given, out: out * 1.5)
        block.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    return model, torch.randn(64, WIDTH)


class Counting(Plain):
    """Behaves otherwise in its second call; a list grows with every call."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, deque(maxlen=8)

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.body(x) * (1.0 if self.calls == 1 else 2.0)


def counters():
    return Chain([Counting() if i % 2 else Plain() for i in range(4)]), torch.randn(64, WIDTH)


class Sketch(Plain):
    """A tensor kept as a plain attribute, written in place."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        y = self.body(x) + self.mean
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y


def attribute_tensors():
    return Chain([Sketch() if i % 2 else Plain() for i in range(4)]), torch.randn(64, WIDTH)


OUTSIDE = {"moment": torch.zeros(WIDTH)}


class Outside(Plain):
    """Writes to a tensor that no module holds."""

    def forward(self, x):
        OUTSIDE["moment"].zero_().add_(x.detach().mean(0))
        return self.body(x) + OUTSIDE["moment"]


def tensors_outside_the_model():
    return Chain([Outside() for _ in range(3)]), torch.randn(64, WIDTH)


class Clamped(Plain):
    """Keeps its weights small by writing to them in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return self.body(x)


def parameters_written():
    return Chain([Clamped() if i == 1 else Plain() for i in range(4)]), torch.randn(64, WIDTH)


class Held(Chain):
    """The output is also what the model holds on to."""

    def forward(self, x):
        self.output = super().forward(x)
        return self.output


def outputs_held():
    return Held([Plain() for _ in range(4)]), torch.randn(64, WIDTH)


class Lazy(Plain):
    """Warns, or installs something, in its first call only."""

    def __init__(self):
        super().__init__()
        self.warned = False

    def forward(self, x):
        if not self.warned:
            self.warned = True
        return self.body(x)


def first_calls():
    return Chain([Lazy() for _ in range(4)]), torch.randn(64, WIDTH)


HANDLED = [
    *(batch_norms, running_averages_written, frozen_prefix_and_adapters, frozen_tail, pyramid, skips, in_place_starts),
    *(in_place_on_a_view, leaky_tails, outputs_held, first_calls, measured_from_outside),
]
AROUND = {
    running_averages_replaced: "puts another tensor in place of its buffer scale",
    private_generators: None,
    python_random: "draws from Python's random",
    numpy_random: "draws from numpy.random",
    stochastic_depth: "draws from Python's random",
    experts: "changes its attribute load, terms",
    cache_objects: "changes an object passed to it",
    cache_dicts: "changes an object passed to it",
    taps: "carries forward hooks",
    hooks_that_change_outputs: "carries forward hooks",
    counters: "changes its attribute calls, seen",
    attribute_tensors: "changes its attribute mean",
    tensors_outside_the_model: None,
    parameters_written: None,
    queues: None,
}


@functools.cache
def opened(make):
    """Profile a model; what trains it outside of `plan` and `verify` takes a fresh one by `opened.__wrapped__`."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    OUTSIDE["moment"] = torch.zeros(WIDTH)
    model, batch, *loss = make()
    loss = loss[0] if loss else mean_square
    return Planner.of(model.train(), batch, loss=loss, repeats=0), model, batch, loss


def plans(planner, solver, *, check):
    for budget in ("85%", 1):
        try:
            yield planner.plan(budget, solver=solver, check=check)
        except InfeasibleBudgetError as error:
            yield error.plan


@pytest.mark.parametrize("solver", ["dp_nested", "all"])
@pytest.mark.parametrize("make", [*HANDLED, *AROUND], ids=lambda make: make.__name__)
def test_what_breaks_naive_checkpointing_is_exact_under_a_plan(make, solver):
    planner, model, batch, loss = opened(make)
    for plan in plans(planner, solver, check=False):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found = verify(model, batch, plan, loss=loss, steps=2, repeats=0)
        assert found.repeatable
        assert found.exact, f"{plan}\n{found}"
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("make", HANDLED, ids=lambda make: make.__name__)
def test_what_can_be_handled_is_in_segments(make):
    planner, *_ = opened(make)
    assert not planner.bridge.refusals()
    *_, least = plans(planner, "dp", check=True)
    assert least.predicted_peak_bytes < planner.profile.peak_bytes()


@pytest.mark.parametrize("make", [make for make, reason in AROUND.items() if reason], ids=lambda make: make.__name__)
def test_what_cannot_be_replayed_is_named_with_its_reason(make):
    planner, *_ = opened(make)
    reasons = {f"{item.module}: {item.reason}" for item in planner.bridge.refusals()}
    assert any(reason.startswith("blocks.") and AROUND[make] in reason for reason in reasons), reasons
    with pytest.raises(InfeasibleBudgetError, match=r"Not replayable: blocks\.|keeps \d blocks from being replayed"):
        planner.plan(1, solver="dp", check=False)


@pytest.mark.parametrize("make", [python_random, counters, attribute_tensors, parameters_written, private_generators])
def test_no_segment_holds_a_call_that_cannot_be_replayed(make):
    planner, model, *_ = opened(make)
    bad = [index for index, call in enumerate(planner.profile.calls) if call.module in culprits(model)]
    assert bad
    for candidate in planner.bridge.candidates:
        first, end = planner.bridge.span(candidate.start, candidate.stop)
        assert not any(
            first <= planner.profile.calls[index].start and planner.profile.calls[index].stop <= end for index in bad
        )


def culprits(model):
    kinds = {"python", "numpy", "generator", "depth"}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, (Counting, Sketch, Clamped)) or getattr(module, "kind", None) in kinds
    }


def test_a_cache_holds_as_much_after_a_planned_step_as_after_a_plain_one():
    planner, model, batch, loss = opened.__wrapped__(cache_objects)
    plan = planner.plan("95%", solver="dp")
    with apply(model, plan):
        loss(model(**batch)).backward()
    assert {k.shape[1] for k, _ in model.last.kept.values()} == {16}


def test_taps_are_as_many_after_a_planned_step_as_after_a_plain_one():
    planner, model, batch, loss = opened.__wrapped__(taps)
    for plan in plans(planner, "dp", check=True):
        with apply(model, plan):
            loss(model(batch)).backward()
        assert len(model.taps) == 4


def test_counters_and_lists_end_as_after_a_plain_step():
    for make, state in ((counters, lambda m: m.blocks[1].calls), (experts, lambda m: m.blocks[0].load.sum().item())):
        planner, model, batch, loss = opened.__wrapped__(make)
        for plan in plans(planner, "dp", check=True):
            before = state(model) if make is counters else 0
            with apply(model, plan):
                loss(model(batch)).backward()
            assert state(model) == before + (1 if make is counters else 64)
            if make is experts:
                for block in model.blocks:
                    block.load = None


def test_a_vocabulary_that_sets_the_peak_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), Chain([Plain(16) for _ in range(3)]), nn.Linear(16, 4000))
    ids, labels = torch.randint(0, 64, (128,)), torch.randint(0, 4000, (128,))
    planner = Planner.of(model, ids, loss=lambda out: F.cross_entropy(out, labels), repeats=0)
    with pytest.raises(InfeasibleBudgetError, match=r"the loss.*chunked loss"):
        planner.plan("40%", solver="dp")
