"""An optimizer's dry run takes the path that the real optimizer takes: a loop, foreach or fused."""

from __future__ import annotations

import pytest
import torch
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.cards import card
from remat.profiler.internals import FakeTensor, fakes_take_foreach
from remat.profiler.optimizer import optimizer_cost
from remat.profiler.step import Step
from torch import nn
from torch.optim import optimizer as optimizers

PATHS = {"default": {}, "a loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def stack():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    return model, Step.of(model, torch.randn(4, 256))


def allocated(model, make):
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    peak = allocated_peak_bytes(optimizer.step, torch.device("cpu"))
    model.zero_grad()
    return peak


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_temporaries_of_every_path_are_those_of_the_allocator(kind, path):
    def make(parameters):
        return kind(parameters, lr=0.001, **PATHS[path])

    model, step = stack()
    temporaries = optimizer_cost(step, make(model.parameters())).temporary_bytes
    # Beyond the dry run: a scalar of the loop.
    assert allocated(model, make) == pytest.approx(temporaries, abs=64)


def test_on_a_card_the_default_is_foreach():
    model, step = stack()
    foreach = allocated(model, lambda parameters: torch.optim.AdamW(parameters, foreach=True))
    found = optimizer_cost(step, "adamw", card=card("h100-80gb"))
    assert found.temporary_bytes == pytest.approx(foreach, abs=64)
    assert found.temporary_bytes > 3 * optimizer_cost(step, "adamw").temporary_bytes


def test_a_fake_on_a_card_is_taken_for_what_it_stands_for():
    with torch._subclasses.FakeTensorMode():
        parameter = torch.empty(3, device="cuda")
        with fakes_take_foreach():
            assert optimizers._default_to_fused_or_foreach([parameter], differentiable=False) == (False, True)
            assert optimizers._default_to_fused_or_foreach([parameter], False, use_fused=True) == (True, False)
        assert optimizers._default_to_fused_or_foreach([parameter], differentiable=False) == (False, False)
    assert FakeTensor not in optimizers._foreach_supported_types


def test_a_cards_step_takes_as_long_as_its_kernels_move_bytes():
    model, step = stack()
    h100 = card("h100-80gb")
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    moved = h100.reached.bandwidth * h100.bandwidth / 1e9
    fused = optimizer_cost(step, torch.optim.AdamW(model.parameters(), fused=True), card=h100)
    # Parameters, gradients and two moments are read and, by its schema, written.
    assert fused.step_ns == pytest.approx(8 * nbytes / moved, rel=0.01)
    assert optimizer_cost(step, "adamw", card=h100).step_ns > 2 * fused.step_ns
    assert optimizer_cost(step, "adamw").step_ns is None
