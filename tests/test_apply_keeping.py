"""What a save set keeps goes to the call it belongs to, whatever else forward or the replay calls."""

import copy
import warnings

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from torch import nn

from .apply_models import assert_same, saved, segment, train_step

MM = "aten.mm.default"
TABLE = {}


class MakesATable(nn.Module):
    """Three products of one shape, and a fourth one that only the first forward makes, at a place to choose."""

    def __init__(self, place):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(3)])
        self.place = place

    def table(self, place):
        if place == self.place and "table" not in TABLE:
            TABLE["table"] = torch.mm(torch.eye(16), torch.ones(16, 16))

    def forward(self, x):
        for place, weight in enumerate(self.weights):
            self.table(place)
            x = torch.mm(x, weight).tanh()
        self.table(3)
        return x + TABLE["table"]


@pytest.mark.parametrize("names", [["0"], ["0", "1"]], ids=["one call", "a run"])
@pytest.mark.parametrize("kept", [(0,), (1,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_table_made_by_the_first_forward_alone_takes_no_other_calls_place(place, kept, names):
    torch.manual_seed(0)
    model, x = nn.Sequential(MakesATable(place), MakesATable(place)).train(), torch.randn(16, 16)
    TABLE.clear()
    plain = train_step(copy.deepcopy(model), x)
    with apply_segments(model, [segment(*names, save=saved(MM, *kept))]):
        for _ in range(2):
            TABLE.clear()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "segment .*: its replay made other calls of")
                assert_same(train_step(model, x), plain)


def test_what_could_not_be_told_apart_is_told_once_and_not_in_the_first_run():
    torch.manual_seed(0)
    model, x = nn.Sequential(MakesATable(0)).train(), torch.randn(16, 16)
    with apply_segments(model, [segment("0", save=saved(MM, 1))]):
        TABLE.clear()
        train_step(model, x)
        train_step(model, x)
        TABLE.clear()
        with pytest.warns(UserWarning, match=r"segment 0: its replay made other calls of aten\.mm\.default"):
            train_step(model, x)
        TABLE.clear()
        train_step(model, x)


class MovesACall(nn.Module):
    """Makes as many calls whenever it runs, but one of them at another place the first time."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        early = "moved" not in TABLE
        TABLE["moved"] = True
        if early:
            torch.mm(torch.eye(16), torch.ones(16, 16))
        x = torch.mm(x, self.first).tanh()
        x = torch.mm(x, self.second).tanh()
        if not early:
            torch.mm(torch.eye(16), torch.ones(16, 16))
        return x.sin()


@pytest.mark.parametrize("kept", [(1,), (2,), (1, 2)])
def test_a_call_that_a_replay_makes_elsewhere_takes_no_other_calls_place(kept):
    torch.manual_seed(0)
    model, x = nn.Sequential(MovesACall()).train(), torch.randn(16, 16)
    TABLE.clear()
    plain = train_step(copy.deepcopy(model), x)
    TABLE.clear()
    with apply_segments(model, [segment("0", save=saved(MM, *kept))]):
        assert_same(train_step(model, x), plain)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return torch.mm(torch.mm(x, self.first).tanh_(), self.second).sigmoid()


def test_a_kept_output_that_forward_changes_in_place_is_computed_again():
    torch.manual_seed(0)
    model, x = nn.Sequential(InPlace()).train(), torch.randn(16, 16)
    plain = train_step(copy.deepcopy(model), x)
    with apply_segments(model, [segment("0", save=saved(MM, 0, 1))]):
        assert_same(train_step(model, x), plain)


@pytest.mark.parametrize("early_stop", [True, False])
def test_random_states_and_statistics_are_right_where_a_replay_starts_anew(early_stop):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.norm, self.drop = MakesATable(0), nn.BatchNorm1d(16), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.norm(self.drop(self.inside(x))))

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()).train(), torch.randn(16, 16)
    other = copy.deepcopy(model)
    kept = {"save": saved(MM, 0, 2), "early_stop": early_stop}
    inner = segment("0.inside", save=saved(MM, 1))
    TABLE.clear()
    plain = train_step(other, x)
    with apply_segments(model, [segment("0", children=(inner,), **kept), segment("1", **kept)]):
        TABLE.clear()
        assert_same(train_step(model, x), plain)
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs)
