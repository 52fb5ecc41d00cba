"""A plan is run before it is handed out: what the recorder cannot see, the trial finds."""

from __future__ import annotations

import queue
import random
import re

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Plan, plan, verify
from remat.planner.finding.checking import Checker
from remat.planner.finding.planner import Planner
from torch import nn

from .apply_models import segment


class Block(nn.Module):
    """A linear layer and an activation; `twist` gives a factor from somewhere else."""

    def __init__(self, width, twist=None):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        # Not an attribute of its own: a closure is out of sight.
        self.twist = twist

    def forward(self, x):
        h = torch.nn.functional.gelu(self.up(x))
        if self.twist is not None:
            h = h * self.twist()
        return x + self.down(h)


def chain(*twists):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32, twist) for twist in twists)), torch.randn(64, 32)


def mean_square(out):
    return out.square().mean()


def alternating():
    """Give 1, 2, 3, ..., without anything holding the state that Python could look into."""
    count = queue.SimpleQueue()

    def twist():
        count.put(1)
        return float(count.qsize())

    return twist


def least(planner, solver="dp", **options):
    try:
        return planner.plan(1, solver=solver, **options)
    except InfeasibleBudgetError as error:
        return error.plan


def one_twisted():
    """Count calls out of sight; a replay counts on, and computes the same."""
    count = queue.SimpleQueue()

    def twist():
        count.put(1)
        return 1.0

    return twist


class Switch(nn.Module):
    """Its factor depends on how often it was called since the step's start, which is kept out of sight."""

    def __init__(self):
        super().__init__()
        calls = queue.SimpleQueue()

        def start(*_):
            while not calls.empty():
                calls.get()

        def count():
            calls.put(1)
            return float(calls.qsize())

        self.blocks = nn.Sequential(*(Block(32, count if i == 1 else None) for i in range(4)))
        self.start = start

    def forward(self, x):
        self.start()
        return self.blocks(x)


def switch():
    torch.manual_seed(0)
    return Switch(), torch.randn(64, 32)


@pytest.mark.parametrize("solver", ["dp", "ilp", "all"])
def test_a_block_whose_replay_silently_differs_is_found_and_left_out(solver):
    model, x = switch()
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    blind = least(planner, solver, check=False)
    assert not verify(model, x, blind, loss=lambda out: out.square().mean(), repeats=0).exact
    found = least(planner, solver)
    assert found.segments
    assert verify(model, x, found, loss=mean_square, steps=2, repeats=0).exact
    assert any("blocks.1" in note and "computes something else in a replay" in note for note in found.notes)
    assert not any(call.module == "blocks.1" for s in found.segments for part in s.walk() for call in part.members)


CALLS = 0
SEEN = []


def counted():
    global CALLS
    CALLS += 1
    return 1.0


def seen():
    SEEN.append(len(SEEN))
    return 1.0


class Counter:
    calls = 0

    def __init__(self):
        self.own = {"calls": 0}

    @classmethod
    def in_class(cls):
        cls.calls += 1
        return 1.0

    def in_object(self):
        self.own["calls"] += 1
        return 1.0


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("count", "name"),
    [
        (counted, r"the global \S*test_trial\.CALLS"),
        (seen, "SEEN"),
        (Counter.in_class, "calls of"),
        (Counter().in_object, r"own\['calls'\]"),
    ],
    ids=["global", "list", "class", "object"],
)
def test_a_count_that_a_replay_would_raise_again_is_found_and_left_out(count, name, check):
    model, x = chain(None, count, None, None)
    found = least(Planner.of(model, x, loss=mean_square, repeats=0), check=check)
    assert found.segments
    assert not any(call.module == "1" for s in found.segments for part in s.walk() for call in part.members)
    (note,) = (note for note in found.notes if note.startswith("not replayed: 1,"))
    assert re.search(name, note)
    checked = verify(model, x, found, loss=mean_square, steps=2, repeats=0)
    assert checked.exact
    assert checked.left_otherwise == ()
    around = verify(model, x, Plan(segments=(segment("1"),)), loss=mean_square, repeats=0)
    assert not around.exact
    assert re.search(name, around.left_otherwise[0])
    assert "a planned step leaves otherwise: " in str(around)


def test_what_was_found_for_one_budget_holds_for_the_next():
    model, x = switch()
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    least(planner)
    again = planner.plan("85%", solver="dp")
    assert verify(model, x, again, loss=lambda out: out.square().mean(), repeats=0).exact


def test_state_that_moves_on_with_every_call_is_not_blamed_on_a_plan():
    model, x = chain(None, alternating(), None)
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    found = least(planner)
    assert any("does not repeat itself" in note for note in found.notes)


def test_a_planner_that_is_older_than_the_weights_still_compares_bit_for_bit():
    """Weights are trained and random numbers drawn between the profile and the plan."""
    model, x = switch()
    model.blocks[2].down = nn.Sequential(nn.Dropout(0.1), model.blocks[2].down)
    planner = Planner.of(model, x, loss=mean_square, repeats=1)
    torch.rand(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    found = least(planner)
    assert not any("does not repeat itself" in note for note in found.notes)
    assert any("blocks.1" in note and "computes something else in a replay" in note for note in found.notes)
    assert verify(model, x, found, loss=mean_square, repeats=0).exact


def test_a_model_that_replays_exactly_keeps_its_plan():
    model, x = chain(None, one_twisted(), None)
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    assert least(planner, check=True).segments == least(planner, check=False).segments


def test_a_step_that_does_not_fit_is_not_run_and_the_plan_says_so(monkeypatch):
    model, x = chain(None, None, None)
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    monkeypatch.setattr("remat.planner.finding.checking.fits", lambda nbytes, device: False)
    assert any("was not compared" in note for note in least(planner).notes)


def test_the_unmodified_step_is_run_once_for_all_plans(monkeypatch):
    model, x = chain(None, None, None)
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    runs = []
    monkeypatch.setattr(type(planner.session.step), "train", counting(type(planner.session.step).train, runs))
    planner.plan("85%", solver="dp")
    first = len(runs)
    planner.plan("88%", solver="dp")
    assert (first, len(runs)) == (2, 3)


def counting(function, runs):
    def counted(*args):
        runs.append(1)
        return function(*args)

    return counted


def test_without_a_check_no_real_step_is_run(monkeypatch):
    model, x = chain(None, None, None)
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    monkeypatch.setattr(Checker, "check", None)
    assert planner.plan("85%", solver="dp", check=False).segments


def test_a_plan_function_passes_check_on(monkeypatch):
    model, x = chain(None, None, None)
    monkeypatch.setattr(Checker, "check", None)
    assert plan(model, x, "85%", solver="dp", loss=mean_square, check=False).segments


def test_the_trial_leaves_the_model_and_the_random_state_as_they_were():
    model, x = switch()
    planner = Planner.of(model, x, loss=lambda out: out.square().mean(), repeats=0)
    state, before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    python = random.getstate()
    least(planner)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_made_and_run_inside_an_autocast_context_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))).train()
    batch = torch.randn(1024, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = plan(model, batch, "80%", solver="dp", loss=lambda out: out.square().mean())
        assert found.segments
        verified = verify(model, batch, found, loss=lambda out: out.square().mean(), repeats=0)
    assert verified.exact
    assert verified.within_budget


class OwnLoss(nn.Module):
    """A loss with a weight, and a buffer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output):
        self.calls += 1
        return output.square().mean() * self.scale


def test_verify_compares_the_buffers_of_a_loss_as_it_compares_its_gradients():
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), OwnLoss()
    found = verify(model, torch.randn(64, 8), Plan(segments=(segment("0"),)), loss=loss, repeats=0)
    assert found.exact
    assert (found.gradients.compared, found.buffers.compared) == (5, 1)
    assert loss.calls == 0


class Around(torch.optim.Optimizer):
    """A wrapper of an unknown kind."""

    def __init__(self, base):
        self.base = base


def test_an_unknown_wrapper_of_an_optimizer_is_refused_before_anything_runs():
    said, model = [], nn.Linear(8, 8)
    wrapped = Around(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"pass the one inside it \(optimizer=optimizer\.base\)"):
        plan(model, torch.randn(4, 8), "80%", optimizer=wrapped, progress=said.append)
    assert said == []
