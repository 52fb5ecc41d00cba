"""Wrong calls: each says what, which value, and what to do, and leaves the model as it was."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path

import pytest
import torch
from remat.planner import BudgetError, InfeasibleBudgetError, Plan, PlanFileError, apply, plan, verify
from remat.planner.errors import ApplyError, PlanMismatchError
from remat.planner.finding.planner import Planner
from remat.planner.plan import Call, PlannedSegment
from remat.profiler import BatchError
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8, count=3):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])
        self.norm = nn.BatchNorm1d(width)
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def mean_square(out):
    return out.square().mean()


X = torch.randn(16, 8)
LOSS = {"loss": mean_square}


def opened():
    torch.manual_seed(0)
    return Net().train()


def picture(model):
    """Return all that a wrong call must not change."""
    modules = [
        (
            name,
            module.training,
            sorted(vars(module)),
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
            list(getattr(module, "seen", [])),
        )
        for name, module in model.named_modules()
    ]
    tensors = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    gradients = {name: None if value.grad is None else value.grad.clone() for name, value in model.named_parameters()}
    return modules, tensors, gradients, torch.get_rng_state(), random.getstate()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


UNREADABLE = ("", "lots", "8 XB", "-3GiB", "8GiBs", "1e9", "%", "8 %%", "GiB", "8,5GiB", "0", "0%", "0GiB")
NO_AMOUNTS = (0, -1, -(2**40), 0.5, 1e9, None, True, False, [1], (1,), {"a": 1}, b"8GiB", float("nan"))
BUDGETS = {f"budget {value!r}": (value, "budget") for value in (*UNREADABLE, *NO_AMOUNTS)}
OPTIONS = {
    **{f"headroom {v!r}": ({"headroom": v}, "headroom") for v in (-0.1, 1, 1.0, 2, "5%", None, True, float("nan"))},
    **{f"solver {v!r}": ({"solver": v}, "solver") for v in ("", "DP", "best", None, 3, ["dp"], "gurobi")},
    **{f"time_limit_s {v!r}": ({"time_limit_s": v}, "time_limit_s") for v in (-1, 0, "10", float("nan"), True)},
    **{f"gap {v!r}": ({"gap": v}, "gap") for v in (-0.1, 1.5, "1%", None, float("nan"), True)},
    **{f"optimizer {v!r}": ({"optimizer": v}, "optimizer") for v in ("lion", "", 3, torch.optim.AdamW)},
    **{f"loss {v!r}": ({"loss": v}, "loss") for v in ("mse", 3, X)},
}


def refused(call, kinds, pattern, model):
    before = picture(model)
    with pytest.raises(kinds) as caught:
        call()
    message = str(caught.value)
    assert re.search(pattern, message, re.IGNORECASE), message
    assert "\n" not in message
    assert len(message) > 25
    assert same(before, picture(model))
    return message


@pytest.mark.parametrize("name", BUDGETS)
def test_a_wrong_budget_is_refused(name):
    model = opened()
    value, pattern = BUDGETS[name]
    refused(lambda: plan(model, X, value, **LOSS), BudgetError, pattern, model)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_refused(name):
    model = opened()
    options, pattern = OPTIONS[name]
    refused(lambda: plan(model, X, "60%", **{**LOSS, **options}), (BudgetError, BatchError), pattern, model)


BATCHES = {
    "nothing": None,
    "a number": 3,
    "text": "a batch",
    "an empty tuple": (),
    "an empty mapping": {},
    "a tuple without tensors": (1, "a"),
    "a mapping without tensors": {"x": [1, 2]},
    "a generator": (x for x in ()),
    "a list of lists": [[1.0, 2.0]],
    "a set": {1, 2},
    "a function": mean_square,
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_without_tensors_is_refused(name):
    model = opened()
    refused(lambda: plan(model, BATCHES[name], "60%", **LOSS), BatchError, "batch", model)
    refused(lambda: verify(model, BATCHES[name], Plan(segments=()), **LOSS), BatchError, "batch", model)


LOSSES = {
    "a vector": lambda out: out.mean(0),
    "an empty tensor": lambda out: out[:0].sum(0),
    "nothing": lambda out: None,
    "a number": lambda out: float(out.detach().sum()) if not isinstance(out, torch._subclasses.FakeTensor) else 1.0,
    "a tuple": lambda out: (out.mean(), out.sum()),
    "a mapping": lambda out: {"loss": out.mean()},
    "detached": lambda out: out.detach().mean(),
    "a constant": lambda out: torch.tensor(1.0),
    "an index": lambda out: out.argmax(),
    "text": lambda out: "loss",
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_differentiated_is_refused(name):
    model = opened()
    refused(lambda: plan(model, X, "60%", loss=LOSSES[name]), BatchError, "loss", model)


class Empty(nn.Module):
    def forward(self, x):
        return x


def models():
    yield "text", "a model"
    yield "nothing", None
    yield "a class", Net
    yield "a function", mean_square
    yield "no parameters", Empty()
    yield "all frozen", Net().requires_grad_(False)
    yield "a list", [Net()]
    yield "a state dict", Net().state_dict()


@pytest.mark.parametrize("name", [name for name, _ in models()])
def test_what_cannot_be_trained_is_refused(name):
    subject = dict(models())[name]
    for call in (
        lambda: plan(subject, X, "60%", **LOSS),
        lambda: verify(subject, X, Plan(segments=()), **LOSS),
        lambda: Planner.of(subject, X, **LOSS),
    ):
        with pytest.raises(BatchError, match=r"model|parameter"):
            call()


@pytest.mark.parametrize("name", ["text", "nothing", "a class", "a list"])
def test_applying_to_what_is_no_model_is_refused(name):
    subject = dict(models())[name]
    with pytest.raises((ApplyError, PlanMismatchError, BatchError), match="model"):
        apply(subject, Plan(segments=()))


@pytest.mark.parametrize("wrong", ["plan.json", None, {}, ()])
def test_a_plan_that_is_none_is_refused(wrong):
    model = opened()
    refused(lambda: apply(model, wrong), ApplyError, "plan", model)
    refused(lambda: verify(model, X, wrong, **LOSS), ApplyError, "plan", model)


class UsersOwnError(Exception):
    """A user's own error."""


class Raising(Net):
    def forward(self, x):
        super().forward(x)
        raise UsersOwnError("the user's own")


def test_an_error_of_the_users_forward_comes_through_unchanged():
    model = Raising().train()
    before = picture(model)
    for call in (
        lambda: plan(model, X, "60%", **LOSS),
        lambda: verify(model, X, Plan(segments=()), **LOSS),
        lambda: Planner.of(model, X, **LOSS),
    ):
        with pytest.raises(UsersOwnError, match=r"^the user's own$"):
            call()
        assert same(before, picture(model))


@pytest.mark.parametrize("wrong", [torch.randn(16, 5), torch.randn(3), torch.zeros(16, 8, dtype=torch.long)])
def test_a_batch_of_another_shape_gives_torchs_own_error(wrong):
    model = opened()
    with pytest.raises(RuntimeError) as plain:
        model(wrong)
    model.seen.clear()
    before = picture(model)
    with pytest.raises(RuntimeError) as caught:
        plan(model, wrong, "60%", **LOSS)
    assert str(caught.value) == str(plain.value)
    assert same(before, picture(model))


def test_a_batch_that_forward_does_not_take_is_refused():
    model = opened()
    before = picture(model)
    for wrong in ((X, X), {"y": X}):
        with pytest.raises(BatchError, match="cannot be called with this batch"):
            plan(model, wrong, "60%", **LOSS)
        assert same(before, picture(model))


class DifferentiatesFunctions(nn.Module):
    """Takes a gradient by torch.func, whose transforms have no saved-tensor hooks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        def energy(row):
            return torch.tanh(nn.functional.linear(row, self.linear.weight)).sum()

        return x + torch.func.vmap(torch.func.grad(energy))(x)


class Differentiates(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.linear(x.requires_grad_())).sum()
        (force,) = torch.autograd.grad(y, x, create_graph=True)
        return force


class Checkpoints(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False).sin()


@pytest.mark.parametrize(
    ("make", "batch", "reason"),
    [
        (lambda: torch.jit.script(nn.Linear(8, 8)), X, "torch.jit.script"),
        (lambda: nn.Sequential(nn.Embedding(8, 8, sparse=True)), torch.arange(8), "sparse gradients"),
        (lambda: nn.Sequential(nn.Linear(8, 8, device="meta")), X, "is on meta.*name a card"),
        (lambda: nn.Sequential(nn.LazyLinear(8)), X, "not initialised"),
        (Differentiates, torch.randn(4, 8), "differentiates before its own backward"),
        (DifferentiatesFunctions, torch.randn(4, 8), r"calls torch\.func\.grad .* cannot be planned"),
        (Checkpoints, torch.randn(4, 8), r"checkpoints itself.*model\.gradient_checkpointing_disable\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_recorded_is_refused_by_name(make, batch, reason):
    with pytest.raises(BatchError, match=reason):
        plan(make(), batch, "60%", loss=lambda out: out.square().mean())


@pytest.mark.parametrize("change", ["replace", "prune", "none"])
def test_a_model_changed_after_apply_fails_loudly(change):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)])
    applied = apply(model, Plan(segments=(PlannedSegment(members=(Call(module="1"),)),)))
    if change == "replace":
        model[1][0] = nn.Linear(8, 8)
    elif change == "prune":
        del model[1][0].weight
        model[1][0].weight = torch.ones(8, 8)
    else:
        model[1][1].running_mean = None
    with pytest.raises(ApplyError, match="the plan was applied"):
        model(torch.randn(4, 8))
    applied.remove()


def test_a_plan_made_in_eval_mode_says_so_everywhere():
    model = opened().eval()
    made = plan(model, X, "100%", solver="dp", **LOSS)
    assert made.notes[0].startswith("this plan does nothing in training: it was made in eval mode")
    model.train()
    with pytest.raises(PlanMismatchError, match="made in eval mode"):
        verify(model, X, made, **LOSS)
    with pytest.warns(UserWarning, match="acts in eval mode only"):
        apply(model, made).remove()


SEGMENT = PlannedSegment(members=(Call(module="blocks.0"),))


def test_a_second_plan_is_refused_and_the_first_stays_in_force():
    model = opened()
    applied = apply(model, Plan(segments=(SEGMENT,)))
    refused(lambda: apply(model, Plan(segments=(SEGMENT,))), ApplyError, r"already applied.*remove\(\)", model)
    applied.remove()
    applied.remove()
    assert "forward" not in vars(model.blocks[0])


def test_a_model_of_which_a_part_is_planned_is_not_planned_before_that_is_removed():
    model = opened()
    whole = nn.Sequential(model)
    applied = apply(model, Plan(segments=(SEGMENT,)))
    refused(lambda: plan(whole, X, "1GiB", **LOSS), ApplyError, r"already applied \(module '0'\).*remove\(\)", whole)
    applied.remove()
    plan(whole, X, "1GiB", **LOSS)


def test_a_plan_of_another_model_is_refused():
    model, other = opened(), Net(width=12)
    made, batch = plan(model, X, "100%", solver="none", **LOSS), torch.randn(4, 12)
    for call in (lambda: apply(other, made), lambda: verify(other, batch, made, **LOSS)):
        refused(call, PlanMismatchError, "another model", other)


def test_an_optimizer_of_another_model_is_refused():
    model = opened()
    stranger = torch.optim.AdamW(Net().parameters())
    refused(lambda: plan(model, X, "60%", optimizer=stranger, **LOSS), BatchError, "optimizer", model)


def test_a_budget_below_all_plans_says_what_holds_it():
    model = opened()
    before = picture(model)
    with pytest.raises(InfeasibleBudgetError, match=r"smallest peak found is .* Raise the budget") as caught:
        plan(model, X, "1KB", solver="dp", **LOSS)
    assert caught.value.least_peak_bytes == caught.value.plan.predicted_peak_bytes
    assert same(before, picture(model))
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(model, X, "1KB", solver="dp", headroom=0.1, **LOSS)
    needed = int(re.search(r"Raise the budget to .* \((\d+) bytes\)", str(caught.value))[1])
    assert caught.value.least_peak_bytes <= int(0.9 * needed) <= caught.value.least_peak_bytes + 1
    assert plan(model, X, needed, solver="dp", headroom=0.1, **LOSS).predicted_peak_bytes <= 0.9 * needed


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": -1}, {"repeats": -1}])
def test_verify_refuses_numbers_out_of_range(options):
    model = opened()
    refused(lambda: verify(model, X, Plan(segments=()), **LOSS, **options), BatchError, "steps.*repeats", model)


def corrupted(text, rng):
    """Return a plan file's bytes, damaged in one of many ways."""
    data = bytearray(text.encode())
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)
    if kind == 2:
        start = rng.randrange(len(data))
        del data[start : start + rng.randint(1, 40)]
        return bytes(data)
    if kind == 3:
        start = rng.randrange(len(data))
        data[start:start] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 20)))
        return bytes(data)
    content = json.loads(text)
    place, key = rng.choice(list(places(content)))
    place[key] = rng.choice([None, -1, 2**70, 1.5, "", "x", [], {}, True, [None], {"a": 1}, float("inf")])
    return json.dumps(content).encode()


def places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places(item)


def load(path):
    try:
        return Plan.load(path), ""
    except PlanFileError as error:
        return None, str(error)


def test_a_thousand_damaged_files_are_refused_or_are_plans(tmp_path):
    rng = random.Random(0)
    model = opened()
    nested = PlannedSegment(members=(Call(module="blocks.0"), Call(module="blocks.1")), children=(SEGMENT,))
    text = Plan(segments=(nested,), budget_bytes=10, notes=("a",), versions={"torch": "2"}).to_json()
    path = tmp_path / "plan.json"
    outcomes = {"refused": 0, "plan": 0}
    for _ in range(1000):
        path.write_bytes(corrupted(text, rng))
        read, message = load(path)
        if read is None:
            assert "\n" not in message
            assert str(path) in message
            outcomes["refused"] += 1
            continue
        outcomes["plan"] += 1
        assert Plan.from_json(read.to_json()) == read
        with contextlib.suppress(ApplyError, PlanMismatchError):
            apply(model, read).remove()
        assert "forward" not in vars(model.blocks[0])
    assert outcomes["refused"] > 500


def test_every_error_of_the_library_is_in_the_drawing_of_all_errors():
    import remat.planner.errors

    defined = set()
    for folder in ("package", "planner", "profiler", "solvers"):
        for path in (Path(__file__).parent.parent / folder).rglob("*.py"):
            defined |= set(re.findall(r"^class (?!_)(\w+Error)\(", path.read_text(), re.MULTILINE))
    drawn = set(re.findall(r"\b[A-Z]\w+Error\b", remat.planner.errors.__doc__))
    assert drawn == defined | {"ValueError", "RuntimeError", "ImportError"}
