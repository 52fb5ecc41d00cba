"""Plain data in variables of a user's modules decides a replay; what code sets itself does not."""

import copy
import math
import pickle
import types

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from remat.planner.applier.reads import Reads
from remat.planner.errors import ReplayStateError
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from .apply_models import segment

SCALE, COUNT, MEMO, UNREAD = 0.5, 0, {"calls": 0}, 1
OPTIONS = {"scale": 0.5, "seen": []}
PAIR = [0.5, 2.0]
CONFIG = types.SimpleNamespace(scale=0.5, calls=0)


class Defaults:
    scale = 0.5


def helper():
    return SCALE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.factor()

    def factor(self):
        return SCALE


class ByItem(Block):
    def factor(self):
        return OPTIONS["scale"]


class ByPosition(Block):
    def factor(self):
        return PAIR[0]


class ByAttribute(Block):
    def factor(self):
        return CONFIG.scale


class ByClass(Block):
    def factor(self):
        return Defaults.scale


class ByHelper(Block):
    def factor(self):
        return helper()


class ByLambda(Block):
    def factor(self):
        return (lambda: SCALE)()


class Counts(Block):
    def factor(self):
        global COUNT
        COUNT += 1
        return math.pi


class Remembers(Block):
    def factor(self):
        MEMO["calls"] = MEMO["calls"] + 1
        return 1.0


class CountsInAnObject(Block):
    def factor(self):
        CONFIG.calls += 1
        return 1.0


class CountsByName(Block):
    def factor(self):
        globals()["COUNT"] = COUNT + 1
        return 1.0


class Notes(Block):
    def factor(self):
        OPTIONS["seen"].append(1)
        return 1.0


BARE = (lambda patch: patch.setitem(globals(), "SCALE", 0.0), "'SCALE'")
CHANGES = {
    Block: BARE,
    ByItem: (lambda patch: patch.setitem(OPTIONS, "scale", 0.0), r"OPTIONS\['scale'\]"),
    ByPosition: (lambda patch: patch.setitem(globals(), "PAIR", [0.0, 2.0]), r"'PAIR\[0\]'"),
    ByAttribute: (lambda patch: patch.setattr(CONFIG, "scale", 0.0), r"'CONFIG\.scale'"),
    ByClass: (lambda patch: patch.setattr(Defaults, "scale", 0.0), r"'Defaults\.scale'"),
    ByHelper: BARE,
    ByLambda: BARE,
}


def planned(kind, count=3):
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(count)])
    return model, torch.randn(4, 8)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_variable_that_changes_between_forward_and_backward_is_refused_by_name(kind, monkeypatch):
    model, x = planned(kind)
    change, name = CHANGES[kind]
    with apply_segments(model, [segment("0"), segment("1", "2")]):
        model(x).sum().backward()
        loss = model(x).sum()
        change(monkeypatch)
        with pytest.raises(
            ReplayStateError, match=f"{name}.* of module .*test_apply_variables.* is 0.0, 0.5 in forward"
        ):
            loss.backward()
        model.zero_grad()
        model(x).sum().backward()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_variable_may_change_between_steps(kind, monkeypatch):
    model, x = planned(kind)
    twin = copy.deepcopy(model)
    with apply_segments(model, [segment("0"), segment("1", "2")]):
        model(x).sum().backward()
        CHANGES[kind][0](monkeypatch)
        model.zero_grad()
        model(x).sum().backward()
    twin(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Counts, Remembers, CountsInAnObject, CountsByName, Notes])
def test_what_a_forward_sets_itself_is_no_change(kind):
    model, x = planned(kind)
    with apply_segments(model, [segment("0"), segment("1", "2")]):
        first, second = model(x).sum(), model(x).sum()
        (first + second).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_variable_that_the_forward_does_not_read_may_change(monkeypatch):
    model, x = planned(Block)
    with apply_segments(model, [segment("0")]):
        loss = model(x).sum()
        monkeypatch.setitem(globals(), "UNREAD", 2)
        loss.backward()


def test_variables_of_installed_packages_are_not_watched():
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, use_cache=False)
    assert Reads.of([Block()]).variables.words() == [f"variable 'SCALE' of module {__name__!r}"]
    assert not Reads.of(GPT2LMHeadModel(config).modules()).variables


def test_a_copy_and_an_unpickled_planned_model_watch_variables_too(monkeypatch):
    model, x = planned(Block)
    with apply_segments(model, [segment("0")]):
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in others:
        other(x).sum().backward()
        loss = other(x).sum()
        monkeypatch.setitem(globals(), "SCALE", 0.0)
        with pytest.raises(ReplayStateError, match="'SCALE'"):
            loss.backward()
        monkeypatch.undo()


def test_a_variable_of_a_function_around_the_code_is_watched_too():
    scale, options, count = 0.5, {"scale": 0.5}, 0

    class Enclosed(Block):
        def factor(self):
            nonlocal count
            count += 1
            return scale

    class EnclosedItem(Block):
        def factor(self):
            return (lambda: options["scale"])()

    def rebind():
        nonlocal scale
        scale = 0.0

    changes = {
        Enclosed: (rebind, "'scale' of a function in module"),
        EnclosedItem: (lambda: options.update(scale=0.0), r"options\['scale'\].* of a function in module"),
    }
    for kind, (change, name) in changes.items():
        model, x = planned(kind)
        with apply_segments(model, [segment("0"), segment("1", "2")]):
            other = copy.deepcopy(model)
            losses = model(x).sum(), other(x).sum()
            change()
            for loss in losses:
                with pytest.raises(ReplayStateError, match=f"{name} .* is 0.0, 0.5 in forward"):
                    loss.backward()
            model.zero_grad()
            model(x).sum().backward()
    assert count


def test_a_planned_model_that_reads_what_a_function_encloses_can_be_pickled():
    model, x = planned(Block)
    model[0].factor = types.MethodType(by_closure(0.5), model[0])
    watched = Reads.of([model[0]]).variables
    mine = f"variable 'scale' of a function in module {__name__!r}"
    assert mine in watched.words()
    assert pickle.loads(pickle.dumps(watched)).words() == [words for words in watched.words() if words != mine]
    with apply_segments(model, [segment("0")]):
        model(x).sum().backward()


def by_closure(scale):
    return lambda self: scale
