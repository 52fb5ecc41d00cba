"""Kernels that do not repeat are not blamed on segments; what repeats is compared bit for bit all the same."""

from __future__ import annotations

import random

import pytest
import torch
from remat.planner.finding.checking import Checker
from remat.planner.finding.planner import Planner
from remat.profiler.repeatability import Repeatability
from remat.profiler.results import Results
from torch import nn


def mean_square(out):
    return out.square().mean()


def results(noise=0.0, shift=0.0):
    def value(seed, by=0.0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1000, generator=generator) * (1 + by)

    gradients = {"first": value(1), "second": value(2) + noise * torch.randn(1000) + shift}
    empty = (torch.empty(0), torch.empty(0), 0, 0, 0)
    return Results(loss={"loss": torch.ones(1)}, gradients=gradients, buffers={}, random_states=empty, peak_bytes=0)


def test_what_repeats_is_told_from_what_spreads():
    known = Repeatability(results(1e-6), lambda: results(1e-6))
    assert list(known.spread) == ["gradient of second"]
    assert "1 of 3 values" in known.words()
    assert known.difference(results(1e-6), results(1e-6)) == ""
    assert "second differs by" in known.difference(results(1e-6, shift=1e-3), results(1e-6))


def test_what_repeats_must_be_equal_bit_for_bit():
    known = Repeatability(results(), results)
    assert known.whole
    assert known.words() == ""
    assert "repeats bit for bit" in known.difference(results(shift=1e-7), results())


class Noise(torch.autograd.Function):
    """The identity; now and then its gradient is a bit off, as by atomics in another order."""

    share = 0.25

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        off = NOISE.random() < Noise.share
        return gradient * (1 + 1e-6 * NOISE.random()) if off else gradient


NOISE = random.Random(1)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))

    def forward(self, x):
        return Noise.apply(self.blocks(x))


@pytest.mark.parametrize(("share", "trials"), [(0.25, 8), (1.0, 1)])
def test_right_segments_are_not_blamed_for_noisy_kernels(share, trials, monkeypatch):
    monkeypatch.setattr(Noise, "share", share)
    model, x = Noisy(), torch.randn(256, 32)
    planner = Planner.of(model, x, loss=mean_square, repeats=0)
    segments = planner.plan("85%", solver="dp", check=False).segments
    assert segments
    unchecked = []
    for _ in range(trials):
        checked = Checker().check(planner.session.step, segments, 1)
        assert not checked.faults
        unchecked.append(checked.unchecked)
    assert any("does not repeat itself bit for bit" in words for words in unchecked)
