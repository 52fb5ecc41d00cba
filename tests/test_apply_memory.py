"""What a segment computes dies with it: bytes alive between forward and backward, and after the step."""

import collections
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .apply_models import Passing, Residual, Stack, UNet, make, saved, segment

BLOCKS = [f"blocks.{i}" for i in range(6)]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages that operators made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.seen = 0, 0, weakref.WeakSet()

    def _end(self, size):
        self.alive -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self.seen:
                    self.seen.add(storage)
                    self.alive += storage.nbytes()
                    weakref.finalize(storage, self._end, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return output


def bytes_of(model, x, segments):
    """Return bytes alive after forward, at the peak, and after the step, without the garbage collector's help."""
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = x.detach()
    # The first step of a process leaves garbage of its imports behind.
    with LiveBytes():
        model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live, apply_segments(model, segments):
            torch.manual_seed(0)
            loss = model(x).square().mean()
            held = live.alive
            loss.backward()
            del loss
            return held, live.peak, live.alive
    finally:
        gc.enable()


def wide(kind, *args, **kwargs):
    model, x = make(kind, *args, **kwargs)
    return model, torch.randn(64 * x.shape[0], *x.shape[1:])


def test_a_run_holds_its_input_and_nothing_from_inside():
    model, x = wide(Stack)
    boundary = x.numel() * 4
    plain, plain_peak, rest = bytes_of(model, x, [])
    assert rest == 0
    held, peak, rest = bytes_of(model, x, [segment(*BLOCKS)])
    assert rest == 0
    # The embedding's output, the head's input and output, the mean of one state; masks and scales are small.
    assert held < 4 * boundary < plain / 10
    assert peak < plain_peak


class Loop(nn.Module):
    """A plain loop, or the same with a checkpoint by hand around every so many blocks."""

    size = None

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh()) for _ in range(8)
        )

    def forward(self, x):
        if self.size is None:
            return self.part(x, 0, 8)
        for start in range(0, 8, self.size):
            x = checkpoint(self.part, x, start, start + self.size, use_reentrant=False)
        return x

    def part(self, x, start, end):
        for block in self.blocks[start:end]:
            x = block(x)
        return x


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_segments_hold_what_checkpoints_by_hand_hold_and_peak_where_they_peak(size):
    torch.manual_seed(0)
    model, x = Loop().train(), torch.randn(256, 32)
    model.size = size
    by_hand = bytes_of(model, x, [])
    model.size = None
    ours = bytes_of(model, x, [segment(*[f"blocks.{i + j}" for j in range(size)]) for i in range(0, 8, size)])
    assert ours == by_hand


def test_inner_boundaries_of_nested_segments_are_held_only_during_the_outer_replay():
    model, x = wide(Stack)
    flat, flat_peak, _ = bytes_of(model, x, [segment(*BLOCKS)])
    nested, nested_peak, rest = bytes_of(
        model, x, [segment(*BLOCKS, children=(segment(*BLOCKS[:2]), segment(*BLOCKS[2:4]), segment(BLOCKS[4])))]
    )
    assert (nested, rest) == (flat, 0)
    assert nested_peak < 0.7 * flat_peak


def test_a_save_set_holds_what_it_names():
    model, x = wide(Stack)
    without, _, _ = bytes_of(model, x, [segment(*BLOCKS[:3])])
    kept, _, rest = bytes_of(model, x, [segment(*BLOCKS[:3], save=saved("aten.tanh.default", 0, 2))])
    assert (kept - without, rest) == (2 * x.numel() * 4, 0)


@pytest.mark.parametrize(
    ("kind", "args", "plan"),
    [
        (Residual, (), [segment(*[f"branches.{i}" for i in range(5)], crosses_operators=True)]),
        (UNet, (), [segment("down.0", "down.1", "mid", "grow.0", "up.0", "grow.1", "up.1", crosses_operators=True)]),
        (Passing, ("dataclass",), [segment(*[f"blocks.{i}" for i in range(4)])]),
        (Passing, ("dict",), [segment(*[f"blocks.{i}" for i in range(4)])]),
    ],
)
def test_a_tape_keeps_nothing_alive_that_it_saw(kind, args, plan):
    model, x = wide(kind, *args)
    plain, _, _ = bytes_of(model, x, [])
    held, _, rest = bytes_of(model, x, plan)
    assert rest == 0
    assert held < 0.45 * plain


def test_a_skip_from_outside_a_run_is_held_once():
    model, x = wide(UNet)
    down, _, _ = bytes_of(model, x, [segment("down.0"), segment("down.1"), segment("mid")])
    held, _, rest = bytes_of(
        model,
        x,
        [segment("down.0"), segment("down.1"), segment("mid"), segment("grow.0", "up.0", "grow.1", "up.1")],
    )
    assert rest == 0
    # What goes is the way up; its inputs, the skips and the middle, were held before as inputs and stay.
    skips = x.shape[0] * 4 * (4 * 64 + 8 * 16)
    assert skips < held < 0.6 * down


def test_after_an_exception_nothing_of_the_region_stays_alive():
    model, x = wide(Stack)

    def fail(module, args):
        raise RuntimeError("stop")

    handle = model.blocks[3].register_forward_pre_hook(fail)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live, apply_segments(model, [segment(*BLOCKS)]):
            with pytest.raises(RuntimeError, match="stop"):
                model(x)
            gc.collect()
            assert live.alive == 0
    finally:
        gc.enable()
        handle.remove()


class Wrapped(nn.Module):
    """Returns its tensor in a container that only a pytree registration can take apart, as transformers does."""

    def __init__(self, wrap):
        super().__init__()
        self.feed, self.wrap = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), wrap

    def forward(self, given):
        x = given if isinstance(given, torch.Tensor) else next(iter(given))
        return self.wrap(self.feed(x))


class Pair(NamedTuple):
    state: torch.Tensor
    nothing: None = None


@pytest.mark.parametrize("wrap", [Pair, lambda x: collections.deque([x])], ids=["named tuple", "deque"])
def test_outputs_in_registered_containers_keep_nothing_alive(wrap):
    layers = [Wrapped(wrap), Wrapped(wrap), Wrapped(lambda x: x)]
    model, x = nn.Sequential(*layers).train(), torch.randn(512, 16)
    _, plain_peak, _ = bytes_of(model, x, [])
    _, peak, rest = bytes_of(model, x, [segment("0", "1")])
    assert rest == 0
    assert peak <= plain_peak


MADE, ALIVE = [], []


class Adds(nn.Module):
    def forward(self, x):
        y = x + 1
        MADE.append(weakref.ref(y))
        return y


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


class Ends(nn.Linear):
    def forward(self, x):
        ALIVE.append(MADE[-1]() is not None)
        return super().forward(x)


def test_a_replay_lets_go_of_what_no_later_step_uses():
    MADE.clear()
    ALIVE.clear()
    model = nn.Sequential(Adds(), Doubles(), Ends(4, 4)).train()
    with apply_segments(model, [segment("0", "1", "2")]):
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert ALIVE == [False, False]
