"""A planned model trains bit for bit as an unplanned one: loss, gradients, buffers, random numbers."""

import dataclasses

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .apply_models import (
    Normed,
    Passing,
    Residual,
    Shared,
    Stack,
    UNet,
    assert_exact,
    assert_same,
    call,
    counting,
    make,
    saved,
    segment,
    train_step,
)

BLOCKS = [f"blocks.{i}" for i in range(6)]
KEPT = saved("aten.addmm.default", 0, 2)
STACK_PLANS = {
    "every block": [segment(b) for b in BLOCKS],
    "two runs of two": [segment(*BLOCKS[:2]), segment(*BLOCKS[3:5])],
    "a run of four": [segment(*BLOCKS[1:5])],
    "all in one run": [segment(*BLOCKS)],
    "the root": [segment("")],
    "modules inside blocks": [segment(f"{b}.feed") for b in BLOCKS] + [segment(f"{b}.norm") for b in BLOCKS],
    "blocks inside a run": [segment(*BLOCKS[:4], children=tuple(segment(b) for b in BLOCKS[:3]))],
    "a run inside a run": [segment(*BLOCKS, children=(segment(*BLOCKS[:2]), segment(*BLOCKS[2:5])))],
    "three deep": [
        segment(*BLOCKS, children=(segment(*BLOCKS[:4], children=(segment(*BLOCKS[:2]), segment(BLOCKS[2]))),))
    ],
    "parts inside a block inside a run": [
        segment(*BLOCKS[:3], children=(segment(BLOCKS[0], children=(segment(f"{BLOCKS[0]}.feed.0"),)),))
    ],
    "a run inside a block": [segment("blocks.0", children=(segment("blocks.0.norm", "blocks.0.mix"),))],
    "a run inside the root": [segment("", children=(segment(*BLOCKS[:3]),))],
    "save sets on blocks": [segment(b, save=KEPT) for b in BLOCKS],
    "a save set on a run": [
        segment(*BLOCKS[:3], save=saved("aten.addmm.default", 1, 5) + saved("aten.tanh.default", 1))
    ],
    "save sets inside a run": [segment(*BLOCKS[:3], children=(segment(BLOCKS[0], save=KEPT),))],
    "a save set around a block": [segment(*BLOCKS[:3], save=KEPT, children=(segment(BLOCKS[0]),))],
    "save sets at both levels": [segment(*BLOCKS[:3], save=KEPT, children=(segment(BLOCKS[0], save=KEPT),))],
    "no early stop": [segment(*BLOCKS[:3], early_stop=False, children=(segment(BLOCKS[0], early_stop=False),))],
}


@pytest.mark.parametrize("name", STACK_PLANS)
def test_a_planned_stack_trains_as_without_a_plan(name):
    model, x = make(Stack)
    assert_exact(model, x, STACK_PLANS[name])


def test_a_plan_with_everything_in_one_model_trains_as_without_a_plan():
    model, x = make(Stack)
    plan = [
        segment("embed"),
        segment(*BLOCKS[:2], children=(segment(BLOCKS[0], save=KEPT),)),
        segment(BLOCKS[2], children=(segment(f"{BLOCKS[2]}.feed"),)),
        segment(*BLOCKS[3:], save=KEPT),
        segment("head"),
    ]
    assert_exact(model, x, plan, steps=3)


UNET_PLANS = {
    "single calls": [segment("down.0"), segment("mid"), segment("up.1")],
    "down": [segment("down.0", "down.1", crosses_operators=True)],
    "up": [segment("grow.0", "up.0", "grow.1", "up.1", crosses_operators=True)],
    "mid to up": [segment("down.1", "mid", "grow.0", "up.0", crosses_operators=True)],
    "nested": [
        segment(
            *("down.0", "down.1", "mid", "grow.0", "up.0", "grow.1", "up.1"),
            crosses_operators=True,
            children=(
                segment("down.0", "down.1", crosses_operators=True),
                segment("mid"),
                segment("grow.0", "up.0", crosses_operators=True),
            ),
        )
    ],
    "with a save set": [
        segment("grow.0", "up.0", "grow.1", crosses_operators=True, save=saved("aten.cat.default", 0)),
        segment("down.0", "down.1", crosses_operators=True, save=saved("aten.max_pool2d_with_indices.default", 0)),
    ],
}


@pytest.mark.parametrize("name", UNET_PLANS)
def test_a_u_net_with_operators_between_members_trains_as_without_a_plan(name):
    model, x = make(UNet)
    assert_exact(model, x, UNET_PLANS[name])


@pytest.mark.parametrize("nested", [False, True])
def test_a_residual_loop_with_random_and_in_place_operators_trains_as_without_a_plan(nested):
    model, x = make(Residual)
    names = [f"branches.{i}" for i in range(5)]
    children = (segment(*names[:2], crosses_operators=True), segment(names[2])) if nested else ()
    assert_exact(model, x, [segment(*names[:4], crosses_operators=True, children=children)])


def test_operators_between_members_are_recorded_even_where_the_plan_expected_none():
    model, x = make(Residual)
    assert_exact(model, x, [segment(*[f"branches.{i}" for i in range(4)])])


def _statistics(*indices):
    return tuple(f"blocks.{i}.1.{n}" for i in indices for n in ("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.parametrize(
    "plan",
    [
        [segment(f"blocks.{i}", restored_buffers=_statistics(i)) for i in range(4)],
        [segment("blocks.0", "blocks.1", "blocks.2", restored_buffers=_statistics(0, 1, 2))],
        [
            segment(
                "blocks.0",
                "blocks.1",
                "blocks.2",
                restored_buffers=_statistics(0, 1, 2),
                children=(segment("blocks.0", restored_buffers=_statistics(0)),),
                save=saved("aten.clone.default", 0) + saved("aten.convolution.default", 1),
            )
        ],
    ],
)
def test_batch_norm_statistics_advance_once_and_by_the_same_tensors(plan):
    model, x = make(Normed)
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    assert_exact(model, x, plan)
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    assert int(model.blocks[1][1].num_batches_tracked) == 2


def test_a_batch_norm_that_was_frozen_at_planning_advances_once_when_it_resumes():
    model, x = make(Normed)
    with apply_segments(model, [segment("blocks.0", early_stop=False)]):
        train_step(model, x)
    assert int(model.blocks[0][1].num_batches_tracked) == 1


def test_an_attribute_of_a_dataclass_argument_that_is_no_field_reaches_the_replay():
    @dataclasses.dataclass
    class Options:
        scale: float = 1.0

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x, options):
            return torch.sin(self.linear(x)) * getattr(options, "extra", options.scale)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Scaled()

        def forward(self, x):
            options = Options()
            options.extra = 3.0
            return torch.sin(self.block(x, options))

    torch.manual_seed(0)
    assert_exact(Net().train(), torch.randn(8, 16, requires_grad=True), [segment("block")])


# torch's own context manager warns where there is no Intel GPU.
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_a_backend_setting_in_force_in_forward_is_in_force_in_the_replay():
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            seen.append(torch.backends.mkldnn.enabled)
            return torch.sin(self.linear(x))

    model = nn.Sequential(Looks()).train()
    with apply_segments(model, [segment("0")]):
        with torch.backends.mkldnn.flags(enabled=False):
            loss = model(torch.randn(4, 16, requires_grad=True)).sum()
        loss.backward()
    assert seen == [False, False]
    assert torch.backends.mkldnn.enabled


def test_a_segment_ending_in_rrelu_is_exact_without_early_stop():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.RReLU(0.1, 0.9)) for _ in range(3)]).train()
    x = torch.randn(8, 16, requires_grad=True)
    assert_exact(model, x, [segment(str(i), early_stop=False) for i in range(3)])
    assert_exact(model, x, [segment("0", "1", "2", early_stop=False)])


@pytest.mark.parametrize(
    "plan",
    [
        [segment("block")],
        [segment("block#1")],
        [segment("block"), segment("block#2")],
        [segment("block", "block#1")],
        [segment("block#1", "other", "block#2")],
        [segment("block", "block#1", "other", "block#2", children=(segment("block#1"), segment("other")))],
        [segment("block", "block#1", "other", children=(segment("block#1"),)), segment("block#2")],
    ],
)
def test_a_module_called_several_times_is_planned_by_call(plan):
    model, x = make(Shared)
    assert_exact(model, x, plan)
    with counting({"block": model.block.feed[0]}) as calls, apply_segments(model, plan):
        train_step(model, x)
    replayed = sum(c.module == "block" for s in plan for c in s.members)
    replayed += sum(c.module == "block" for s in plan for child in s.children for c in child.members)
    assert calls["block"] == 3 + replayed


class TwoPasses(nn.Module):
    def __init__(self):
        super().__init__()
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(4)]
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return self.body(self.body(x))


def test_a_module_named_whole_in_one_pass_and_by_its_parts_in_another_ends_where_it_is_planned_to():
    torch.manual_seed(0)
    model, x = TwoPasses(), torch.randn(4, 8)
    parts = ("body.1.1#1", "body.1.2#1", "body.1.3#1", "body.2.0#1", "body.2.1#1")
    plan = [segment("body.2", "body.3"), segment(*parts)]
    assert_exact(model, x, plan)
    body = model.body
    with counting({"inside": body[2][0], "behind": body[3][0]}) as calls, apply_segments(model, plan):
        train_step(model, x)
    # Two passes, and a replay of what each segment names.
    assert calls == {"inside": 4, "behind": 3}


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass"])
def test_containers_travel_between_members(kind):
    model, x = make(Passing, kind)
    assert_exact(model, x, [segment(f"blocks.{i}") for i in range(4)])
    assert_exact(model, x, [segment(*[f"blocks.{i}" for i in range(3)], children=(segment("blocks.1"),))])


def test_nested_calls_run_as_often_as_they_are_deep():
    model, x = make(Stack)
    inner = segment(*BLOCKS[:4], children=(segment(*BLOCKS[:2]), segment(BLOCKS[2])))
    with (
        counting({name: model.get_submodule(name).mix for name in BLOCKS}) as calls,
        apply_segments(model, [segment(*BLOCKS[:5], children=(inner,))]),
    ):
        train_step(model, x)
    assert [calls[name] for name in BLOCKS] == [4, 4, 4, 3, 2, 1]


class _Counter(TorchDispatchMode):
    def __init__(self, operator):
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.operator
        return func(*args, **(kwargs or {}))


def test_a_saved_operator_is_not_run_again():
    model, x = make(Stack)
    runs = []
    for kept in ((), (0,), (0, 1), (0, 1, 2)):
        with apply_segments(model, [segment(b, save=saved("aten.addmm.default", *kept)) for b in BLOCKS]):
            loss = model(x).square().mean()
            with _Counter(torch.ops.aten.addmm.default) as counter:
                loss.backward()
        runs.append(counter.count)
    # A block has three linear layers; what the third one returns feeds a dropout, whose mask is saved.
    assert runs == [18, 12, 6, 0]


def test_gradients_accumulate_over_several_steps():
    model, x = make(Stack)
    plain, _ = make(Stack)
    with apply_segments(model, STACK_PLANS["a run inside a run"]):
        for m in (model, plain):
            torch.manual_seed(1)
            for scale in (1, 2, 3):
                m(x * scale).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_several_forwards_may_come_before_their_backwards(order):
    model, x = make(Normed)
    plain, _ = make(Normed)
    plan = [segment("blocks.0", "blocks.1", restored_buffers=_statistics(0, 1)), segment("blocks.2")]
    plan[1] = segment("blocks.2", restored_buffers=_statistics(2))
    with apply_segments(model, plan):
        for m in (model, plain):
            losses = [m(x * scale).square().mean() for scale in (1, 2, 3)]
            for i in order:
                losses[i].backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_forward_may_have_several_backwards():
    model, x = make(Stack)
    plain, _ = make(Stack)
    with apply_segments(model, STACK_PLANS["blocks inside a run"]):
        for m in (model, plain):
            torch.manual_seed(1)
            loss = m(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Gated(nn.Module):
    """Computes a gate without gradients, by an operator that would save its output with them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            with torch.no_grad():
                gate = x.sigmoid()
            x = layer(x) * gate
        return x


def test_what_runs_without_gradients_between_members_does_so_in_the_replay():
    model, x = make(Gated)
    assert_exact(model, x, [segment("layers.0", "layers.1", "layers.2", crosses_operators=True)])


class Ages(nn.Module):
    """Reads a buffer that it has just written."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("age", torch.ones(()))

    def forward(self, x):
        self.age *= 2
        return self.linear(x).tanh() * self.age


def test_every_backward_of_a_forward_sees_the_buffers_that_it_saw():
    models = [make(nn.Sequential, Ages(), nn.Linear(16, 16))[0] for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(4, 16)
    with apply_segments(models[0], [segment("0", restored_buffers=("0.age",))]):
        for m in models:
            loss = m(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(models[0][0].age, models[1][0].age)


def test_a_second_backward_through_a_save_set_computes_again_what_the_first_used_up():
    model, x = make(Stack)
    plain, _ = make(Stack)
    with apply_segments(model, STACK_PLANS["save sets on blocks"]):
        for m in (model, plain):
            torch.manual_seed(1)
            loss = m(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", ["every block", "a run of four", "blocks inside a run"])
def test_double_backward_gives_the_same_gradients(name):
    model, x = make(Stack)
    plain, _ = make(Stack)
    found = []
    with apply_segments(model, STACK_PLANS[name]):
        for m in (model, plain):
            torch.manual_seed(1)
            (gradient,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
            found.append(torch.autograd.grad(gradient.square().sum(), list(m.blocks.parameters())))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_exact_under_autocast():
    model, x = make(Stack)
    plain, _ = make(Stack)
    with apply_segments(model, STACK_PLANS["a run inside a run"]), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(train_step(model, x), train_step(plain, x))


def test_frozen_parts_get_no_gradients_and_the_rest_the_same():
    model, x = make(Stack)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].feed.requires_grad_(False)
    x.requires_grad_(False)
    assert_exact(model, x, STACK_PLANS["blocks inside a run"])


@pytest.mark.parametrize("name", ["every block", "a run of four"])
def test_without_gradients_in_eval_or_inference_nothing_is_checkpointed(name):
    model, x = make(Stack)
    segments = STACK_PLANS[name]
    with counting({"mix": model.blocks[2].mix}) as calls, apply_segments(model, segments):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                model(x)
        model.eval()
        model(x).square().mean().backward()
        assert calls["mix"] == 3
        model.train()
        model(x).square().mean().backward()
        assert calls["mix"] == 5


def test_a_plan_for_evaluation_is_in_force_in_evaluation():
    model, x = make(Stack)
    with counting({"mix": model.blocks[2].mix}) as calls, apply_segments(model, [segment("blocks.2")], training=False):
        model(x).square().mean().backward()
        assert calls["mix"] == 1
        model.eval()
        model(x).square().mean().backward()
    assert calls["mix"] == 3


def test_a_part_called_directly_is_planned_as_its_first_call():
    model, x = make(Stack)
    with counting({"mix": model.blocks[2].mix}) as calls, apply_segments(model, [segment("blocks.2")]):
        for _ in range(2):
            model.blocks[2](x).square().mean().backward()
    assert calls["mix"] == 4
    assert call("blocks.2").index == 0


class Islands(nn.Module):
    """Runs operators, and one block, in an autocast context of its own between the others."""

    def __init__(self, enabled):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.mix, self.enabled = nn.Parameter(torch.randn(16, 16) / 4), enabled

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index == 2:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
                    x = block(x)
            else:
                x = block(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
                x = x.float()
                x = (x + nn.functional.linear(x, self.mix)).float()
        return x


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("names", [BLOCKS[:3], BLOCKS[1:4], BLOCKS[2:4]], ids=["before", "around", "from"])
def test_autocast_that_changes_inside_a_run_is_replayed_as_it_was(names, enabled):
    torch.manual_seed(0)
    model, x = Islands(enabled).train(), torch.randn(4, 16)

    def gradients():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enabled):
            loss = model(x).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    with apply_segments(model, [segment(*names)]):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_autocast_to_another_dtype_inside_a_run_is_replayed_as_it_was():
    torch.manual_seed(0)
    model, x = Islands(enabled=True).train(), torch.randn(64, 16)

    def gradients():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    with apply_segments(model, [segment(*BLOCKS[:4])]):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_a_save_set_is_exact_where_autocast_casts_a_weight_in_the_replay_that_forward_found_cast():
    model, x = Islands(enabled=True).train(), torch.randn(4, 16)
    kept = [segment("blocks.1", save=saved("aten.addmm.default", 0))]
    cast = torch.autocast("cpu", dtype=torch.bfloat16)

    def gradients():
        with cast:
            loss = model(x).sum() + model(x * 2).sum()
        with _Counter(torch.ops.aten.addmm.default) as counter:
            return torch.autograd.grad(loss, list(model.parameters())), counter.count

    expected, _ = gradients()
    with apply_segments(model, kept):
        found, again = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # The kept call is told apart from the casts around it: it does not run again.
    assert again == 0


class Guessing(nn.Module):
    """Runs its body in inference mode before it runs it with gradients; a table is made at the first use."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        x = self.embed(x)
        if self.table is None:
            self.table = torch.linspace(0, 1, 16).cos()
        with torch.inference_mode():
            guess = self.body(x * self.table)
            guess[:, :2] = 1
            guess += 0.5
        return self.head(torch.tanh(self.body(x + guess.clone())))


GUESSING_PLANS = {
    "a run": [segment("embed", "body", "head", crosses_operators=True)],
    "a run inside the root": [segment("", children=(segment("embed", "body", crosses_operators=True),))],
}


@pytest.mark.parametrize("name", GUESSING_PLANS)
def test_what_inference_mode_changes_in_place_and_what_a_first_use_makes_between_members_is_exact(name):
    torch.manual_seed(0)
    assert_exact(Guessing().train(), torch.randn(4, 16), GUESSING_PLANS[name], steps=2)
