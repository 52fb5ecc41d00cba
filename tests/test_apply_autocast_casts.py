"""Where autocast casts a weight in forward and not in a replay, or the other way round, kept casts stay in place."""

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from remat.profiler import profile
from torch import nn

from .apply_models import saved, segment

CASTS = "aten._to_copy.default"
SIZE = 16


class Product(nn.Module):
    """A product of an input and a weight of one shape, in either order."""

    def __init__(self, weight_first):
        super().__init__()
        self.weight, self.weight_first = nn.Parameter(torch.randn(SIZE, SIZE) / 4), weight_first

    def forward(self, x):
        return torch.mm(self.weight, x) if self.weight_first else torch.mm(x, self.weight)


class Twice(nn.Module):
    """Calls one product twice, so that the second call finds its weight cast."""

    def __init__(self, weight_first):
        super().__init__()
        self.product, self.act = Product(weight_first), nn.GELU()

    def forward(self, x):
        first = self.act(self.product(x))
        return first.float() + self.act(self.product(x * 2)).float()


class Wide(nn.Module):
    """A projection as GPT-2 has it, whose weight, input and bias are all cast."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 96) / 6), nn.Parameter(torch.randn(96))

    def forward(self, x):
        queries, keys, values = torch.addmm(self.bias, x.reshape(-1, 32), self.weight).chunk(3, -1)
        return torch.mm(torch.mm(queries, keys.transpose(-2, -1)).softmax(-1).to(values.dtype), values).float()


def gradients(model, x, *, inside):
    """Return the gradients of a step, forward in one autocast context and backward in none, the same or another."""
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    with cast:
        loss = model(x).square().sum()
        if inside == "the same":
            loss.backward()
    if inside == "another":
        with cast:
            loss.backward()
            # What a replay leaves in autocast's cache is used by whatever comes next in the context.
            model(x).square().sum().backward()
    elif inside == "none":
        loss.backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    return found


@pytest.mark.parametrize("inside", ["none", "the same", "another"])
@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(
    ("make", "where", "shape"),
    [
        pytest.param(lambda: Twice(True), "product#1", (SIZE, SIZE), id="weight first"),
        pytest.param(lambda: Twice(False), "product#1", (SIZE, SIZE), id="weight last"),
        pytest.param(lambda: nn.Sequential(nn.Tanh(), Wide()), "1", (64, 32), id="wide"),
    ],
)
def test_casts_are_kept_whatever_autocast_has_cast_before(make, where, shape, kept, inside):
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(shape, requires_grad=True)
    expected = gradients(model, x, inside=inside)
    with apply_segments(model, [segment(where, save=saved(CASTS, *kept))]):
        for _ in range(2):
            found = gradients(model, x, inside=inside)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_save_set_does_not_count_casts_of_weights():
    model = nn.Sequential(nn.Tanh(), Wide()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded = profile(model, torch.randn(64, 32), loss=lambda out: out.square().sum(), repeats=1)
    casts = [operator for operator in recorded.operators[: recorded.loss_stop] if operator.operator == CASTS]
    weights = {index for index, storage in enumerate(recorded.storages) if storage.kind == "parameter"}
    assert {operator.counted for operator in casts} == {True, False}
    assert all(operator.counted == weights.isdisjoint(operator.reads) for operator in casts)
