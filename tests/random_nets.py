"""Random nets of the ways in which people write modules, the same net again for the same seed."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 16, 256


class Sine(torch.autograd.Function):
    """Save an input and an output."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * x.cos() * (y + 1)


class Reverse(torch.autograd.Function):
    """Save nothing, and hold a number on the context."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.share * gradient, None


def linear(rng):
    return nn.Linear(WIDTH, WIDTH, bias=bool(rng.integers(2)))


def mlp(rng):
    act = [nn.GELU(), nn.ReLU(inplace=True), nn.Tanh(), nn.SiLU(inplace=True), nn.RReLU(), nn.Softmax(-1)]
    layers = [
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        act[rng.integers(len(act))],
        nn.Linear(2 * WIDTH, WIDTH),
    ]
    layers += [nn.Dropout(0.3)] * int(rng.integers(2))
    return nn.Sequential(*layers[int(rng.integers(2)) :])


class Pair(nn.Module):
    """Make two calls side by side, with operators of its own after each."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = linear(rng), linear(rng)

    def forward(self, x, y):
        return torch.tanh(self.a(x)).exp(), torch.tanh(self.b(y * 2)).sin()


class Residual(nn.Module):
    """Begin with operators of its own, or end with them."""

    def __init__(self, rng):
        super().__init__()
        self.leads = bool(rng.integers(2))
        self.norm, self.body = nn.LayerNorm(WIDTH), mlp(rng)

    def forward(self, x, y):
        if self.leads:
            x = torch.tanh(x)
        return self.body(self.norm(x)) + x, y + 1


class Looped(nn.Module):
    """Call the same block several times."""

    def __init__(self, rng):
        super().__init__()
        self.block, self.last = block(rng, depth=1), linear(rng)
        self.times = int(rng.integers(2, 4))

    def forward(self, x, y):
        for _ in range(self.times):
            x, y = self.block(x, y)
        return self.last(x).tanh(), y


class Between(nn.Module):
    """Call custom functions between its children."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = linear(rng), mlp(rng)
        self.reverses = bool(rng.integers(2))

    def forward(self, x, y):
        x = torch.tanh(Sine.apply(self.a(x)))
        if self.reverses:
            y = Reverse.apply(y, 0.5)
        return Sine.apply(self.b(x)), y


class InPlace(nn.Module):
    """Change fresh tensors in place, whole, in part, and through views; and sometimes its own input."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = linear(rng), linear(rng)
        self.kind = int(rng.integers(5))

    def forward(self, x, y):
        if self.kind == 0:
            x = functional.relu_(self.a(x))
        elif self.kind == 1:
            x = self.a(x)
            x[:, :2] = y[:, 2:4]
        elif self.kind == 2:
            x = self.a(x).clone()
            x.view(-1)[:8].mul_(0.5)
        elif self.kind == 3:
            x = self.a(x.mul(1.5).add_(0.1))
        else:
            # The input of the block: legal where nothing before it saved it.
            x = self.a(x + 0).add_(y)
            y = y.clone().add_(1)
        return self.b(x), y


class Noisy(nn.Module):
    """Draw random numbers itself, between children."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = mlp(rng), linear(rng)
        self.kind = int(rng.integers(3))

    def forward(self, x, y):
        x = self.a(x)
        if self.kind == 0:
            x = x + 0.1 * torch.randn_like(x)
        elif self.kind == 1:
            x = functional.dropout(x, 0.2) * torch.bernoulli(torch.full((len(x), 1), 0.9))
        else:
            x = x[torch.randperm(len(x))]
        return self.b(x), y


class Normed(nn.Module):
    """Keep statistics in buffers, one of them by hand."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.norm, self.b = linear(rng), nn.BatchNorm1d(WIDTH), linear(rng)
        self.by_hand = int(rng.integers(3))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=bool(rng.integers(2)))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x, y):
        x = self.norm(self.a(x))
        if self.by_hand and self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count += 1
        if self.by_hand == 2:
            x = x - self.mean
        return torch.tanh(self.b(x)), y


class Counting(nn.Module):
    """Count its calls in Python, or keep what it saw last."""

    def __init__(self, rng):
        super().__init__()
        self.body = mlp(rng)
        self.kind = int(rng.integers(4))
        self.calls, self.last, self.seen = 0, None, []

    def forward(self, x, y):
        if self.kind == 0:
            self.calls += 1
        elif self.kind == 1:
            self.last = x.detach().mean()
        elif self.kind == 2:
            self.seen = [*self.seen[-2:], float(self.calls)]
        else:
            self.calls += 1
            x = x * (1 + 0.01 * self.calls)
        return self.body(x), y


class FirstUse(nn.Module):
    """Make a table when it is first called."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = linear(rng), mlp(rng)
        self.as_buffer = bool(rng.integers(2))
        self.table = None
        if self.as_buffer:
            del self.table
            self.register_buffer("table", None, persistent=False)

    def forward(self, x, y):
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH).cos()
        return self.b(self.a(x) * self.table), y


class Frozen(nn.Module):
    """Have weights that are not trained, shared ones, and a result without gradients."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b, self.c = linear(rng), linear(rng), linear(rng)
        self.kind = int(rng.integers(3))
        if self.kind == 0:
            self.a.requires_grad_(False)
        elif self.kind == 1:
            self.c.weight = self.a.weight

    def forward(self, x, y):
        x = self.b(torch.tanh(self.a(x)))
        target = self.c(x.detach()).argmax(-1) if self.kind == 2 else None
        x = torch.tanh(self.c(x))
        return x if target is None else x * functional.one_hot(target, WIDTH), y


class Passes(nn.Module):
    """Run a part without gradients first, and then with them."""

    def __init__(self, rng):
        super().__init__()
        self.body, self.last = mlp(rng), linear(rng)
        self.context = (torch.no_grad, torch.inference_mode, partial(torch.set_grad_enabled, False))[rng.integers(3)]

    def forward(self, x, y):
        with self.context():
            guess = self.body(x)
        return self.last(self.body(x + guess.clone())), y


class Cast(nn.Module):
    """Enter autocast itself, or leave it."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = mlp(rng), linear(rng)
        self.enabled = bool(rng.integers(2))

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            x = self.a(x.float())
        return self.b(x.float()), y


class Attention(nn.Module):
    """Take keywords, views, and an argument that may be missing."""

    def __init__(self, rng):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), linear(rng)
        self.by_hand, self.drop = bool(rng.integers(2)), 0.1 * int(rng.integers(2))

    def attend(self, x, *, mask=None):
        q, k, v = self.qkv(x).view(4, -1, 3, WIDTH).unbind(2)
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.drop)
        scores = q @ k.transpose(-1, -2) / 4
        if mask is not None:
            scores = scores.masked_fill(mask < 0, float("-inf"))
        return functional.dropout(scores.softmax(-1), self.drop, self.training) @ v

    def forward(self, x, y):
        rows = len(x) // 4
        mask = torch.ones(rows, rows).tril().log() if self.by_hand else None
        return x + self.out(self.attend(x, mask=mask).reshape(-1, WIDTH)), y


class Inner(nn.Module):
    """Take and return containers."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = linear(rng), mlp(rng)

    def forward(self, states, *, scale=1.0, extra=None):
        x = self.b(torch.tanh(self.a(states["x"]))) * scale
        return {"x": x if extra is None else x + extra, "all": [*states["all"], x]}


class Containers(nn.Module):
    """Hand dictionaries and lists from child to child."""

    def __init__(self, rng):
        super().__init__()
        self.parts = nn.ModuleDict({str(number): Inner(rng) for number in range(int(rng.integers(2, 4)))})

    def forward(self, x, y):
        states = {"x": x, "all": []}
        for number, part in enumerate(self.parts.values()):
            states = part(states, scale=0.5, extra=y if number else None)
        return states["x"] + states["all"][0], y


class Skips(nn.Module):
    """Keep what its way down made for its way up."""

    def __init__(self, rng):
        super().__init__()
        self.down = nn.ModuleList([mlp(rng) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x, y):
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        for up in self.up:
            x = torch.tanh(up(torch.cat([x, kept.pop()], -1)))
        return x, y


class Branches(nn.Module):
    """Choose rows, and ways, by what the values are."""

    def __init__(self, rng):
        super().__init__()
        self.experts = nn.ModuleList([mlp(rng) for _ in range(2)])
        self.gate = nn.Linear(WIDTH, 2)
        self.by_rows = bool(rng.integers(2))

    def forward(self, x, y):
        shares = self.gate(x).softmax(-1)
        if not self.by_rows:
            return sum(shares[:, [number]] * expert(x) for number, expert in enumerate(self.experts)), y
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (shares.argmax(-1) == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
        return out + x, y


class Remade(nn.Module):
    """Make weights anew at each call."""

    def __init__(self, rng):
        super().__init__()
        kinds = (
            parametrizations.weight_norm,
            parametrizations.spectral_norm,
            parametrizations.orthogonal,
            _hooked_norm,
        )
        self.a = kinds[rng.integers(len(kinds))](linear(rng))
        self.b = linear(rng)

    def forward(self, x, y):
        return self.b(torch.tanh(self.a(x))), y


def _hooked_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(layer)


class Hooked(nn.Module):
    """Carry hooks on its children: they look, or change what passes, or act on gradients."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = mlp(rng), linear(rng)
        kind, self.on_tensor = int(rng.integers(5)), bool(rng.integers(2))
        if kind == 0:
            self.a.register_forward_hook(_look)
        elif kind == 1:
            self.a[0].register_forward_hook(_scale)
        elif kind == 2:
            self.b.register_forward_pre_hook(_shift)
        elif kind == 3:
            self.a.register_full_backward_hook(_halve)
        else:
            self.b.weight.register_hook(_double)

    def forward(self, x, y):
        x = self.a(x)
        if self.on_tensor and x.requires_grad:
            x.register_hook(_double)
        return self.b(x), y


def _look(module, args, output):
    assert output.isfinite().all()


def _scale(module, args, output):
    return output * 0.5


def _shift(module, args):
    return (args[0] + 0.1,)


def _halve(module, inputs, outputs):
    return tuple(None if gradient is None else gradient / 2 for gradient in inputs)


def _double(gradient):
    return gradient * 2


class Own(nn.Module):
    """Checkpoint a part itself, and call a child's forward without its hooks."""

    def __init__(self, rng):
        super().__init__()
        self.a, self.b = mlp(rng), mlp(rng)
        self.checkpoints = bool(rng.integers(2))

    def forward(self, x, y):
        x = checkpoint(self.a, x, use_reentrant=False) if self.checkpoints else self.a.forward(x)
        return self.b(x), y


class Nothing(nn.Module):
    """Save nothing for backward."""

    def __init__(self, rng):
        super().__init__()
        self.same, self.flat = nn.Identity(), nn.Flatten()

    def forward(self, x, y):
        return self.flat(self.same(x)) + 1, -y


class Swapped(nn.Module):
    """Return its inputs, one of them as it came."""

    def __init__(self, rng):
        super().__init__()
        self.body = mlp(rng)

    def forward(self, x, y):
        return y, self.body(x) + y


class Recurrent(nn.Module):
    """Keep a state from step to step of a loop."""

    def __init__(self, rng):
        super().__init__()
        self.cell, self.out = nn.GRUCell(WIDTH, WIDTH), linear(rng)

    def forward(self, x, y):
        state = y
        for _ in range(2):
            state = self.cell(x, state)
        return self.out(state), state


class Borrowing(nn.Module):
    """Call a module that belongs to another."""

    def __init__(self, rng, lender):
        super().__init__()
        self.own, self.lent = linear(rng), [lender]

    def forward(self, x, y):
        return torch.sin(self.lent[0](torch.tanh(self.own(x)))), y


BLOCKS = (
    *(Pair, Residual, Looped, Between, InPlace, Noisy, Normed, Counting, FirstUse, Frozen, Passes, Cast, Attention),
    *(Containers, Skips, Branches, Remade, Hooked, Own, Nothing, Swapped, Recurrent),
)


def block(rng, depth=0):
    kind = BLOCKS[rng.integers(len(BLOCKS))]
    while depth and kind is Looped:
        kind = BLOCKS[rng.integers(len(BLOCKS))]
    return kind(rng)


class Net(nn.Module):
    """A random run of blocks, looped over in one of several ways."""

    def __init__(self, rng):
        super().__init__()
        self.embed = linear(rng)
        blocks = [block(rng) for _ in range(int(rng.integers(3, 6)))]
        pairs = [one for one in blocks if isinstance(one, Pair)]
        if pairs and rng.integers(2):
            blocks.append(Borrowing(rng, pairs[0].b))
        if rng.integers(4) == 0:
            blocks.append(blocks[0])
        self.blocks = nn.ModuleList(blocks)
        self.way = int(rng.integers(5))

    def forward(self, x, *, scale=None):
        x = self.embed(x)
        x, y = x, x.sin()
        if self.way == 1:
            with torch.no_grad():
                x = x + 0.1 * self.trunk(x, y)[0]
        x, y = self.trunk(x, y)
        x = x if scale is None else x * scale
        return {"out": x, "side": y} if self.way == 2 else (x, y)

    def trunk(self, x, y):
        first = x
        for number, one in enumerate(self.blocks):
            x, y = one(x, y)
            if self.way == 3:
                x = x * 0.5 + first
            elif self.way == 4 and number % 2:
                x = functional.dropout(torch.tanh(x), 0.1, self.training)
        return x, y


@dataclass
class Case:
    """What a step is made of."""

    seed: int
    model: nn.Module
    batch: object
    autocast: bool

    def precision(self):
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()

    def call(self):
        args, kwargs = (self.batch["x"],), {k: v for k, v in self.batch.items() if k != "x"}
        return self.model(*args, **kwargs)


def loss(output):
    values = output.values() if isinstance(output, dict) else output
    return sum(value.float().square().mean() for value in values)


def case(seed):
    """Return the step of a seed, made anew."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = Net(rng).train()
    batch = {"x": torch.randn(ROWS, WIDTH)}
    if rng.integers(3) == 0:
        batch["scale"] = torch.rand(ROWS, 1, requires_grad=bool(rng.integers(2)))
    return Case(seed, model, batch, autocast=rng.integers(5) == 0)
