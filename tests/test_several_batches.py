"""What a plan promises for batches of other shapes, and plans that are made for several."""

import warnings

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Plan, PlanError, Planner, apply, plan, price, verify
from remat.profiler import BatchError
from torch import nn

from .apply_models import assert_same, train_step
from .small_step import Block, squares


class Attention(nn.Module):
    """A block whose scores grow with the square of the sequence, as eager attention's do."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.up, self.down = nn.Dropout(0.1), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = self.drop((query @ key.transpose(-2, -1)).softmax(-1))
        x = x + self.out(scores @ value)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Text(nn.Module):
    def __init__(self, width=32, blocks=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.blocks = nn.Sequential(*(Attention(width) for _ in range(blocks)))

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def ids(rows, length):
    return torch.randint(0, 50, (rows, length))


def text():
    torch.manual_seed(0)
    return Text().train()


@pytest.mark.parametrize("solver", ["dp", "dp_nested"])
def test_a_plan_needs_no_more_with_batches_that_are_larger_in_no_dimension(solver):
    model = text()
    made = Planner.of(model, ids(8, 64), loss=squares, repeats=0, optimizer="adamw").plan("60%", solver=solver)
    assert made.segments
    assert any("smaller batches need no more memory" in note for note in made.notes)
    peaks = {
        shape: price(model, ids(*shape), made, loss=squares, repeats=0).predicted_peak_bytes
        for shape in ((8, 64), (8, 63), (7, 64), (3, 33), (1, 1))
    }
    assert peaks.pop((8, 64)) == made.predicted_peak_bytes
    assert max(peaks.values()) < made.predicted_peak_bytes
    found = verify(model, ids(7, 50), made, loss=squares, repeats=0)
    assert found.exact
    assert not found.as_planned
    assert found.measured_peak_bytes < made.predicted_peak_bytes
    assert "other shapes than were planned for" in str(found)


def test_one_plan_fits_with_every_batch_and_says_what_it_adds_with_each():
    model, batches = text(), [ids(32, 16), ids(2, 256), ids(8, 64)]
    made = plan(model, None, "70%", batches=batches, loss=squares, solver="dp", repeats=0)
    assert made.segments
    assert Plan.from_json(made.to_json()) == made
    assert [entry.tensors[0].shape for entry in made.batches] == [(32, 16), (2, 256), (8, 64)]
    assert made.batch == made.batches[1].tensors
    assert made.predicted_peak_bytes == max(entry.predicted_peak_bytes for entry in made.batches) <= made.budget_bytes
    for entry, batch in zip(made.batches, batches, strict=True):
        alone = price(model, batch, made, loss=squares, repeats=0)
        assert entry.predicted_peak_bytes == alone.predicted_peak_bytes
        assert entry.predicted_overhead == alone.predicted_overhead
        assert entry.unplanned_peak_bytes == alone.unplanned_peak_bytes
        assert str(entry) in str(made)
        found = verify(model, batch, made, loss=squares, repeats=0)
        assert found.exact
        assert found.as_planned
        assert found.within_budget
        assert found.predicted_peak_bytes == entry.predicted_peak_bytes
        assert found.measured_peak_bytes == pytest.approx(entry.predicted_peak_bytes, rel=0.01)


class TwoSides(nn.Module):
    """Two stacks, each with an argument of its own: batches bind in one or in the other."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(*(Block() for _ in range(3))) for _ in range(2))

    def forward(self, x, y):
        return torch.cat([self.left(x), self.right(y)])


def sides(left, right):
    return torch.randn(left, 32), torch.randn(right, 32)


def test_where_batches_bind_in_different_parts_what_each_needs_is_put_together():
    torch.manual_seed(0)
    model, batches = TwoSides().train(), [sides(512, 32), sides(32, 480)]
    options = {"loss": squares, "solver": "dp", "repeats": 0}
    first = plan(model, batches[0], "60%", **options)
    assert price(model, batches[1], first, loss=squares, repeats=0).predicted_peak_bytes > first.budget_bytes
    made = plan(model, None, first.budget_bytes, batches=batches, **options)
    assert max(entry.predicted_peak_bytes for entry in made.batches) <= first.budget_bytes
    assert made.status == "feasible"
    assert made.lower_bound_overhead is None
    assert {segment.members[0].module.partition(".")[0] for segment in made.segments} == {"left", "right"}
    for batch in batches:
        assert verify(model, batch, made, loss=squares, repeats=0).exact


class Padding(nn.Module):
    """Runs one more block where the batch has an odd number of rows."""

    def __init__(self):
        super().__init__()
        self.blocks, self.odd = nn.ModuleList([Block() for _ in range(3)]), Block()

    def forward(self, x):
        if len(x) % 2:
            x = self.odd(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_calls_that_not_every_batch_makes_are_left_out_by_name():
    torch.manual_seed(0)
    model, batches = Padding().train(), [torch.randn(511, 32), torch.randn(480, 32)]
    made = plan(model, None, "70%", batches=batches, loss=squares, solver="dp", repeats=0)
    assert made.segments
    assert not any(call.module.startswith("odd") for segment in made.segments for call in segment.members)
    assert any("odd" in note and "is not called with every batch" in note for note in made.notes)
    for batch in batches:
        plain = train_step(model, batch)
        with apply(model, made), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(train_step(model, batch), plain)


def test_a_batch_longer_than_all_those_planned_for_is_told_once_and_others_are_not():
    model = text()
    made = plan(model, None, "70%", batches=[ids(8, 16), ids(2, 64)], loss=squares, solver="dp", repeats=0)
    with apply(model, made), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape in ((8, 16), (2, 64), (8, 7), (1, 64)):
            model(ids(*shape))
        assert not caught
        for shape in ((3, 64), (8, 17), (2, 65)):
            model(ids(*shape))
    assert len(caught) == 1
    assert "of shape [3, 64], larger than planned ([8, 16] or [2, 64])" in str(caught[0].message)


def test_where_nothing_fits_the_batch_that_does_not_is_named():
    with pytest.raises(InfeasibleBudgetError, match=r"with batch 2 \(0 int64 \[8, 64\]\) at the ") as raised:
        plan(text(), None, "1KB", batches=[ids(1, 8), ids(8, 64)], loss=squares, solver="dp", repeats=0)
    assert raised.value.least_peak_bytes == raised.value.plan.predicted_peak_bytes


@pytest.mark.parametrize(
    ("keywords", "kind", "words"),
    [
        ({"batches": []}, BatchError, "batches is empty"),
        ({"batches": ids(2, 8)}, BatchError, "must be a list of batches, got Tensor"),
        ({"batches": [ids(2, 8)], "batch": ids(2, 8)}, BatchError, "batch and batches are both given"),
        ({"batches": [ids(2, 8), ids(2, 8).int()]}, BatchError, r"batches\[1\] is 0 int32 \[2, 8\]"),
        ({"batches": [ids(2, 8)], "race": 3}, PlanError, "race= is about one batch"),
        ({"batches": [ids(2, 8)], "budget": None}, ValueError, "budget is missing"),
    ],
)
def test_batches_that_cannot_be_used_are_told_in_words(keywords, kind, words):
    with pytest.raises(kind, match=words):
        plan(text(), **{"budget": "80%", "loss": squares, "repeats": 0, **keywords})
