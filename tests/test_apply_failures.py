"""What cannot be applied or replayed is refused by name, and no exception leaves anything behind."""

import copy
import types
import warnings

import numpy as np
import pytest
import torch
from remat.planner.applier.apply import apply, apply_segments
from remat.planner.errors import ApplyError, PlanMismatchError, ReplayStateError
from remat.planner.fingerprint import Fingerprint
from remat.planner.plan import Plan
from torch import nn
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .apply_models import Residual, Stack, assert_exact, assert_same, make, saved, segment, train_step

BLOCKS = [f"blocks.{i}" for i in range(6)]


def hooks_in_force():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.fixture(autouse=True)
def clean():
    yield
    assert hooks_in_force() is None
    assert _len_torch_function_stack() == 0
    assert _len_torch_dispatch_stack() == 0


REFUSED = {
    "no such module": ([segment("blocks.9")], r"segment blocks\.9: the model Stack has no module 'blocks\.9'"),
    "twice": ([segment("embed"), segment("embed")], "a call is in two segments"),
    "overlap": ([segment(*BLOCKS[:3]), segment(*BLOCKS[2:4])], "a call is in two segments"),
    "a call twice in a run": ([segment("embed", "embed")], "a call is in two segments"),
    "a member inside another": ([segment("blocks.0", "blocks.0.mix")], "is inside another member"),
    "a child outside": ([segment("blocks.0", children=(segment("blocks.1"),))], "not inside the segment around it"),
    "a child like its parent": ([segment("embed", children=(segment("embed"),))], "same members"),
    "no such operator": ([segment("embed", save=saved("aten.nothing.default", 0))], "aten.nothing.default"),
    "an operator packet": ([segment("embed", save=saved("aten.addmm", 0))], "expected a name like"),
    "no such buffer": ([segment("embed", restored_buffers=("embed.mean",))], "no buffer 'embed.mean'"),
    "a parameter as a buffer": ([segment("embed", restored_buffers=("embed.weight",))], "no buffer 'embed.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_segment_that_cannot_be_applied_is_refused_and_nothing_is_changed(name):
    model, _ = make(Stack)
    segments, message = REFUSED[name]
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    with pytest.raises(ApplyError, match=message):
        apply_segments(model, [segment("head"), *segments])
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before


def test_a_model_with_its_own_checkpointing_on_is_refused():
    model, _ = make(Stack)
    model.blocks[1].gradient_checkpointing = True
    with pytest.raises(ApplyError, match=r"'blocks\.1'.*gradient_checkpointing_disable\(\)"):
        apply_segments(model, [segment("embed")])


def test_another_model_is_refused_with_what_differs():
    model, _ = make(Stack)
    other, _ = make(Stack, depth=5, width=8)
    plan = Plan(segments=(segment("embed"),), fingerprint=Fingerprint.of(model))
    apply(model, plan).remove()
    with pytest.raises(
        PlanMismatchError, match=r"missing parameters: blocks\.5\.norm\.weight.*embed\.weight is \[8, 8\]"
    ):
        apply(other, plan)
    with pytest.raises(PlanMismatchError, match=r"inside this DataParallel: apply it to model\.module"):
        apply(nn.DataParallel(model), plan)


def test_a_wrongly_typed_model_keeps_its_forward():
    other, _ = make(Stack, depth=2)
    plan = Plan(segments=(segment("embed"),), fingerprint=Fingerprint.of(make(Stack)[0]))
    with pytest.raises(PlanMismatchError):
        apply(other, plan)
    assert "forward" not in vars(other.embed)


class FaultError(Exception):
    pass


class Failing(Stack):
    """Raises at a chosen place: before a block, inside it, or after it."""

    fail_at = None

    def forward(self, x):
        x = self.embed(x)
        mask, scale = self.mask * 2, {"value": self.scale.exp()}
        for i, block in enumerate(self.blocks):
            if self.fail_at == ("between", i):
                raise self.fault
            x = block(x, mask=mask, scale=scale)
        return self.head(x)


FAULTS = [FaultError("fault"), KeyboardInterrupt(), GeneratorExit(), StopIteration()]
FAILING_PLAN = [
    segment(*BLOCKS[:4], children=(segment(*BLOCKS[:2]), segment(BLOCKS[2], save=saved("aten.addmm.default", 0)))),
    segment(BLOCKS[4], children=(segment(f"{BLOCKS[4]}.feed"),)),
]
PLACES = [("between", i) for i in range(6)] + [("inside", i) for i in range(5)] + [("hook", i) for i in range(5)]


def _fail(model, place, fault):
    """Make the model raise at a place, from then on."""
    kind, index = place
    model.fail_at, model.fault = place, fault

    def raise_fault(*args):
        raise fault

    if kind == "inside":
        return model.blocks[index].feed[1].register_forward_pre_hook(raise_fault)
    if kind == "hook":
        return model.blocks[index].register_forward_hook(raise_fault)
    return None


@pytest.mark.filterwarnings("ignore:module .* got a forward hook after the plan")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_after_an_exception_in_forward_training_goes_on_as_before(place, fault):
    model, x = make(Failing, depth=6)
    plain = copy.deepcopy(model)
    with apply_segments(model, FAILING_PLAN):
        handle = _fail(model, place, fault)
        with pytest.raises(type(fault)):
            model(x)
        clean_now = hooks_in_force(), _len_torch_function_stack(), _len_torch_dispatch_stack()
        model.fail_at = None
        if handle is not None:
            handle.remove()
        assert clean_now == (None, 0, 0)
        assert_same(train_step(model, x), train_step(plain, x))


@pytest.mark.parametrize("member", [0, 1, 2, 4])
def test_after_an_exception_in_a_replay_training_goes_on_as_before(member):
    model, x = make(Failing, depth=6)
    plain = copy.deepcopy(model)
    armed = []

    def fail(*args):
        if armed:
            raise FaultError("in replay")

    model.blocks[member].feed[1].register_forward_pre_hook(fail)
    with apply_segments(model, FAILING_PLAN):
        loss = model(x).square().mean()
        armed.append(True)
        with pytest.raises(FaultError, match="in replay"):
            loss.backward()
        armed.clear()
        assert hooks_in_force() is None
        assert_same(train_step(model, x), train_step(plain, x))


@pytest.mark.filterwarnings("ignore:module .* got a forward hook after the plan")
def test_an_exception_between_recorded_operators_leaves_nothing_behind():
    model, x = make(Residual)
    plain = copy.deepcopy(model)
    plan = [segment(*[f"branches.{i}" for i in range(4)], crosses_operators=True)]
    with apply_segments(model, plan):
        handle = model.branches[2].register_forward_pre_hook(lambda module, args: torch.zeros(2) + torch.zeros(3))
        with pytest.raises(RuntimeError, match="size of tensor"):
            model(x)
        assert _len_torch_function_stack() == 0
        handle.remove()
        assert_same(train_step(model, x), train_step(plain, x))


class Catching(Stack):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            try:
                x = block(x)
            except FaultError:
                x = x + 1
        return x


@pytest.mark.filterwarnings("ignore:module .* got a forward hook after the plan")
def test_an_exception_that_the_parent_catches_inside_a_run_is_refused():
    model, x = make(Catching)
    plain = copy.deepcopy(model)
    with apply_segments(model, [segment(*BLOCKS[:4])]):
        handle = _fail(model, ("inside", 1), FaultError())
        with pytest.raises(ApplyError, match="a member raised an exception that its parent caught"):
            model(x)
        handle.remove()
        assert_same(train_step(model, x), train_step(plain, x))


class Leaving(Stack):
    """Leaves its loop early, or skips blocks."""

    stop, skip = 6, ()

    def forward(self, x):
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i == self.stop:
                break
            if i not in self.skip:
                x = block(x)
        return self.head(x).sin()


@pytest.mark.parametrize(("stop", "skip"), [(2, ()), (6, (1,)), (6, (3,)), (6, (0,)), (6, (0, 3)), (1, ()), (0, ())])
def test_a_loop_that_takes_another_way_stays_exact(stop, skip):
    model, x = make(Leaving)
    model.stop, model.skip = stop, skip
    children = (segment(*BLOCKS[:2]), segment(BLOCKS[2]))
    assert_exact(model, x, [segment(*BLOCKS[:4], children=children), segment(*BLOCKS[4:])])
    assert_exact(model, x, [segment(*BLOCKS[:4]), segment(BLOCKS[4]), segment(BLOCKS[5])])


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_segment_that_changes_its_input_in_place_is_refused_in_forward():
    model, x = make(InPlace)
    for plan in ([segment("blocks.1")], [segment("blocks.0", "blocks.1")]):
        with apply_segments(model, plan), pytest.raises(ApplyError, match=r"blocks\.[01].*changed in place inside"):
            model(x)
    assert_exact(model, x, [segment("blocks.1.1"), segment("first", "blocks.0")])


class Accumulating(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        total = torch.zeros_like(x)
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            total += x
            x = block(x).relu()
        return x + total


def test_an_in_place_change_of_a_tensor_from_outside_is_refused_in_forward():
    model, x = make(Accumulating)
    plan = [segment("blocks.0", "blocks.1", "blocks.2", crosses_operators=True)]
    with apply_segments(model, plan), pytest.raises(ApplyError, match=r"__iadd__|add_.*from outside the segment"):
        model(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](Double.apply(self.blocks[0](x)))


def test_an_operator_between_members_that_cannot_be_recorded_is_refused_in_forward():
    model, x = make(Custom)
    with (
        apply_segments(model, [segment("blocks.0", "blocks.1", crosses_operators=True)]),
        pytest.raises(ApplyError, match=r"DoubleBackward.*could not be recorded"),
    ):
        model(x)


class Cache:
    def __init__(self):
        self.keys = {}


class Attend(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.linear, self.index = nn.Linear(16, 16), index

    def forward(self, x, cache=None, names=None):
        keys = self.linear(x)
        if cache is not None:
            seen = cache.keys.setdefault(self.index, [])
            seen.append(keys)
            keys = torch.cat(seen, 0)
        if names is not None:
            next(names)
        return torch.tanh(x + keys.mean(0))


class Cached(nn.Module):
    use_cache = True
    names = None

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attend(i) for i in range(3))

    def forward(self, x):
        cache = Cache() if self.use_cache else None
        for block in self.blocks:
            x = block(x, cache=cache, names=self.names)
        return x


@pytest.mark.parametrize("names", [["blocks.1"], ["blocks.0", "blocks.1"]])
def test_a_growing_cache_is_refused_in_forward(names):
    model, x = make(Cached)
    with apply_segments(model, [segment(*names)]), pytest.raises(ApplyError, match=r"\(Cache\).*use_cache=False"):
        model(x)
    model.use_cache = False
    assert_exact(model, x, [segment(*names)])


@pytest.mark.parametrize("names", [["blocks.1"], ["blocks.0", "blocks.1"]])
def test_an_iterator_argument_is_refused_in_forward(names):
    model, x = make(Cached)
    model.use_cache, model.names = False, iter(range(9))
    with apply_segments(model, [segment(*names)]), pytest.raises(ApplyError, match="pass a list instead"):
        model(x)


PLANS = [[segment("blocks.1")], [segment("blocks.0", "blocks.1", children=(segment("blocks.0"),))]]


@pytest.mark.parametrize("plan", PLANS, ids=["one call", "a run"])
def test_an_optimizer_step_between_forward_and_backward_is_refused(plan):
    model, x = make(Stack)
    optimizer = torch.optim.SGD(model.blocks[:2].parameters(), 0.1)
    with apply_segments(model, plan):
        train_step(model, x)
        loss = model(x).sum()
        optimizer.step()
        with pytest.raises(
            ReplayStateError, match=r"segment blocks.*parameter '[\w.]+' was changed in place.*optimizer step"
        ):
            loss.backward()


@pytest.mark.parametrize("plan", PLANS, ids=["one call", "a run"])
def test_weights_of_a_functional_call_that_are_gone_are_noticed(plan):
    model, x = make(Stack)
    weights = {name: p.detach() * 1.1 for name, p in model.named_parameters() if name.startswith("blocks")}
    with apply_segments(model, plan):
        loss = torch.func.functional_call(model, weights, (x,)).sum()
        with pytest.raises(ReplayStateError, match="functional_call"):
            loss.backward()


def test_unfreezing_between_forward_and_backward_is_noticed():
    model, x = make(Stack)
    model.blocks[1].mix.requires_grad_(False)
    with apply_segments(model, PLANS[0]):
        loss = model(x).sum()
        model.blocks[1].mix.requires_grad_(True)
        with pytest.raises(ReplayStateError, match="has requires_grad True, False in forward"):
            loss.backward()


def test_the_mode_default_dtype_and_attention_kernels_of_forward_come_back_for_a_replay():
    model, x = make(Stack)
    plain = copy.deepcopy(model)
    expected = train_step(plain, x)
    with apply_segments(model, [segment(*BLOCKS[:3], children=(segment(BLOCKS[0]),)), segment(BLOCKS[4])]):
        torch.manual_seed(5)
        loss = model(x).square().mean()
        model.eval()
        model.blocks[0].feed.train()
        flags = [module.training for module in model.modules()]
        try:
            torch.set_default_dtype(torch.float64)
            loss.backward()
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(p.grad, expected.gradients[name]) for name, p in model.named_parameters())


class Adjustable(nn.Module):
    """Reads attributes of plain data, a list of them, a configuration's, a buffer and an unregistered tensor."""

    def __init__(self):
        super().__init__()
        self.linear, self.p, self.active = nn.Linear(16, 16), 0.5, ["first"]
        self.config = types.SimpleNamespace(scale=2.0, name="adjustable", rope={"factor": 1.0})
        self.adapters, self.act = {"a": {"factor": 1.0}}, torch.tanh
        self.register_buffer("shift", torch.ones(16))
        self.gain = torch.full((16,), 3.0)

    def forward(self, x):
        y = self.linear(x) * self.p * len(self.active) * self.config.scale * self.config.rope["factor"]
        return self.act(y * self.gain + self.shift) * self.adapters["a"]["factor"]


CHANGES = {
    "p": lambda module: setattr(module, "p", 0.25),
    "active": lambda module: module.active.append("second"),
    "config.scale": lambda module: setattr(module.config, "scale", 4.0),
    "shift": lambda module: module.shift.add_(1),
    "gain": lambda module: setattr(module, "gain", torch.zeros(16)),
    "config.rope": lambda module: module.config.rope.update(factor=2.0),
    "config": lambda module: setattr(module, "config", types.SimpleNamespace(**vars(module.config))),
    "adapters": lambda module: module.adapters["a"].update(factor=2.0),
    "act": lambda module: setattr(module, "act", torch.sin),
}
AGAIN = {
    "shift": lambda module: module.register_buffer("shift", torch.zeros(16)),
    "gain": lambda module: setattr(module, "gain", torch.zeros(16)),
}


@pytest.mark.parametrize("plan", [[segment("0")], [segment("0", "1")]], ids=["one call", "a run"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_two_forwards_and_their_joint_backward_is_noticed(name, plan):
    model, x = nn.Sequential(Adjustable(), Adjustable()).train(), torch.randn(4, 16)
    with apply_segments(model, plan):
        first = model(x).sum()
        CHANGES[name](model[0])
        second = model(x).sum()
        with pytest.raises(ReplayStateError, match=rf"'0\.{name}' (is|was).*Run backward before the change"):
            (first + second).backward()
        model(x).sum().backward()


@pytest.mark.parametrize("name", AGAIN)
def test_a_tensor_that_takes_the_place_of_one_that_is_gone_is_noticed(name):
    model, x = nn.Sequential(Adjustable(), Adjustable()).train(), torch.randn(4, 16)
    with apply_segments(model, [segment("0")]):
        loss = model(x).sum()
        delattr(model[0], name)
        AGAIN[name](model[0])
        with pytest.raises(ReplayStateError, match=rf"'0\.{name}' is"):
            loss.backward()


def test_an_attribute_replaced_by_an_equal_one_is_no_change():
    model, x = nn.Sequential(Adjustable(), Adjustable()).train(), torch.randn(4, 16)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with apply_segments(model, [segment("0", "1")]):
        loss = model(x).sum()
        model[0].p, model[0].active = float("0.5"), ["first"]
        found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_hook_that_comes_after_the_plan_and_would_run_again_is_warned_of_once():
    model, x = make(Stack)
    with apply_segments(model, [segment("blocks.0", "blocks.1"), segment("blocks.2")]):
        model.blocks[2].register_forward_hook(lambda *_: None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_step(model, x)
        model.blocks[0].register_forward_pre_hook(lambda *_: None)
        with pytest.warns(UserWarning, match=r"'blocks\.0' got a forward hook after the plan.*Register hooks before"):
            train_step(model, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_step(model, x)


def test_gradient_checkpointing_switched_on_after_the_plan_is_refused():
    model, x = make(Stack)
    model.gradient_checkpointing = False
    with apply_segments(model, [segment("blocks.0")]):
        train_step(model, x)
        model.gradient_checkpointing = True
        with pytest.raises(ApplyError, match=r"switched on after the plan.*gradient_checkpointing_disable\(\)"):
            model(x)
        model.gradient_checkpointing = False
        train_step(model, x)


def test_copies_for_data_parallel_are_refused():
    model, x = make(Stack)
    with apply_segments(model, [segment("blocks.0")]):
        train_step(model, x)
        with pytest.raises(ApplyError, match="use DistributedDataParallel"):
            model._replicate_for_data_parallel()
    assert "_replicate_for_data_parallel" not in vars(model)
    assert type(model._replicate_for_data_parallel()) is type(model)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), torch.full((), 2.0)

    def forward(self, x):
        return self.linear(x * self.scale)


def test_a_tensor_in_the_place_of_one_that_is_gone_is_not_taken_for_it():
    model = nn.Sequential(Scaled()).train()
    with apply_segments(model, [segment("0")]):
        # What was there when the plan was applied is held for as long as the plan; this is not.
        model[0].scale = torch.full((), 2.5)
        loss = model(torch.randn(2, 4)).sum()
        before = id(model[0].scale)
        for _ in range(100):
            # Objects that are gone soon have others in their place, at the same address.
            model[0].scale = torch.full((), 3.0)
            if id(model[0].scale) == before:
                break
        with pytest.raises(ReplayStateError, match=r"attribute '0\.scale'"):
            loss.backward()


@pytest.mark.parametrize("plan", [[segment("0")], [segment("0", "1")]], ids=["one call", "a run"])
def test_a_hook_or_a_child_that_goes_between_forward_and_backward_is_noticed(plan):
    model, x = nn.Sequential(Adjustable(), Adjustable()).train(), torch.randn(4, 16)
    handle = model[0].linear.register_forward_hook(lambda module, args, output: output * 3)
    with apply_segments(model, plan):
        loss = model(x).sum()
        handle.remove()
        with pytest.raises(ReplayStateError, match="a child or a forward hook of its modules came, went"):
            loss.backward()
        loss = model(x).sum()
        model[0].linear = nn.Linear(16, 16)
        with pytest.raises(ReplayStateError, match="a child or a forward hook of its modules came, went"):
            loss.backward()


class Odd:
    """Cannot be compared."""

    def __eq__(self, other):
        raise RuntimeError

    __hash__ = None


@pytest.mark.parametrize("value", [torch.ones(16), np.ones(16), Odd(), [torch.ones(16)], {"a": Odd()}, None])
def test_an_attribute_may_hold_anything_that_does_not_change(value):
    model, x = nn.Sequential(Adjustable(), Adjustable()).train(), torch.randn(4, 16)
    model[0].other, model[0].gone = None, torch.ones(16)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for kept in ((), saved("aten.addmm.default", 0)):
        with apply_segments(model, [segment("0", "1", save=kept)]):
            model[0].other, model[0].gone = value, None
            found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class DifferentiatesInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x).sigmoid()
        return y + torch.autograd.grad(y.sum(), x, retain_graph=True)[0]


def test_a_backward_inside_a_segments_own_forward_is_refused():
    model = nn.Sequential(DifferentiatesInside()).train()
    with apply_segments(model, [segment("0")]), pytest.raises(ReplayStateError, match="forward was still running"):
        model(torch.randn(2, 4, requires_grad=True))
