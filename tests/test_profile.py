"""The profile: bytes against the allocator, times, stages, data in and out, and a model left as it was."""

from __future__ import annotations

import gc
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from remat.profiler import BatchError, Profile, ProfileFileError, profile
from remat.profiler.allocator import allocated_peak_bytes, allocations_inside, collect, collected
from remat.profiler.step import Step
from torch import nn

from .zoo import ZOO

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["chain", "gpt2", "llama", "unet", "resnet", "batch_norm"])
def test_the_recorded_peak_is_the_allocators(name):
    model, batch, loss = ZOO[name]()
    recorded = profile(model, batch, loss=loss, repeats=1)
    step = Step.of(model, batch, loss)
    measured = allocated_peak_bytes(step.train, CPU)
    predicted = recorded.peak_bytes() - recorded.fixed_bytes() + recorded.unseen_bytes
    assert recorded.bytes_from == "dry run"
    assert predicted == pytest.approx(measured, rel=1e-3)
    assert predicted >= measured


def test_the_dry_run_alone_is_within_a_thousandth_where_operators_take_no_workspace():
    model, batch, loss = ZOO["gpt2"]()
    recorded = profile(model, batch, loss=loss, repeats=0)
    measured = allocated_peak_bytes(Step.of(model, batch, loss).train, CPU)
    assert recorded.unseen_bytes == 0
    assert recorded.peak_bytes() - recorded.fixed_bytes() == pytest.approx(measured, rel=1e-3)


def test_workspace_inside_a_convolution_is_counted_without_a_real_step_too():
    model, batch, loss = ZOO["unet"]()
    recorded = profile(model, batch, loss=loss, repeats=0)
    measured = allocated_peak_bytes(Step.of(model, batch, loss).train, CPU)
    assert max(operator.scratch_bytes for operator in recorded.operators) > 0
    assert recorded.peak_bytes() - recorded.fixed_bytes() == pytest.approx(measured, rel=1e-3)


def test_calls_that_repeat_are_measured_a_few_times_and_known_as_well(monkeypatch):
    windows = []

    def counted(body, device):
        windows.append(allocations_inside(body, device))
        return windows[-1]

    monkeypatch.setattr("remat.profiler.scratch.allocations_inside", counted)
    model, x = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(12))), torch.randn(2, 8, 32, 32)
    few = profile(model, x, repeats=1)
    monkeypatch.setattr("remat.profiler.scratch.OFTEN", 1000)
    every = profile(model, x, repeats=1)
    known = [[operator.scratch_bytes for operator in found.operators] for found in (few, every)]
    assert known[0] == known[1]
    assert sum(known[0]) > 0
    assert len(windows[0]) < len(windows[1]) / 2


def test_a_masked_model_takes_the_same_path_on_fake_tensors_as_on_real_ones():
    model, batch, loss = ZOO["llama"]()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    recorded = profile(model, batch, loss=loss, repeats=1)
    assert not [note for note in recorded.notes if "other operators" in note]


def test_a_model_that_looks_at_its_values_is_recorded_in_a_real_step_and_says_so():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x = x * (2.0 if x.sum().item() > 0 else 1.0)
            return x

    recorded = profile(Looks(), torch.randn(4, 8), repeats=1)
    assert recorded.bytes_from == "real step"
    assert "cannot run on fake tensors" in recorded.notes[0]


@pytest.mark.parametrize("name", ["gpt2", "batch_norm", "gan", "lstm", "mixtral"])
def test_profiling_leaves_the_model_and_the_random_states_as_they_were(name):
    model, batch, loss = ZOO[name]()
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    first.grad = torch.full_like(first, 3.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    profile(model, batch, loss=loss, optimizer="adamw", repeats=1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert [p for p in model.parameters() if p.grad is not None] == [first]
    for path, module in model.named_modules():
        assert vars(module).keys() == attributes[path].keys()
        assert all(vars(module)[key] is attributes[path][key] for key in attributes[path])


def test_the_parts_of_the_peak_are_counted():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    batch = torch.randn(16, 64)
    parts = profile(model, batch, optimizer="adamw", repeats=1).parts
    weights = 4 * (64 * 64 + 3 * 64)
    assert parts.parameters == weights
    assert parts.gradients == weights
    assert parts.optimizer == 2 * weights + 4 * 4
    assert parts.buffers == 2 * 4 * 64 + 8
    assert parts.batch == 4 * 16 * 64
    assert parts.optimizer_step_peak >= 4 * weights


def test_an_optimizer_instance_counts_as_its_name_does():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    batch = torch.randn(4, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    by_instance = profile(model, batch, optimizer=optimizer, repeats=0).parts
    by_name = profile(model, batch, optimizer="sgd", repeats=0).parts
    assert by_instance == by_name
    assert not optimizer.state


def test_accumulated_gradients_are_alive_throughout():
    model, batch, loss = ZOO["chain"]()
    fresh = profile(model, batch, loss=loss, repeats=0)
    accumulated = profile(model, batch, loss=loss, accumulation=True, repeats=0)
    assert accumulated.fixed_bytes() - fresh.fixed_bytes() == fresh.parts.gradients
    assert fresh.peak_bytes() < accumulated.peak_bytes() <= fresh.peak_bytes() + 2 * fresh.parts.gradients


def test_stages_cover_every_operator_of_forward_and_loss_once():
    model, batch, loss = ZOO["unet"]()
    recorded = profile(model, batch, loss=loss, repeats=0)
    bounds = [(stage.start, stage.stop) for stage in recorded.stages]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == recorded.loss_stop
    assert all(a[1] == b[0] for a, b in pairwise(bounds))


def test_no_stage_that_could_be_cut_holds_more_than_its_share():
    model, batch, loss = ZOO["gpt2"]()
    recorded = profile(model, batch, loss=loss, repeats=0)
    saved = recorded.to_frame()["saved_bytes"].to_numpy()
    parents = {call.parent for call in recorded.calls if call.stop > call.start}
    for stage in recorded.stages:
        if stage.is_call and stage.call in parents:
            assert saved[stage.start : stage.stop].sum() <= 0.02 * saved.sum()


def test_a_profile_survives_json_and_files(tmp_path):
    model, batch, loss = ZOO["batch_norm"]()
    recorded = profile(model, batch, loss=loss, repeats=0)
    recorded.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == recorded
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path):
    (tmp_path / "broken.json").write_text('{"model": 3}')
    with pytest.raises(ProfileFileError, match="not a remat profile") as caught:
        Profile.load(tmp_path / "broken.json")
    assert "\n" not in str(caught.value)


def test_the_frame_has_one_row_for_each_forward_operator():
    model, batch, loss = ZOO["chain"]()
    recorded = profile(model, batch, loss=loss, repeats=1)
    frame = recorded.to_frame()
    linear = frame[frame.operator == "aten.addmm.default"]
    assert len(frame) == recorded.loss_stop
    assert list(linear.module) == [f"{i}.0" for i in range(7)]
    assert (linear.forward_ns > 0).all()
    widths = [256, 16, 128, 64, 16, 256, 32]
    assert list(linear.output_bytes) == [4 * 128 * width for width in widths]


def test_operator_times_add_up_to_the_measured_forward():
    model, batch, loss = ZOO["gpt2"]()
    recorded = profile(model, batch, loss=loss, repeats=2)
    total = sum(operator.forward_ns for operator in recorded.operators)
    assert total >= 0.99 * recorded.forward_ns
    assert recorded.step_ns > 0
    assert not recorded.times_from.is_estimate


@pytest.mark.parametrize(
    ("model", "batch", "loss", "message"),
    [
        (3, torch.ones(2), None, "must be a torch.nn.Module"),
        (nn.Linear(2, 2).requires_grad_(False), torch.ones(2, 2), None, "no parameter that requires a gradient"),
        (nn.Linear(2, 2), "words", None, "holds no tensor"),
        (nn.Linear(2, 2), torch.ones(2, 2), 5, "loss must be a function"),
        (nn.Linear(2, 2), torch.ones(2, 2), lambda out: out, "must be one number"),
        (nn.Linear(2, 2), torch.ones(2, 2), lambda out: out.detach().sum(), "depends on no parameter"),
        (nn.Embedding(2, 2), torch.ones(2, dtype=torch.long), lambda out: None, "got NoneType"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(model, batch, loss, message):
    with pytest.raises(BatchError, match=message):
        profile(model, batch, loss=loss, repeats=0)


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(BatchError, match="neither the model's nor the loss's"):
        profile(nn.Linear(2, 2), torch.ones(2, 2), optimizer=optimizer, repeats=0)


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(BatchError, match="adamw"):
        profile(nn.Linear(2, 2), torch.ones(2, 2), optimizer="adamwx", repeats=0)


class Tied(nn.Module):
    """Its largest moment is the sum of the tied weight's two gradients, the first of which is a view."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 64), nn.Linear(64, 4096, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens)).logsumexp(-1).mean()


def test_the_sum_of_a_tied_weights_gradients_is_recorded_as_the_allocator_sees_it():
    profiled = profile(Tied(), torch.arange(8), loss=lambda out: out, repeats=1)
    assert profiled.unseen_bytes == 0
    weight = 4096 * 64 * 4
    assert profiled.peak_bytes() - profiled.fixed_bytes() == pytest.approx(3 * weight, rel=0.01)


def test_what_is_alive_before_measuring_is_left_out_of_collections_meanwhile():
    gc.unfreeze()
    with collected():
        # What other threads let go of meanwhile is no longer among them.
        frozen = gc.get_freeze_count()
        with collected():
            assert 0 < gc.get_freeze_count() <= frozen
        assert 0 < gc.get_freeze_count() <= frozen
        made = [[] for _ in range(1000)]
        collect()
        assert gc.get_freeze_count() > frozen + len(made) / 2
    assert gc.get_freeze_count() == 0
    collect()
    assert gc.get_freeze_count() == 0
