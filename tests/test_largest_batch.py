"""`largest_batch` finds the size that trains most samples per second, and does not try what cannot fit."""

import sys
from functools import cache

import pytest
import torch
from remat.planner import InfeasibleBudgetError, Planner
from remat.planner.budget import BudgetError
from remat.planner.finding.dry_runs import DryRuns
from remat.planner.largest_batch import BatchSearch, BatchSize, largest_batch
from remat.planner.pictures.throughput import throughput_by_batch

from .small_step import build, squares

BUDGET = 5 << 20


def make_batch(size):
    return torch.ones(size, 32)


@cache
def searched() -> BatchSearch:
    model = build(blocks=2)[0]
    return largest_batch(
        make_batch, BUDGET, model=model, sizes=(64, 512, 1024, 8192, 16384), solver="dp", loss=squares, measure=True
    )


def test_small_sizes_run_as_they_are_and_larger_ones_are_planned():
    by_size = {entry.size: entry for entry in searched().tried}
    assert by_size[64].segments == 0
    assert by_size[64].predicted_overhead == 0
    assert by_size[64].predicted_peak_bytes == by_size[64].unplanned_peak_bytes
    assert by_size[1024].unplanned_peak_bytes > BUDGET
    assert by_size[1024].segments > 0
    assert by_size[1024].predicted_peak_bytes <= BUDGET


def test_nothing_is_tried_above_a_size_that_does_not_fit():
    assert [entry.size for entry in searched().tried] == [64, 512, 1024, 8192]
    last = searched().tried[-1]
    assert not last.fits
    assert last.least_peak_bytes > BUDGET
    assert str(last.least_peak_bytes) in last.note


def test_the_chosen_size_has_the_best_throughput():
    search = searched()
    rates = {entry.size: entry.samples_per_second for entry in search.tried if entry.fits}
    assert rates[search.size] == max(rates.values())
    assert search.plan is search.plans[search.size]
    for entry in search.tried:
        if entry.fits:
            seconds = entry.step_ns * 1e-9 * (1 + entry.predicted_overhead)
            assert entry.samples_per_second == pytest.approx(entry.size / seconds)


def test_a_size_that_fits_but_for_what_is_reserved_beside_its_tensors_is_planned(monkeypatch):
    monkeypatch.setattr(DryRuns, "beside_bytes", lambda runs, record: 2**20)
    model, step = build(blocks=2)[0], {"solver": "dp", "loss": squares, "repeats": 0}
    peak = Planner.of(model, make_batch(512), loss=squares, repeats=0).profile.peak_bytes()
    (tried,) = largest_batch(make_batch, peak + 2**19, model=model, sizes=(512,), **step).tried
    assert tried.fits
    assert tried.segments > 0
    assert tried.unplanned_peak_bytes == peak + 2**20


def test_the_chosen_size_is_measured_on_request():
    assert searched().verification.exact
    assert searched().verification.measured_peak_bytes <= 1.05 * BUDGET
    assert searched().verification.samples_per_second > 0


def test_the_table_marks_the_chosen_size_and_what_does_not_fit():
    lines = searched().table().splitlines()
    unsure = [line for line in lines if line.endswith(f"their ranges reach that of {searched().size}")]
    assert len(unsure) == bool(searched().no_worse)
    assert len(lines) == 1 + len(searched().tried) + len(unsure)
    assert [line.split()[0] for line in lines if line.endswith("<- chosen")] == [str(searched().size)]
    assert [line.split()[0] for line in lines if line.endswith("does not fit")] == ["8192"]
    assert list(searched().to_frame()["size"]) == [64, 512, 1024, 8192]


def test_sizes_that_the_noise_does_not_tell_apart_are_named():
    rates = {1: (90.0, 110.0), 2: (106.0, 118.0), 4: (105.0, 125.0), 8: (40.0, 60.0)}
    tried = tuple(
        BatchSize(size=size, samples_per_second=sum(ends) / 2, samples_per_second_range=ends, segments=0)
        for size, ends in rates.items()
    )
    search = BatchSearch(budget_bytes=BUDGET, tried=tried, plans={})
    assert (search.size, search.no_worse) == (4, [1, 2])
    lines = search.table().splitlines()
    assert lines[3].split()[:4] == ["4", "115", "(105", "to"]
    assert lines[-1] == "batches of 1, 2 may train as many: their ranges reach that of 4"


def test_the_curve_has_units_and_the_budget():
    rates, peaks = throughput_by_batch(searched()).axes
    assert rates.get_ylabel().endswith("[samples/s]")
    assert peaks.get_ylabel().endswith("iB]")
    assert peaks.get_xlabel().endswith("[samples]")
    assert any(label.get_text() == "budget 5.0 MiB" for label in peaks.get_legend().get_texts())


def test_without_sizes_it_doubles_and_then_looks_around_the_best(monkeypatch):
    def fake(self, size):
        fits = size <= 40
        rate = 100.0 - abs(size - 22) if fits else None
        entry = BatchSize(size=size, samples_per_second=rate, segments=0 if fits else None)
        self.tried[size] = entry
        if fits:
            self.plans[size] = None
        return entry

    monkeypatch.setattr(sys.modules[largest_batch.__module__]._Search, "try_size", fake)
    search = largest_batch(make_batch, BUDGET, model=build(blocks=1)[0])
    sizes = [entry.size for entry in search.tried]
    assert {1, 2, 4, 8, 16, 32, 64} <= set(sizes)
    assert max(sizes) == 64
    assert abs(search.size - 22) <= 22 // 8
    assert len(sizes) <= 14


def test_a_budget_below_the_smallest_size_is_refused():
    with pytest.raises(InfeasibleBudgetError, match="smallest peak found"):
        largest_batch(make_batch, 1000, model=build(blocks=1)[0], sizes=(4,), solver="dp", loss=squares, repeats=0)


@pytest.mark.parametrize(
    ("budget", "options", "words"),
    [
        ("60%", {}, "a share has no meaning"),
        (BUDGET, {"sizes": (0,)}, "at least 1"),
        (BUDGET, {"sizes": ()}, "at least 1"),
        (BUDGET, {"solver": "oracle"}, "unknown solver"),
    ],
)
def test_what_cannot_be_searched_is_said(budget, options, words):
    with pytest.raises(BudgetError, match=words):
        largest_batch(make_batch, budget, model=build(blocks=1)[0], **options)
