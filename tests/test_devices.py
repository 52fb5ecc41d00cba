"""What devices differ in, by counters kept by hand; memory that runs out; devices that are refused."""

from __future__ import annotations

import pytest
import torch
from remat.planner import apply, plan
from remat.planner.finding.checking import Checker
from remat.planner.finding.planner import Planner
from remat.profiler import BatchError, profile
from remat.profiler.allocator import allocations_inside
from remat.profiler.caching_allocator import AllocatorSettings
from remat.profiler.devices import KINDS, CudaDevice, Device, DeviceError, device_of, is_out_of_memory
from remat.profiler.internals import FakeTensorMode
from remat.profiler.profiling import _device_notes
from remat.profiler.recorder import Recorder
from remat.profiler.reserved import reserved_bytes
from remat.profiler.session import open_session
from torch import nn

from .emulated_cuda import Counters

CARD = torch.device("cuda:0")
MIB = 1 << 20


def mean_square(out):
    return out.square().mean()


def small():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
    return model, torch.randn(256, 32)


def test_memory_that_the_allocator_keeps_without_need_counts_as_free(monkeypatch):
    card = Counters(monkeypatch, total=1000, others=100)
    card.take(600)
    card.give(500)
    assert CudaDevice(CARD).free_bytes() == 800
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 0.5)
    assert CudaDevice(CARD).free_bytes() == 400


def test_the_context_is_what_is_used_beside_the_allocator(monkeypatch):
    card = Counters(monkeypatch, others=500 * MIB)
    card.take(3 * MIB)
    assert CudaDevice(CARD).context_bytes() == 500 * MIB
    card.others = 30 << 30
    assert CudaDevice(CARD).context_bytes() < 2 << 30


def test_what_libraries_keep_is_measured_by_the_first_run(monkeypatch):
    card = Counters(monkeypatch)
    workspace = []

    def run():
        if not workspace:
            card.take(8 * MIB)
            workspace.append(1)
        card.take(5)
        card.give(5)

    assert CudaDevice(CARD).warm_up(run) == 8 * MIB
    assert CudaDevice(CARD).warm_up(run) == 0


def test_windows_inside_windows_are_measured_on_a_card(monkeypatch):
    card = Counters(monkeypatch)
    card.take(1000)

    def inner():
        card.take(70)
        card.give(60)

    def outer(run):
        card.take(500)
        card.give(500)
        run(inner)
        card.take(5)
        run(inner)

    measured = allocations_inside(lambda run: run(lambda: outer(run)), CARD)
    assert measured == [(500, 25), (70, 10), (70, 10)]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_devices_that_cannot_be_measured_are_refused_by_name(kind):
    with pytest.raises(DeviceError, match=kind):
        device_of(torch.device(kind))


class Warmed(Device):
    """A device whose first step is not like the others."""

    runs = 0

    def warm_up(self, run):
        run()
        Warmed.runs += 1
        return 8 * MIB


def test_no_measured_step_is_the_first(monkeypatch):
    monkeypatch.setitem(KINDS, "cpu", Warmed)
    monkeypatch.setattr(Warmed, "runs", 0)
    model, x = small()
    found = []

    def measured():
        found.append(Warmed.runs)
        return []

    monkeypatch.setattr("remat.profiler.scratch.ScratchMeter.learn", lambda *_: measured())
    plain = profile(model, x, loss=mean_square, repeats=0)
    warm = profile(model, x, loss=mean_square, optimizer="adamw")
    assert found == [1]
    assert warm.library_bytes == 8 * MIB
    assert warm.fixed_bytes() - warm.parts.optimizer == plain.fixed_bytes() + 8 * MIB + warm.unseen_bytes
    assert any("libraries keep" in note for note in warm.notes)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def untouched(model, state):
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model)


def test_a_trial_that_runs_out_of_memory_leaves_a_plan_that_says_so(monkeypatch):
    model, x = small()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    planner = Planner.of(model, x, loss=mean_square, repeats=0)
    monkeypatch.setattr(type(planner.session.step), "train", out_of_memory)
    found = planner.plan("80%", solver="dp")
    assert found.segments
    assert any("not tried" in note and "ran out" in note for note in found.notes)
    untouched(model, state)


def test_a_planned_step_that_alone_runs_out_of_memory_is_not_blamed_on_its_segments(monkeypatch):
    model, x = small()
    planner = Planner.of(model, x, loss=mean_square, repeats=0)
    segments = planner.plan("80%", solver="dp", check=False).segments
    train = type(planner.session.step).train
    count = []

    def second_fails(step):
        count.append(1)
        return train(step) if len(count) == 1 else out_of_memory()

    monkeypatch.setattr(type(planner.session.step), "train", second_fails)
    checked = Checker().check(planner.session.step, segments, 1)
    assert not checked.faults
    assert "ran out" in checked.unchecked


def test_memory_that_runs_out_in_a_measured_step_leaves_estimates(monkeypatch):
    model, x = small()
    session = open_session(model, x, mean_square)
    monkeypatch.setattr(type(session.step), "train", out_of_memory)
    found = profile(model, x, loss=mean_square, session=session)
    assert session.reference is None
    assert found.step_time_from.is_estimate
    assert any("memory ran out" in note for note in found.notes)
    assert plan(model, x, "80%", loss=mean_square, solver="dp").segments


def test_memory_that_runs_out_while_timing_leaves_estimates(monkeypatch):
    model, x = small()
    monkeypatch.setattr("remat.profiler.record_times.step_times", out_of_memory)
    found = profile(model, x, loss=mean_square)
    assert found.times_from.is_estimate
    assert any("ran out while operators were timed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_recognised(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_model_on_two_devices_is_refused_by_name():
    model, x = small()
    model[2][0] = nn.Linear(32, 128, device="meta")
    with pytest.raises(BatchError, match=r"2 devices \('0.0.weight' on cpu, '2.0.weight' on meta\)"):
        profile(model, x)


def test_what_lies_elsewhere_takes_no_memory_of_the_card():
    with FakeTensorMode():
        recorder = Recorder(round_to=512, device=CARD)
        there, here = torch.empty(100), torch.empty(100, device=CARD)
        for tensor, kind in ((there, "batch"), (here, "batch")):
            recorder.identify(tensor, kind)
    assert [storage.nbytes for storage in recorder.lives] == [0, 512]


def test_side_streams_and_trials_of_algorithms_are_named(monkeypatch):
    class Behind(Device):
        runs_behind = True

    model, x = small()
    session = open_session(model, x, mean_square)
    assert _device_notes(session, ["aten.convolution.default"]) == []
    monkeypatch.setitem(KINDS, "cpu", Behind)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    named = _device_notes(session, ["aten.convolution.default", "aten.record_stream.default"])
    assert ["record_stream" in named[0], "cudnn.benchmark" in named[1]] == [True, True]
    assert _device_notes(session, ["aten.mm.default"]) == []


class Reserving(Device):
    """A device whose segments run out."""

    round_to = 512
    budget_on = "reserved"

    def context_bytes(self):
        return 300 * MIB


def test_on_a_card_the_budget_is_on_reserved_bytes_and_the_context(monkeypatch):
    model, _ = small()
    x = torch.randn(8192, 32)
    planner = Planner.of(model, x, loss=mean_square, optimizer="adamw", repeats=0)
    allocated = planner.search.dry_runs.unplanned_peak_bytes()
    monkeypatch.setitem(KINDS, "cpu", Reserving)
    planner = Planner.of(model, x, loss=mean_square, optimizer="adamw", repeats=0)
    unplanned = planner.search.dry_runs.unplanned_peak_bytes()
    assert unplanned > allocated + 300 * MIB
    budget = unplanned - 8 * MIB
    found = planner.plan(budget, solver="dp", check=False)
    assert found.segments
    assert found.unplanned_peak_bytes == unplanned
    with apply(model, found):
        replayed = reserved_bytes(
            planner.session.record("dry run", planned=True),
            state_bytes=planner.profile.parts.optimizer,
            optimizer_bytes=planner.profile.parts.parameters // 4,
        )
    assert replayed.reserved_bytes + 300 * MIB <= found.predicted_peak_bytes <= budget
    assert any("of it for the context" in note for note in found.notes)


def test_settings_of_the_allocator_are_read_as_torch_reads_them():
    text = "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,backend:native"
    assert AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": text}) == AllocatorSettings(
        expandable_segments=True, max_split_bytes=128 * MIB, collection_threshold=0.8
    )
    assert AllocatorSettings.of({}) == AllocatorSettings()
