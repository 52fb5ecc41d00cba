"""How long the model's output lives is part of the step: logits that a loop drops leave room for a better plan."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Plan, PlanError, Planner, plan, price, verify
from remat.planner.budget import format_bytes
from remat.profiler import profile
from remat.profiler.allocator import allocated_peak_bytes
from remat.profiler.step import Step
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")


class Head(nn.Module):
    """A few blocks and logits that the loss does not save: cross entropy keeps their logarithm of softmax instead."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)))
        self.head = nn.Linear(32, 512)

    def forward(self, x):
        return self.head(self.body(x))


def build():
    torch.manual_seed(0)
    return Head().train(), torch.randn(128, 32)


def cross_entropy(logits):
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@pytest.mark.parametrize("holds_output", [True, False])
def test_the_step_is_recorded_with_its_output_held_or_dropped_as_it_runs(holds_output):
    model, x = build()
    step = Step.of(model, x, cross_entropy, holds_output=holds_output)
    recorded = profile(model, x, loss=cross_entropy, repeats=1, holds_output=holds_output)
    assert recorded.unseen_bytes == 0
    allocated = allocated_peak_bytes(step.train, CPU)
    assert recorded.peak_bytes() - recorded.fixed_bytes() == allocated


def test_a_plan_for_a_dropped_output_is_dry_run_and_verified_with_it_dropped(tmp_path):
    model, x = build()
    held = plan(model, x, "80%", solver="dp", loss=cross_entropy, repeats=0)
    dropped = plan(model, x, held.budget_bytes, solver="dp", loss=cross_entropy, repeats=0, holds_output=False)
    assert dropped.predicted_overhead < held.predicted_overhead
    assert verify(model, x, held, loss=cross_entropy, repeats=0).measured_peak_bytes <= held.predicted_peak_bytes
    assert verify(model, x, dropped, loss=cross_entropy, repeats=0).measured_peak_bytes <= dropped.predicted_peak_bytes
    # In a loop that holds the output after all, the same plan takes more than was promised.
    otherwise = replace(dropped, circumstances=replace(dropped.circumstances, holds_output=True))
    assert verify(model, x, otherwise, loss=cross_entropy, repeats=0).measured_peak_bytes > dropped.budget_bytes
    dropped.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").circumstances.holds_output is False
    assert "output dropped after the loss" in str(dropped)
    assert "output held" in str(held)


def test_a_plan_says_what_a_held_output_costs_and_how_to_tell_that_a_loop_drops_it():
    model, x = build()
    made = plan(model, x, "90%", solver="dp", loss=cross_entropy, repeats=0, check=False)
    told = next(note for note in made.notes if "holds_output=False" in note)
    assert "the output (256.0 KiB) is counted as held" in told
    otherwise = Planner.of(model, x, loss=cross_entropy, repeats=0, holds_output=False)
    lower = made.predicted_peak_bytes - price(model, x, made, planner=otherwise).predicted_peak_bytes
    assert lower > 0.01 * made.predicted_peak_bytes
    assert f"the peak is {format_bytes(lower)} lower" in told
    with pytest.raises(InfeasibleBudgetError, match="holds_output=False"):
        plan(model, x, "1KB", solver="dp", loss=cross_entropy, repeats=0, check=False)
    said = plan(model, x, "90%", solver="dp", loss=cross_entropy, repeats=0, check=False, holds_output=False)
    assert not any("holds_output" in note for note in said.notes)


def test_nothing_is_said_of_an_output_without_which_the_peak_is_as_high():
    class Repeats(nn.Module):
        def forward(self, x):
            return x * x.detach().repeat(1, 32).mean()

    model = nn.Sequential(nn.Linear(32, 32), Repeats(), nn.Linear(32, 32))
    planner = Planner.of(model, torch.randn(256, 32), loss=lambda out: out.square().mean(), repeats=0)
    # The peak is in forward, before there is an output, which has 2 % of it.
    assert planner.plan("100%", solver="none", check=False).notes == (
        "smaller batches need no more memory (if the same operators run); times are for these shapes",
    )


def test_a_planner_for_held_outputs_is_not_one_for_dropped_outputs():
    model, x = build()
    planner = Planner.of(model, x, loss=cross_entropy, repeats=0)
    with pytest.raises(PlanError, match="another holds_output"):
        plan(model, x, "90%", solver="none", planner=planner, holds_output=False)


@contextmanager
def by_hand(blocks):
    """Checkpoint each of these modules, as people do."""
    for block in blocks:
        block.forward = checkpointed(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def checkpointed(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=172,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=64,
        use_cache=False,
    )
    tokens = torch.randint(0, 1024, (4, 64))
    return LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_at_the_peak_of_a_llama_checkpointed_by_hand_a_plan_adds_no_more(every):
    model, batch = llama()
    step = Step.of(model, batch, holds_output=False)
    entry = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *step.tensors()))
    with by_hand(model.model.layers[::every]):
        peak = entry + allocated_peak_bytes(step.train, CPU)
    model.zero_grad(set_to_none=True)
    planner = Planner.of(model, batch, holds_output=False, repeats=0)
    made = planner.plan(peak, solver="dp")
    blocks = [candidate for candidate in planner.bridge.problem(1).candidates if candidate.block][::every]
    assert len(blocks) == 4 // every
    by_hand_ns = sum(candidate.replay_ns for candidate in blocks)
    assert made.predicted_overhead * planner.profile.step_ns <= by_hand_ns
    found = verify(model, batch, made, repeats=0)
    assert found.exact
    assert found.measured_peak_bytes <= peak
    if every > 1:
        # And the other way round: with that much added time, a lower peak. (With every block replayed little is left.)
        lower = planner.plan(peak - peak // 20, solver="dp")
        assert lower.predicted_overhead * planner.profile.step_ns <= by_hand_ns
