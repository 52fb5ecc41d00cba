"""What else torch can do with a model, or around one, while it is planned: right, or refused by name."""

import contextvars
import copy
import typing

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from remat.planner.errors import ApplyError
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from .apply_models import Stack, assert_same, make, saved, segment, train_step

PLANS = {
    "a call": [segment("blocks.0")],
    "a run": [segment("blocks.0", "blocks.1")],
    "a save set": [segment("blocks.0", save=saved("aten.addmm.default", 0))],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", PLANS)
def test_a_planned_model_cannot_be_scripted_and_says_why(name):
    model, x = make(Stack)
    plain = train_step(copy.deepcopy(model), x)
    with apply_segments(model, PLANS[name]):
        with pytest.raises(ApplyError, match=r"torch\.jit\.script .* remove\(\) the plan"):
            torch.jit.script(model)
        # Who only asks is answered as before.
        assert typing.get_type_hints(model.forward) == {}
        assert_same(train_step(model, x), plain)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_planned_model_computes_what_the_model_does(name, strict):
    model, x = make(Stack)
    other = copy.deepcopy(model)
    with apply_segments(model, PLANS[name]):
        program = torch.export.export(model, (x,), strict=strict)
    torch.manual_seed(3)
    found = program.module()(x)
    torch.manual_seed(3)
    assert torch.equal(found, other(x))


def test_debugging_checkpoints_is_refused_by_name_with_a_save_set_alone():
    for name, segments in PLANS.items():
        model, x = make(Stack)
        plain = train_step(copy.deepcopy(model), x)
        with apply_segments(model, segments):
            with set_checkpoint_debug_enabled(True):
                if name == "a save set":
                    with pytest.raises(ApplyError, match=r"segment blocks\.0: torch's debug mode.*save_sets=False"):
                        train_step(model, x)
                else:
                    assert_same(train_step(model, x), plain)
            assert_same(train_step(model, x), plain)


@pytest.mark.parametrize("names", [["0"], ["2"], ["0", "1"]])
def test_cached_parametrizations_are_refused_by_name(names):
    torch.manual_seed(0)
    norm = parametrizations.weight_norm
    layers = norm(nn.Linear(16, 16)), norm(nn.Linear(16, 16)), nn.Sequential(norm(nn.Linear(16, 16)), nn.Tanh())
    model, x = nn.Sequential(*layers, nn.Linear(16, 16)).train(), torch.randn(4, 16)
    plain = train_step(copy.deepcopy(model), x)
    with apply_segments(model, [segment(*names)]):
        with parametrize.cached(), pytest.raises(ApplyError, match=r"segment .* parametrize\.cached\(\)"):
            train_step(model, x)
        assert_same(train_step(model, x), plain)
    with apply_segments(model, [segment("3")]), parametrize.cached():
        assert_same(train_step(model, x), plain)


def test_a_parametrized_weight_is_not_computed_to_compare_it():
    made = []

    class Noted(nn.Module):
        def forward(self, weight):
            made.append(1)
            return 2 * weight

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).train(), torch.randn(4, 16)
    parametrize.register_parametrization(model[0], "weight", Noted())
    with apply_segments(model, [segment("0", "1")]):
        made.clear()
        train_step(model, x)
    # Once in forward, once in the replay.
    assert len(made) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", PLANS)
def test_transforms_of_functions_are_refused_by_name(name):
    model, x = make(Stack)
    plain = train_step(copy.deepcopy(model), x)
    weights = dict(model.named_parameters())
    with apply_segments(model, PLANS[name]):
        for transform in (
            lambda: torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).sum())(weights),
            lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
            lambda: torch.func.vmap(model, randomness="different")(x[:, None]),
        ):
            with pytest.raises(ApplyError, match=r"segment .*: transforms of torch\.func .* remove\(\) the plan"):
                transform()
        with torch.no_grad():
            torch.func.vmap(model, randomness="different")(x[:, None])
        assert_same(train_step(model, x), plain)


SCALE = contextvars.ContextVar("SCALE", default=1.0)
CALLS = contextvars.ContextVar("CALLS", default=0)


class Scaled(nn.Module):
    """Reads one context variable and counts in another."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        CALLS.set(CALLS.get() + 1)
        return torch.tanh(self.mix(x) * SCALE.get()).exp()


@pytest.mark.parametrize("names", [["0"], ["0", "1"]])
def test_a_replay_sees_the_context_variables_of_forward_and_leaves_them(names):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Scaled() for _ in range(3))), torch.randn(4, 16)
    other = copy.deepcopy(model)

    def step(one):
        token = SCALE.set(0.5)
        output = one(x).sum()
        SCALE.reset(token)
        before = CALLS.get()
        output.backward()
        assert CALLS.get() == before
        return [parameter.grad for parameter in one.parameters()]

    with apply_segments(model, [segment(*names)]):
        assert all(map(torch.equal, step(model), step(other)))
