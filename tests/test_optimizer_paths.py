"""An optimizer's dry run takes the path that the real optimizer takes: a loop, foreach or fused."""

from __future__ import annotations

import pytest
import torch
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.internals import FakeTensor, fakes_take_foreach
from remat.profiler.optimizer import optimizer_bytes
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
    _, temporaries = optimizer_bytes(step, make(model.parameters()))
    # Beyond the dry run: a scalar of the loop.
    assert allocated(model, make) == pytest.approx(temporaries, abs=64)


def test_on_a_card_the_default_is_foreach():
    model, step = stack()
    foreach = allocated(model, lambda parameters: torch.optim.AdamW(parameters, foreach=True))
    with fakes_take_foreach("cpu"):
        _, temporaries = optimizer_bytes(step, "adamw")
    assert temporaries == pytest.approx(foreach, abs=64)
    assert temporaries > 3 * optimizer_bytes(step, "adamw")[1]


def test_a_fake_on_a_card_is_taken_for_what_it_stands_for():
    with torch._subclasses.FakeTensorMode():
        parameter = torch.empty(3, device="cuda")
        with fakes_take_foreach():
            assert optimizers._default_to_fused_or_foreach([parameter], differentiable=False) == (False, True)
            assert optimizers._default_to_fused_or_foreach([parameter], False, use_fused=True) == (True, False)
        assert optimizers._default_to_fused_or_foreach([parameter], differentiable=False) == (False, False)
    assert FakeTensor not in optimizers._foreach_supported_types
