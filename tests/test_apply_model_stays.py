"""Applying changes nothing about a model that its user relies on: names, hooks, copies, files, and the way back."""

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref

import pytest
import torch
from remat.planner.applier.apply import apply, apply_segments
from remat.planner.errors import ApplyError, ReplayStateError
from remat.planner.plan import Plan
from torch import nn

from .apply_models import (
    Normed,
    Shared,
    Stack,
    UNet,
    assert_exact,
    assert_same,
    counting,
    make,
    saved,
    segment,
    train_step,
)

BLOCKS = [f"blocks.{i}" for i in range(6)]
PLAN = [
    segment("embed"),
    segment(*BLOCKS[:3], children=(segment(*BLOCKS[:2]),)),
    segment(BLOCKS[3], save=saved("aten.addmm.default", 0), children=(segment(f"{BLOCKS[3]}.feed"),)),
]


def state_of(model):
    return {name: _shallow(module) for name, module in model.named_modules()}


def _shallow(module):
    return {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}


def test_class_names_and_state_dict_stay():
    model, _ = make(Stack)
    kind, keys, modules = type(model), list(model.state_dict()), list(model.named_modules())
    with apply_segments(model, PLAN) as applied:
        assert applied.model is model
        assert type(model) is kind
        assert list(model.state_dict()) == keys
        assert list(model.named_modules()) == modules
        assert inspect.signature(model.forward) == inspect.signature(Stack.forward.__get__(model))
        assert inspect.signature(model.blocks[0].forward) == inspect.signature(model.blocks[5].forward)
        assert model.forward.__self__ is model


def test_what_apply_returned_says_what_it_is():
    model, _ = make(Stack)
    applied = apply_segments(model, PLAN)
    assert repr(applied) == "<Applied: 3 segments on Stack>"
    applied.remove()
    assert repr(applied) == "<Applied: 3 segments on Stack, taken off>"
    with apply_segments(model, PLAN[:1]) as applied:
        assert repr(applied) == "<Applied: 1 segment on Stack>"


def test_removing_brings_every_attribute_back():
    model, x = make(Stack)
    model.blocks[0].register_forward_hook(lambda module, args, output: None)
    before = state_of(model)
    applied = apply_segments(model, PLAN)
    assert state_of(model) != before
    train_step(model, x)
    applied.remove()
    model.zero_grad()
    assert state_of(model) == before
    applied.remove()
    assert_exact(model, x, PLAN)


def test_a_forward_that_another_tool_put_on_an_instance_stays_inside_and_comes_back():
    model, x = make(Stack)
    plain = train_step(model, x)
    block, calls = model.blocks[3], []

    def forward(*args, **kwargs):
        calls.append(1)
        return type(block).forward(block, *args, **kwargs)

    block.forward = forward
    with apply_segments(model, PLAN):
        assert_same(train_step(model, x), plain)
        assert len(calls) == 2
    assert block.__dict__["forward"] is forward


def test_a_forward_put_over_the_planned_one_is_left_alone():
    model, x = make(Stack)
    plain = train_step(model, x)
    applied = apply_segments(model, PLAN)
    planned = model.blocks[3].forward
    model.blocks[3].forward = lambda *args, **kwargs: planned(*args, **kwargs)
    applied.remove()
    with counting({"mix": model.blocks[3].mix}) as calls:
        assert_same(train_step(model, x), plain)
    assert calls == {"mix": 1}


def test_a_backward_may_come_after_removal_where_nothing_is_nested():
    model, x = make(Stack)
    plain = train_step(model, x)
    model.zero_grad()
    torch.manual_seed(5)
    with apply_segments(model, [segment(*BLOCKS[:3]), segment(BLOCKS[3], save=saved("aten.addmm.default", 0))]):
        loss = model(x).square().mean()
    loss.backward()
    assert all(torch.equal(p.grad, plain.gradients[name]) for name, p in model.named_parameters())


def test_a_backward_after_removal_is_refused_where_segments_are_nested():
    model, x = make(Stack)
    with apply_segments(model, PLAN):
        loss = model(x).square().mean()
    with pytest.raises(ReplayStateError, match=r"segment blocks\.3: the plan was removed .* before remove"):
        loss.backward()


def test_hooks_on_a_single_call_fire_once():
    model, x = make(Stack)
    fired = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: fired.append("before"))
    model.blocks[1].register_forward_hook(lambda module, args, output: fired.append("after"))
    model.blocks[1].register_full_backward_hook(lambda module, given, received: fired.append("backward"))
    with apply_segments(model, [segment(BLOCKS[1])]):
        train_step(model, x)
    assert fired == ["before", "after", "backward"]


def test_hooks_that_change_values_act_once_in_each_run_of_their_module():
    model, x = make(Stack)
    for block in model.blocks[:4]:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_pre_hook(lambda m, a, k: (a, {**k, "mask": k["mask"] * 2}), with_kwargs=True)
        block.register_forward_hook(lambda module, args, output: output * 0.5 + args[0])
    assert_exact(model, x, [segment(*BLOCKS[:3]), segment(BLOCKS[3])])
    assert_exact(model, x, [segment(*BLOCKS[:5], children=(segment(*BLOCKS[:2]), segment(BLOCKS[2])))])


@pytest.mark.filterwarnings("ignore:module .* got a forward hook after the plan")
def test_hooks_that_come_after_the_plan_act_as_if_they_had_come_before():
    model, x = make(Stack)
    plain, _ = make(Stack)

    def add_hooks(stack):
        for block in stack.blocks[:4]:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,), prepend=True)
            block.register_forward_hook(lambda module, args, output: output * 0.5 + args[0])

    with apply_segments(model, [segment(*BLOCKS[:3], children=(segment(*BLOCKS[:2]),)), segment(BLOCKS[3])]):
        for stack in (model, plain):
            add_hooks(stack)
        assert_same(train_step(model, x), train_step(plain, x))
    assert [len(block._forward_hooks) for block in model.blocks] == [1, 1, 1, 1, 0, 0]


def test_full_backward_hooks_on_members_of_a_run_fire_once_and_change_nothing():
    model, x = make(Stack)
    fired = []
    for index in range(4):
        model.blocks[index].register_full_backward_hook(lambda module, given, received, i=index: fired.append(i))
        model.blocks[index].register_full_backward_pre_hook(lambda module, given: None)
    plain = train_step(model, x)
    fired.clear()
    with apply_segments(model, [segment(*BLOCKS[:3], children=(segment(*BLOCKS[:2]),))]):
        assert_same(train_step(model, x), plain)
    assert sorted(fired) == [0, 1, 2, 3]


def test_intermediate_outputs_a_user_keeps_are_the_plain_ones():
    model, x = make(Stack)
    kept = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: kept.append(output) if len(kept) < 12 else None)
    torch.manual_seed(1)
    model(x)
    with apply_segments(model, PLAN):
        torch.manual_seed(1)
        model(x)
    assert all(torch.equal(a, b) for a, b in zip(kept[:6], kept[6:], strict=True))


class Options:
    """An object whose class has what can neither be copied nor pickled by itself."""

    @classmethod
    def named(cls, name):
        return name


class WithOptions(Stack):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.options = Options()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _through_file(model),
}


def _through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Stack, PLAN),
        (WithOptions, PLAN),
        (Shared, [segment("block", "block#1"), segment("block#2")]),
        (UNet, [segment("down.0", "down.1", crosses_operators=True)]),
        (Normed, [segment("blocks.0", restored_buffers=("blocks.0.1.running_mean", "blocks.0.1.running_var"))]),
    ],
)
@pytest.mark.filterwarnings("ignore:module .* got a forward hook after the plan")
def test_a_copy_of_a_planned_model_is_a_planned_model_of_its_own(way, kind, plan):
    model, x = make(kind)
    plain = copy.deepcopy(model)
    with apply_segments(model, plan):
        twin = COPIES[way](model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        name = plan[-1].members[0].module
        inner, plain_inner = (
            next(m for m in each.get_submodule(name).modules() if not list(m.children())) for each in (twin, plain)
        )
        with counting({"inner": inner}) as calls:
            found = train_step(twin, x)
        with counting({"inner": plain_inner}) as plain_calls:
            expected = train_step(plain, x)
        assert calls["inner"] > plain_calls["inner"]
        expected.buffers.clear()
        assert_same(found, expected)
    # Removing the plan from the original leaves the copy's.
    with counting({"inner": inner}) as calls:
        train_step(twin, x)
    assert calls["inner"] > plain_calls["inner"]


def test_a_copy_of_a_part_runs_without_the_plan_and_without_the_rest():
    model, x = make(Stack)
    with apply_segments(model, PLAN):
        part = copy.deepcopy(model.blocks[3])
        with counting({"mix": part.mix, "other": model.blocks[3].mix}) as calls:
            part(x).sum().backward()
    assert calls == {"mix": 1, "other": 0}


def test_a_planned_model_is_freed_when_its_user_lets_go():
    model, x = make(Stack)
    apply_segments(model, PLAN)
    train_step(model, x)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_model_cannot_be_planned_twice():
    model, _ = make(Stack)
    with apply_segments(model, PLAN), pytest.raises(ApplyError, match=r"already applied.*remove\(\)"):
        apply_segments(model, PLAN)
    with apply_segments(model, PLAN):
        pass


def test_a_copy_of_a_part_of_a_planned_model_can_be_planned():
    model, _ = make(Stack)
    with apply_segments(model, PLAN):
        part = copy.deepcopy(model.blocks[0])
        x = torch.randn(4, 16)
        plain = train_step(copy.deepcopy(part), x)
        with apply_segments(part, [segment("feed")]):
            assert_same(train_step(part, x), plain)
        assert_same(train_step(part, x), plain)


class Counts:
    """Counts out of the applier's sight, which refuses to replay a module whose attributes have changed."""

    __slots__ = ("by_thread",)

    def __init__(self):
        self.by_thread = {}


class Recorded(nn.Module):
    """Counts its runs by thread."""

    def __init__(self):
        super().__init__()
        self.linear, self.counts = nn.Linear(16, 16), Counts()

    @property
    def runs(self):
        return self.counts.by_thread

    def forward(self, x):
        name = threading.current_thread().name
        self.runs[name] = self.runs.get(name, 0) + 1
        return torch.sin(self.linear(x)).cos()


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Recorded(), Recorded()

    def forward(self, x):
        return self.a(self.b(self.a(self.a(x))))


def test_threads_training_one_model_and_copies_do_not_disturb_one_another():
    plan = [segment("a", "a#1", "b", children=(segment("a#1"),)), segment("a#2")]
    torch.manual_seed(0)
    models = [Calls().train() for _ in range(2)]
    inputs = [torch.randn(4, 16) for _ in range(4)]
    expected = [
        torch.autograd.grad(models[i % 2](x).sum(), list(models[i % 2].parameters())) for i, x in enumerate(inputs)
    ]
    for model in models:
        model.a.runs.clear()
        model.b.runs.clear()
    wrong = []

    def work(i):
        model = models[i % 2]
        for _ in range(30):
            found = torch.autograd.grad(model(inputs[i]).sum(), list(model.parameters()))
            if not all(torch.equal(a, b) for a, b in zip(found, expected[i], strict=True)):
                wrong.append(i)

    handles = [apply_segments(model, plan) for model in models]
    threads = [threading.Thread(target=work, args=(i,), name=str(i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    # Each step: three forwards of a, replays of a, a#1 (in the run and alone) and a#2; once b and its replay.
    assert models[0].a.runs == {"0": 30 * 7, "2": 30 * 7}
    assert models[1].b.runs == {"1": 30 * 2, "3": 30 * 2}
    for handle in handles:
        handle.remove()


def test_apply_compares_the_model_and_puts_the_segments_on():
    model, x = make(Stack)
    with counting({"mix": model.blocks[3].mix}) as calls, apply(model, Plan(segments=tuple(PLAN))):
        train_step(model, x)
    assert calls == {"mix": 2}
