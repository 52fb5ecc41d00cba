"""Plans under torch.compile: traced with the public checkpoint, exact, or refused by name."""

import copy
import warnings

import pytest
import torch
from remat.planner.applier.apply import apply_segments
from remat.planner.errors import ApplyError
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

from .apply_models import Residual, make, saved, segment

# The inductor package uses torch.jit while it is imported; the compiler reads .grad and filters the warning itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    # tests/test_compiled_parts.py expects it.
    pytest.mark.filterwarnings("ignore:segment .* has others inside:UserWarning"),
]


class Branch(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, scale):
        return x + self.narrow(torch.tanh(self.wide(x))) * scale


class Loop(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList([Branch() for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x


BLOCKS = [f"blocks.{i}" for i in range(4)]
PLANS = {
    "single blocks": ([segment(b) for b in BLOCKS], 4),
    "runs": ([segment(*BLOCKS[:2]), segment(*BLOCKS[2:])], 2),
    "a run with children": ([segment(*BLOCKS[:3], children=(segment(*BLOCKS[:2]),))], 1),
    "save sets": ([segment(b, save=saved("aten.addmm.default", 0)) for b in BLOCKS[:3]], 3),
    "no early stop": ([segment(BLOCKS[0], early_stop=False)], 1),
}


def gradients(model, module, x):
    model.zero_grad()
    x.grad = None
    module(x).square().mean().backward()
    return [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", PLANS)
def test_a_compiled_planned_model_gives_the_compiled_models_gradients(name):
    torch._dynamo.reset()
    segments, _ = PLANS[name]
    model, x = make(Loop)
    plain = copy.deepcopy(model)
    expected = gradients(plain, torch.compile(plain, backend="aot_eager_decomp_partition", fullgraph=True), x)
    with apply_segments(model, segments):
        found = gradients(model, torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True), x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", PLANS)
def test_the_compiler_sees_one_checkpoint_for_each_top_level_segment(name):
    torch._dynamo.reset()
    segments, count = PLANS[name]
    model, x = make(Loop)
    backend = EagerAndRecordGraphs()
    with apply_segments(model, segments):
        torch.compile(model, backend=backend, fullgraph=True)(x)
    assert len(backend.graphs) == 1
    assert backend.graphs[0].code.count("= torch.ops.higher_order.tag_activation_checkpoint(") == count


class Broken(Loop):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x, scale=2.0)
            if i == 1:
                torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("name", PLANS)
def test_a_graph_break_between_members_changes_nothing(name):
    torch._dynamo.reset()
    model, x = make(Broken)
    plain = copy.deepcopy(model)
    with apply_segments(model, PLANS[name][0]):
        found = gradients(model, torch.compile(model, backend="aot_eager"), x)
    for ours, theirs in zip(found, gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_nothing_is_checkpointed_when_a_model_is_compiled_in_eval():
    torch._dynamo.reset()
    model, x = make(Loop)
    backend = EagerAndRecordGraphs()
    with apply_segments(model, PLANS["runs"][0]):
        torch.compile(model.eval(), backend=backend, fullgraph=True)(x)
    assert "tag_activation_checkpoint" not in backend.graphs[0].code


def test_a_compiled_block_may_be_a_member_of_an_eager_plan():
    torch._dynamo.reset()
    model, x = make(Loop)
    plain = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with apply_segments(model, [segment(*BLOCKS[:2]), segment(BLOCKS[2])]):
        found = gradients(model, model, x)
    for ours, theirs in zip(found, gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


class Breaking(Branch):
    def forward(self, x, scale):
        torch._dynamo.graph_break()
        return super().forward(x, scale)


@pytest.mark.parametrize("name", PLANS)
def test_a_graph_break_inside_members_changes_nothing(name):
    torch._dynamo.reset()
    model, x = make(Loop)
    model.blocks[0] = Breaking()
    model.blocks[2] = Breaking()
    plain = copy.deepcopy(model)
    with apply_segments(model, PLANS[name][0]):
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            found = gradients(model, compiled, x)
    for ours, theirs in zip(found, gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [Residual, Loop])
def test_operators_between_members_are_refused_under_compile(kind):
    torch._dynamo.reset()
    model, x = make(kind)
    name = "branches" if kind is Residual else "blocks"
    plan = [segment(f"{name}.0", f"{name}.1", crosses_operators=True)]
    with (
        apply_segments(model, plan),
        pytest.raises(ApplyError, match=rf"{name}\.0 \.\. .*plan with cross_operators=False"),
    ):
        torch.compile(model, backend="eager")(x)


class Drawing(nn.Module):
    """Draws random numbers, or does not."""

    def __init__(self, draws):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.5) if draws else nn.Tanh()

    def forward(self, x):
        return self.drop(self.linear(x))


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_that_replays_with_other_random_numbers_is_warned_of_by_name(backend, draws):
    torch.compiler.reset()
    model, x = nn.Sequential(Drawing(draws), Drawing(draws)).train(), torch.randn(4, 16)
    with apply_segments(model, [segment("0")]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    told = ["segment 0: torch.compile(backend='eager')" in str(warning.message) for warning in caught]
    assert any(told) == (draws and backend == "eager")
