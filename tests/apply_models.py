"""Small models for the tests of applying, and the comparison of one training step with and without a plan."""

import copy
import dataclasses
from contextlib import contextmanager

import torch
from remat.planner.applier.apply import apply_segments
from remat.planner.plan import Call, PlannedSegment, SavedOperator
from torch import nn
from torch.nn import functional


def call(name):
    path, _, index = name.partition("#")
    return Call(module=path, index=int(index or 0))


def segment(*names, **options):
    return PlannedSegment(members=tuple(call(name) for name in names), **options)


def saved(operator, *indices):
    return tuple(SavedOperator(operator=operator, index=index) for index in indices)


class Block(nn.Module):
    """Attention-like: keyword mask, dropout, residual."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.2))

    def forward(self, x, mask=None, scale=None):
        h = self.mix(self.norm(x))
        if mask is not None:
            h = h * mask
        if scale is not None:
            h = h * scale["value"]
        return x + self.feed(torch.tanh(x + h))


class Stack(nn.Module):
    """The usual loop over blocks; a trainable mask and one nested in a container travel along as keywords."""

    def __init__(self, depth=6, width=16):
        super().__init__()
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, 4)
        self.mask, self.scale = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x):
        x = self.embed(x)
        mask, scale = self.mask * 2, {"value": self.scale.exp()}
        states = []
        for block in self.blocks:
            x = block(x, mask=mask, scale=scale)
            states.append(x)
        return self.head(x) + states[1].mean()


class Residual(nn.Module):
    """The parent adds, masks without gradients, draws random numbers, and changes a fresh tensor in place."""

    def __init__(self, depth=5, width=16):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])

    def forward(self, x):
        x = self.embed(x)
        for branch in self.branches:
            if torch.rand([]) < 0.0:
                continue
            with torch.no_grad():
                gate = (x > 0).to(x.dtype)
            y = branch(functional.dropout(x, 0.3)) * gate
            y.mul_(1.5)
            y[:, :2] = x[:, 2:4]
            x = x + y
        return x


class UNet(nn.Module):
    def __init__(self, width=4, depth=2):
        super().__init__()
        self.down, self.up, self.grow = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        channels = 3
        for level in range(depth):
            self.down.append(_pair(channels, width * 2**level))
            channels = width * 2**level
        self.mid = _pair(channels, 2 * channels)
        channels *= 2
        for level in reversed(range(depth)):
            out = width * 2**level
            self.grow.append(nn.ConvTranspose2d(channels, out, 2, stride=2))
            self.up.append(_pair(2 * out, out))
            channels = out
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.mid(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x)


def _pair(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1))


class Normed(nn.Module):
    """BatchNorm in every block, one with the cumulative average."""

    def __init__(self, channels=4, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels, momentum=None if i == 1 else 0.1),
                nn.ReLU(),
            )
            for i in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Shared(nn.Module):
    """One block called three times."""

    def __init__(self, width=16):
        super().__init__()
        self.block, self.other = Block(width), Block(width)

    def forward(self, x):
        return self.block(self.other(self.block(self.block(x))))


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    extra: list


class Passer(nn.Module):
    """Takes and returns a container of the given kind."""

    def __init__(self, kind, width=16):
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(width, width)

    def forward(self, state):
        hidden = state.hidden if self.kind == "dataclass" else state["hidden"] if self.kind == "dict" else state[0]
        hidden = torch.sin(self.inner(hidden))
        extra = [hidden.exp()]
        if self.kind == "dataclass":
            return State(hidden, extra)
        return {"hidden": hidden, "extra": extra} if self.kind == "dict" else (hidden, extra)


class Passing(nn.Module):
    """Blocks that hand on dicts, tuples or dataclasses, and a loss that uses more than one part."""

    def __init__(self, kind, depth=4):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Passer(kind) for _ in range(depth)])

    def forward(self, x):
        x = x * 2
        state = {"dataclass": State(x, []), "dict": {"hidden": x, "extra": []}, "tuple": (x, [])}[self.kind]
        for block in self.blocks:
            state = block(state)
        if self.kind == "dataclass":
            return state.hidden + state.extra[0]
        return state["hidden"] + state["extra"][0] if self.kind == "dict" else state[0] + state[1][0]


def make(kind, *args, seed=0, **kwargs):
    """Return a model in training mode and an input that requires gradients."""
    torch.manual_seed(seed)
    model = kind(*args, **kwargs).train()
    shape = (2, 3, 8, 8) if kind in (UNet, Normed) else (4, 16)
    return model, torch.randn(shape, requires_grad=True)


@dataclasses.dataclass
class Step:
    loss: torch.Tensor
    gradients: dict
    buffers: dict
    generator: torch.Tensor


def train_step(model, x, seed=5):
    """Run one forward and backward from a seed."""
    model.zero_grad()
    x.grad = None
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        gradients["input"] = x.grad.clone()
    return Step(loss.detach(), gradients, {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state())


def assert_same(found, expected):
    """Compare two steps bit for bit."""
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    for name, buffer in expected.buffers.items():
        assert torch.equal(found.buffers[name], buffer), name
    assert torch.equal(found.generator, expected.generator)


def assert_exact(model, x, segments, steps=2):
    """Compare steps of the planned model with those of an unplanned copy."""
    plain = copy.deepcopy(model)
    with apply_segments(model, segments):
        for seed in range(steps):
            assert_same(train_step(model, x, seed), train_step(plain, x, seed))


@contextmanager
def counting(modules):
    """Count the calls of modules, forward and replay together, by an inner module's hook."""
    calls = dict.fromkeys(modules, 0)

    def count(name):
        def hook(module, args):
            calls[name] += 1

        return hook

    handles = [module.register_forward_pre_hook(count(name)) for name, module in modules.items()]
    yield calls
    for handle in handles:
        handle.remove()
