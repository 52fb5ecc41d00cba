"""Plans on models whose blocks are compiled one by one, before or after the plan is applied: in force, or told of."""

import copy
import pickle

import pytest
import torch
from remat.planner import apply, plan
from remat.planner.applier.apply import apply_segments
from remat.planner.errors import ApplyError, PlanMismatchError
from remat.profiler.allocator import allocations_inside
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from .apply_models import saved, segment

# The inductor package uses torch.jit while it is imported; the compiler reads .grad and filters the warning itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh())

    def forward(self, x):
        return x + self.feed(self.norm(x))


def build(depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(depth)]), torch.randn(256, 32, requires_grad=True)


PLANS = {
    "blocks": [segment(str(i)) for i in range(3)],
    "parts of blocks": [segment(f"{i}.feed") for i in range(3)],
    "runs of blocks": [segment("0", "1"), segment("2", "3")],
    "runs inside blocks": [segment(f"{i}.feed.0", f"{i}.feed.1", f"{i}.feed.2") for i in range(3)],
    "save sets": [segment(str(i), save=saved("aten.addmm.default", 0)) for i in range(3)],
}


def planned(model, segments, *, first, parts, backend="aot_eager", **options):
    """Apply segments to a model and compile parts of it, in one order or the other."""
    torch.compiler.reset()
    if first == "compile":
        for part in parts:
            part.compile(backend=backend, **options)
    applied = apply_segments(model, segments)
    if first == "apply":
        for part in parts:
            part.compile(backend=backend, **options)
    return applied


def step(model, x):
    model.zero_grad()
    x.grad = None
    model(x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def peak(model, x):
    """Return the peak of a second step above what is there before it; nothing is compiled any more in it."""
    step(model, x)
    model.zero_grad()
    x.grad = None
    return allocations_inside(lambda window: window(lambda: model(x).square().mean().backward()))[0][0]


def same(found, expected):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("first", ["compile", "apply"])
@pytest.mark.parametrize("name", PLANS)
def test_segments_are_in_force_on_blocks_compiled_one_by_one_whichever_comes_first(name, first):
    model, x = build()
    expected, unplanned = step(copy.deepcopy(model), x), peak(copy.deepcopy(model), x)
    eager = copy.deepcopy(model)
    apply_segments(eager, PLANS[name])
    applied = planned(model, PLANS[name], first=first, parts=model)
    assert peak(model, x) <= peak(eager, x) < 0.8 * unplanned
    assert same(step(model, x), expected)
    applied.remove()
    assert peak(model, x) > 0.95 * unplanned
    assert same(step(model, x), expected)


@pytest.mark.parametrize("name", ["blocks", "parts of blocks", "runs of blocks", "runs inside blocks", "save sets"])
def test_alike_blocks_share_what_is_compiled_once(name):
    """Else the ninth block would be over the compiler's limit, which is an error with fullgraph."""
    model, x = build(depth=12)
    segments = {
        "blocks": [segment(str(i)) for i in range(12)],
        "parts of blocks": [segment(f"{i}.feed") for i in range(12)],
        "runs of blocks": [segment(str(i), str(i + 1)) for i in range(0, 12, 2)],
        "runs inside blocks": [segment(f"{i}.feed.0", f"{i}.feed.1") for i in range(12)],
        "save sets": [segment(str(i), save=saved("aten.addmm.default", 0)) for i in range(12)],
    }
    counter = CompileCounterWithBackend("aot_eager")
    planned(model, segments[name], first="apply", parts=model, backend=counter, fullgraph=True)
    step(model, x)
    assert counter.frame_count == 1


@pytest.mark.parametrize("first", ["compile", "apply"])
def test_a_run_of_which_one_block_is_compiled_is_refused_by_name(first):
    for compiled, eager in (("1", "0"), ("0", "1")):
        model, x = build()
        applied = planned(model, [segment("0", "1", "2")], first=first, parts=[model.get_submodule(compiled)])
        with pytest.raises(ApplyError, match=rf"segment 0 \.\. 2.*'{compiled}' is compiled by itself and '{eager}' is"):
            model(x)
        applied.remove()
        model(x)


def test_a_plan_is_kept_to_where_blocks_are_compiled_after_it_was_applied():
    model, x = build()
    x = x.detach()
    made = plan(model, x, "60%", solver="dp", cross_operators=False, repeats=0, loss=lambda out: out.square().mean())
    assert made.segments
    expected = [parameter.grad for parameter in _trained(copy.deepcopy(model), x).parameters()]
    with apply(model, made):
        for block in model:
            block.compile(backend="aot_eager")
        assert same([parameter.grad for parameter in _trained(model, x).parameters()], expected)
        model.zero_grad(set_to_none=True)
        measured = allocations_inside(lambda window: window(lambda: model(x).square().mean().backward()))[0][0]
    there_before = x.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    assert measured + there_before <= made.predicted_peak_bytes


def _trained(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return model


def test_a_call_that_a_compiled_block_makes_is_not_told_to_be_missing_but_another_is():
    class Skipping(nn.Sequential):
        skip = False

        def forward(self, x):
            for block in self[:-1] if self.skip else self:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Skipping(*[Block() for _ in range(3)]), torch.randn(64, 32)
    made = plan(model, x, "99%", solver="all", cross_operators=False, repeats=0, loss=lambda out: out.sum())
    assert [str(one) for one in made.segments] == ["0", "1", "2"]
    with apply(model, made):
        model[0].compile(backend="aot_eager")
        model(x)
        model.skip = True
        with pytest.warns(UserWarning, match="of segment 2 not all calls came"):
            model(x)


def test_segments_that_compiled_parts_hide_are_told_once_and_by_name():
    model, x = build(depth=2)
    expected = step(copy.deepcopy(model), x)
    inside = [segment("0", "1", children=(segment("0.feed"),))]
    keeps = [segment("0", save=saved("aten.addmm.default", 0))]
    for segments, told in (
        (inside, r"segment 0\.feed is inside another segment and inside a part .* solver='dp' or 'ilp'"),
        (keeps, r"segment 0 keeps outputs of operators, .*'0\.feed', which is compiled by itself.*save_sets=False"),
    ):
        again = copy.deepcopy(model)
        planned(again, segments, first="apply", parts=[again[0].feed])
        with pytest.warns(UserWarning, match=told):
            assert same(step(again, x), expected)
        assert same(step(again, x), expected)


def test_segments_inside_one_another_are_told_of_where_the_compiler_takes_the_outermost_alone():
    model, x = build(depth=2)
    expected = step(copy.deepcopy(model), x)
    planned(model, [segment("0", "1", children=(segment("0"),))], first="apply", parts=[model])
    with pytest.warns(UserWarning, match=r"segment 0 \.\. 1 \(2 calls\) has others inside, .*outermost alone"):
        assert same(step(model, x), expected)


def test_a_copy_of_a_planned_model_with_compiled_blocks_is_planned_and_not_compiled():
    model, x = build(depth=2)
    expected = step(copy.deepcopy(model), x)
    planned(model, [segment("0.feed")], first="apply", parts=model)
    step(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0]._compiled_call_impl is None
        assert twin[0].feed.forward.__self__.planned.root is twin
        assert same(step(twin, x), expected)


def test_a_part_of_a_planned_model_can_be_wrapped_by_the_compiler():
    model, x = build(depth=2)
    expected = copy.deepcopy(model[0])(x)
    with apply_segments(model, [segment("0"), segment("1.feed")]):
        torch.compiler.reset()
        assert torch.equal(torch.compile(model[0], backend="aot_eager")(x), expected)


def test_a_block_replaced_by_its_wrapper_is_refused_with_the_way_that_works():
    model, x = build(depth=2)
    made = plan(model, x.detach(), "80%", solver="dp", repeats=0, loss=lambda out: out.sum())
    applied = apply(model, made)
    model[0] = torch.compile(model[0], backend="aot_eager")
    with pytest.raises(ApplyError, match=r"was added, removed or replaced .* call part\.compile\(\)"):
        model(x)
    applied.remove()
    with pytest.raises(PlanMismatchError, match=r"call module\.compile\(\) instead"):
        apply(model, made)
