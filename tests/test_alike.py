"""Plans that treat blocks alike, on models: recognised, exact, within the budget, and the cost told."""

import json
import re
from functools import cache
from itertools import pairwise

import pytest
import torch
from remat.planner import BudgetError, InfeasibleBudgetError, Plan, PlanError, Planner, apply, compare, largest_batch
from remat.planner.finding.planning import plan
from remat.profiler.blocks import kinds_of
from torch import nn

from .small_step import Block, build, squares


class Stages(nn.Module):
    """Two lists of blocks of their own width each, and what is between them; the first block of the second differs."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.ModuleList(Block(16) for _ in range(4))
        self.between = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
        self.wide = nn.ModuleList([nn.Sequential(Block(64), nn.Tanh()), *(Block(64) for _ in range(3))])

    def forward(self, x):
        for block in self.narrow:
            x = block(x)
        x = self.between(x)
        for block in self.wide:
            x = block(x)
        return x


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, n_positions=64, vocab_size=64, use_cache=False, **special)
    ids = torch.randint(0, 64, (8, 32))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}, None


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=88,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        use_cache=False,
    )
    ids = torch.randint(0, 64, (8, 32))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}, None


MODELS = {
    "GPT-2": (_gpt2, {"transformer.h": range(4)}),
    "Llama": (_llama, {"model.layers": range(4)}),
    "two stages": (lambda: (Stages(), torch.randn(256, 16), squares), {"narrow": range(4), "wide": range(1, 4)}),
}


def _patterns(made, where, numbers):
    """Return what each block of a list has: its segments with names from the block on."""
    found = {number: [] for number in numbers}
    for segment in made.segments:
        match = re.match(rf"{re.escape(where)}\.(\d+)", segment.members[0].module)
        if match is not None and int(match[1]) in found:
            assert all(call.module.startswith(match[0]) for call in segment.members)
            inside = tuple(call.module.removeprefix(match[0]) for call in segment.members)
            found[int(match[1])].append((inside, segment.save))
    return [found[number] for number in numbers]


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_with_blocks_alike_is_exact_fits_and_has_two_patterns_at_most(name):
    torch.manual_seed(0)
    make, lists = MODELS[name]
    model, batch, loss = make()
    planner = Planner.of(model, batch, loss=loss, alike=True, save_sets=name == "two stages", repeats=0)
    assert [len(kind.bounds) for kind in planner.bridge.kinds] == [len(numbers) for numbers in lists.values()]
    made = planner.plan("85%", solver="dp")
    assert made.predicted_peak_bytes <= made.budget_bytes
    assert len(made.segments) > 1
    for where, numbers in lists.items():
        patterns = _patterns(made, where, numbers)
        assert sum(one != other for one, other in pairwise(patterns)) <= 1
    assert made.unrestricted_overhead <= made.predicted_overhead
    (note,) = (note for note in made.notes if note.startswith("treating blocks alike costs"))
    assert f"{100 * made.predicted_overhead:.1f} % added, {100 * made.unrestricted_overhead:.1f} % without" in note
    assert Plan.from_json(made.to_json()) == made
    found = _gradients(model, batch, loss)
    with apply(model, made):
        assert all(map(torch.equal, found, _gradients(model, batch, loss)))


def _gradients(model, batch, loss):
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    (output.loss if loss is None else loss(output)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@cache
def _small():
    model, batch, loss = build(blocks=6)
    return Planner.of(model, batch, loss=loss, alike=True, repeats=0), loss


@pytest.mark.parametrize("solver", ["dp", "ilp", "all"])
def test_the_cost_told_is_the_difference_to_the_plan_without(solver):
    planner, loss = _small()
    made = planner.plan("75%", solver=solver, check=False)
    if solver == "all":
        assert made.unrestricted_overhead is None
        return
    free = Planner.of(planner.session.step.model, planner.session.step.args, loss=loss, repeats=0)
    other = free.plan("75%", solver=solver, check=False)
    assert other.unrestricted_overhead is None
    assert made.unrestricted_overhead == pytest.approx(other.predicted_overhead, rel=0.02)
    assert made.predicted_overhead >= made.unrestricted_overhead
    assert not any("at least" in note for note in made.notes)


def test_a_plan_says_in_print_what_blocks_keep_everything():
    planner, _ = _small()
    made = planner.plan("75%", solver="dp", check=False)
    changed = planner.plan("85%", solver="dp", check=False)
    assert re.search(r"^  (\S+: )?\S+.*\(\d segments.*\)$", str(changed), re.MULTILINE)
    assert re.search(r"^  \d(-\d)?: kept$", str(changed), re.MULTILINE)
    assert "one pattern, another from " in str(changed)
    assert made.circumstances.alike
    assert json.loads(made.to_json())["circumstances"]["alike"] is True


def test_where_no_plan_alike_fits_the_error_says_what_plans_without_reach():
    model, batch = Stages(), torch.randn(256, 16)
    planner = Planner.of(model, batch, loss=squares, alike=True, repeats=0)
    with pytest.raises(
        InfeasibleBudgetError, match="Blocks are treated alike, as asked by alike: without it"
    ) as caught:
        planner.plan(1, solver="dp", check=False)
    least = caught.value.least_peak_bytes
    assert planner.plan(least, solver="dp", check=False).predicted_peak_bytes <= least
    with pytest.raises(InfeasibleBudgetError) as free:
        Planner.of(model, batch, loss=squares, repeats=0).plan(1, solver="dp", check=False)
    assert free.value.least_peak_bytes < least


def test_a_solver_that_cannot_treat_blocks_alike_is_refused_by_name():
    planner, loss = _small()
    model, batch = planner.session.step.model, planner.session.step.args
    for refused in (
        lambda: plan(model, batch, "60%", solver="sqrt", alike=True, loss=loss),
        lambda: planner.plan("60%", solver="dp_nested"),
        lambda: compare(model, batch, solvers=["greedy"], planner=planner),
        lambda: largest_batch(lambda _: batch, "1GiB", model=model, solver="uniform", alike=True),
    ):
        with pytest.raises(BudgetError, match="cannot treat blocks alike: choose one of none, all, dp, ilp, auto"):
            refused()


def test_blocks_are_not_treated_alike_over_several_batches():
    model, batch, loss = build()
    with pytest.raises(PlanError, match=r"alike= is about one batch.*largest in every dimension, or leave alike= out"):
        plan(model, None, "60%", batches=[batch, batch[:8]], alike=True, loss=loss)


def test_compare_and_largest_batch_treat_blocks_alike():
    planner, loss = _small()
    model = planner.session.step.model
    compared = compare(model, planner.session.step.args, budgets=["80%"], planner=planner)
    assert compared.solvers == ("all", "dp", "ilp")
    assert all(made.circumstances.alike for made in compared.plans.values())
    found = largest_batch(
        lambda size: torch.randn(64 * size, 32), "3MiB", model=model, sizes=[1, 8], alike=True, loss=loss, repeats=0
    )
    assert found.plan.circumstances.alike


def test_where_nothing_repeats_a_plan_is_made_as_without_and_says_so():
    model = nn.Sequential(Block(16), nn.Linear(16, 32), Block(32))
    batch = torch.randn(256, 16)
    planned = {
        alike: plan(model, batch, "80%", solver="dp", loss=squares, alike=alike, repeats=0) for alike in (True, False)
    }
    assert planned[True].segments == planned[False].segments
    assert any("no block of this model repeats" in note for note in planned[True].notes)


def test_blocks_are_alike_by_what_they_run():
    profile = Planner.of(Stages(), torch.randn(256, 16), loss=squares, repeats=0).profile
    kinds = [[profile.calls[index].module for index in kind] for kind in kinds_of(profile)]
    assert kinds == [[f"narrow.{n}" for n in range(4)], [f"wide.{n}" for n in range(1, 4)]]
    flat = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())))
    assert kinds_of(Planner.of(flat, torch.randn(8, 16), loss=squares, repeats=0).profile) == ()


def test_operators_that_correspond_take_the_same_time():
    profile = Planner.of(Stages(), torch.randn(256, 16), loss=squares).profile
    assert "of blocks built alike together" in str(profile.times_from)
    for blocks in kinds_of(profile):
        spans = [range(profile.calls[index].start, profile.calls[index].stop) for index in blocks]
        for same in zip(*spans, strict=True):
            assert len({profile.operators[k].forward_ns for k in same}) == 1


def test_blocks_that_patterns_exclude_are_a_kind_of_their_own():
    model, batch, loss = build(blocks=6)
    planner = Planner.of(model, batch, loss=loss, alike=True, exclude=["0-1"], repeats=0)
    assert [len(kind.bounds) for kind in planner.bridge.kinds] == [2, 4]
    made = planner.plan("80%", solver="dp", check=False)
    assert made.segments
    assert not any(re.match("[01]", call.module) for segment in made.segments for call in segment.members)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_model_is_exact_under_a_plan_with_blocks_alike():
    model, batch, loss = build(blocks=4)
    made = plan(model, batch, "80%", solver="dp", loss=loss, alike=True, cross_operators=False, repeats=0)
    expected = _gradients(model, batch, loss)
    torch._dynamo.reset()
    assert made.segments
    with apply(model, made):
        found = _gradients(torch.compile(model, backend="aot_eager"), batch, loss)
    assert all(map(torch.equal, expected, found))
