"""Times are distributions: taken in training steps, by a clock of their own, and told with their spread."""

from __future__ import annotations

import time
from itertools import cycle

import pandas as pd
import pytest
import torch
from remat.planner import plan, verify
from remat.planner.compare import table_cells
from remat.planner.finding.times_in_turn import UNPLANNED, TimesInTurn, time_in_turn
from remat.planner.plan import Plan
from remat.planner.plan_words import percent_range
from remat.profiler import Profile, profile
from remat.profiler.devices import device_of
from remat.profiler.step import Step
from remat.profiler.times import Spread, estimated
from remat.profiler.timing import CLEAR_NS, ENOUGH_NS, StepTimes, TimedRuns, Watched, step_times, times_of_runs
from torch import nn

CPU = torch.device("cpu")


def spread(low, median, high):
    return Spread(low_ns=low, median_ns=median, high_ns=high)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))


def square(out):
    return out.square().mean()


def times_of(forward, step, wall_over_clock=1.0):
    return StepTimes(operators_ns=(1,), forward=forward, step=step, same=True, wall_over_clock=wall_over_clock)


def test_a_spread_tells_the_shortest_the_median_and_the_longest():
    found = Spread.of([30_000_000, 10_000_000, 20_000_000, 40_000_000])
    assert (found.low_ns, found.median_ns, found.high_ns) == (10_000_000, 20_000_000, 40_000_000)
    assert str(found) == "20.0 ms (10.0 to 40.0)"
    assert found.words(estimated("by bytes")) == "20.0 ms (10.0 to 40.0; estimated)"
    assert str(Spread.of([56_100])) == "56.1 µs"
    assert Spread.of([168_400_000]).words(estimated("by bytes")) == "168.4 ms (estimated)"
    assert not found.is_steady
    assert spread(10, 12, 15).is_steady


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (times_of(spread(10, 10, 11), spread(30, 30, 31)), []),
        (times_of(spread(10, 10, 16), spread(40, 40, 41)), ["repeats of the forward differ"]),
        (times_of(spread(10, 10, 11), spread(30, 30, 50)), ["repeats of the step differ"]),
        (times_of(spread(16, 16, 16), spread(30, 30, 30)), []),
        (times_of(spread(20, 20, 20), spread(30, 30, 30)), ["forward took 67 % of the measured step, more than usual"]),
        (times_of(spread(10, 10, 11), spread(30, 30, 31), 1.4), ["the machine is busy"]),
        (times_of(spread(10, 10, 11), None), []),
    ],
)
def test_times_that_cannot_be_right_are_doubted(times, words):
    notes = times.notes()
    assert len(notes) == len(words)
    assert all(note.startswith(word) for note, word in zip(notes, words, strict=True))
    assert times.doubts() == [note for note in notes if "busy" not in note]


def test_a_doubtful_profile_is_measured_again_and_then_says_so(monkeypatch):
    steady, wild = spread(10, 10, 11), spread(10, 10, 99)
    operators = profile(chain(), torch.randn(8, 32), loss=square, repeats=0).loss_stop
    known = {"operators_ns": (1,) * operators, "step": spread(30, 30, 30), "same": True, "wall_over_clock": 1.0}
    measurements = cycle([StepTimes(forward=wild, **known), StepTimes(forward=steady, **known)])
    monkeypatch.setattr("remat.profiler.record_times.step_times", lambda *args, **kwargs: next(measurements))
    calm = profile(chain(), torch.randn(8, 32), loss=square)
    assert calm.forward == steady
    assert not calm.notes
    monkeypatch.setattr(
        "remat.profiler.record_times.step_times", lambda *args, **kwargs: StepTimes(forward=wild, **known)
    )
    assert any("repeats of the forward differ widely" in note for note in profile(chain(), torch.randn(8, 32)).notes)


def test_operators_are_timed_in_a_forward_that_saves():
    saved = []

    class Watches(nn.Module):
        def forward(self, x):
            out = x.exp()
            saved.append(out.grad_fn._saved_result is not None)
            return out

    model = nn.Sequential(nn.Linear(8, 8), Watches(), nn.Linear(8, 8))
    step = Step.of(model, torch.randn(4, 8), square)
    found = step_times(step, ["aten.exp.default"], CPU, 2, trains=True)
    assert saved
    assert all(saved)
    assert found.step is not None
    assert found.step.median_ns > found.forward.median_ns
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_does_not_fit_is_timed_by_its_forward_alone():
    step = Step.of(chain(), torch.randn(4, 32), square)
    step.model.register_full_backward_hook(lambda *_: pytest.fail("backward ran"))
    found = step_times(step, ["aten.exp.default"], CPU, 2, trains=False)
    assert found.step is None
    assert not found.same


def test_operators_of_blocks_of_a_kind_take_the_median_over_all_blocks():
    timed = TimedRuns(Step.of(chain(), torch.randn(4, 32), square), device_of(CPU))
    timed.run()
    blocks = [range(1, 3), range(3, 5), range(5, 7)]
    marked = [[9, 10, 20, 11, 21, 90, 80, 3], [8, 10, 20, 12, 22, 13, 23, 4]]
    found = times_of_runs(timed, marked, same=True, alike=[blocks])
    assert found.operators_ns == (8, 11, 21, 11, 21, 11, 21, 3)


def test_blocks_of_a_kind_make_up_for_repeats(monkeypatch):
    marked = []
    monkeypatch.setattr("remat.profiler.timing._marked_forward", lambda *_: (marked.append(1), (["a", "b"], [1, 2]))[1])
    step = Step.of(chain(), torch.randn(4, 32), square)
    step_times(step, ["a", "b"], CPU, 4, trains=True, alike=[[range(1), range(1, 2)]])
    assert len(marked) == 4
    step_times(step, ["a", "b"], CPU, 2, trains=True, alike=[[range(1), range(1, 2)]])
    assert len(marked) == 6
    step_times(step, ["a", "b"], CPU, 4, trains=True, alike=[[range(1, 2)] * 4])
    assert len(marked) == 8


def watched(step_ns, operators):
    timed = TimedRuns(Step.of(chain(), torch.randn(4, 32), square), device_of(CPU))
    timed.step_ns, timed.forward_ns, timed.wall_ns = list(step_ns), [ns // 3 for ns in step_ns], sum(step_ns)
    return Watched(timed=timed, operators=operators)


def test_a_long_step_that_was_watched_for_its_memory_is_not_run_again_for_times(monkeypatch):
    long = [("a", ENOUGH_NS // 6), ("b", ENOUGH_NS // 6), ("c", 2 * ENOUGH_NS // 3)]
    assert watched([ENOUGH_NS, ENOUGH_NS + 9], long).tells_times()
    assert not watched([ENOUGH_NS, 2 * ENOUGH_NS], long).tells_times()
    assert not watched([ENOUGH_NS - 1, ENOUGH_NS], long).tells_times()
    assert not watched([ENOUGH_NS, ENOUGH_NS], long * (ENOUGH_NS // CLEAR_NS)).tells_times()
    found = watched([ENOUGH_NS + 8, ENOUGH_NS], long).times(["a", "b"], ())
    assert found.same
    assert found.operators_ns == (ENOUGH_NS // 6, ENOUGH_NS // 6)
    assert found.step.median_ns == ENOUGH_NS
    model, x = chain(), torch.randn(8, 32)
    monkeypatch.setattr("remat.profiler.timing.ENOUGH_NS", 0)
    monkeypatch.setattr("remat.profiler.timing.CLEAR_NS", 0)
    monkeypatch.setattr("remat.profiler.times.STEADY", 1e9)
    monkeypatch.setattr("remat.profiler.record_times.step_times", lambda *_, **__: pytest.fail("run again"))
    recorded = profile(model, x, loss=square)
    assert not recorded.times_from.is_estimate
    assert all(operator.forward_ns > 0 for operator in recorded.operators[: recorded.loss_stop])


def test_the_clock_of_a_cpu_does_not_run_while_the_thread_waits():
    place = device_of(CPU)
    started = place.clock_ns()
    time.sleep(0.2)
    assert place.clock_ns() - started < 100_000_000
    assert "CPU time" in place.clock_words


def test_a_profile_keeps_its_spread_in_its_file():
    recorded = profile(chain(), torch.randn(64, 32), loss=square, repeats=2)
    assert recorded.forward.low_ns <= recorded.forward_ns <= recorded.forward.high_ns
    assert recorded.step.low_ns <= recorded.step_ns <= recorded.step.high_ns
    assert Profile.from_json(recorded.to_json()) == recorded
    assert "measured: CPU time" in str(recorded)
    assert profile(chain(), torch.randn(64, 32), loss=square, repeats=0).times_from.is_estimate


def test_a_plan_and_its_verification_tell_ranges():
    model, x = chain(), torch.randn(256, 32)
    made = plan(model, x, "80%", solver="dp", loss=square, repeats=2)
    low, high = made.predicted_overhead_range
    assert 0 < low <= made.predicted_overhead <= high
    assert Plan.from_json(made.to_json()) == made
    assert f"{100 * made.predicted_overhead:.1f} % ({100 * low:.1f} to {100 * high:.1f})" in str(made)
    found = verify(model, x, made, loss=square, repeats=3)
    assert found.measured_overhead_range[0] <= found.measured_overhead_range[1]
    assert "added time: predicted" in str(found)
    assert " to " in str(found).partition("measured")[2]


def test_shares_are_written_with_their_range():
    assert percent_range(0.18, (0.151, 0.223)) == "18.0 % (15.1 to 22.3)"
    assert percent_range(0.18, None) == "18.0 %"
    assert percent_range(None, None, unknown="not measured") == "not measured"


def test_rounds_in_turn_give_an_arm_s_median_and_the_range_of_its_pairs():
    found = TimesInTurn(rounds={UNPLANNED: (100, 110, 200), "a": (120, 110, 250)})
    assert found.overhead("a") == pytest.approx(120 / 110 - 1)
    assert found.overhead_range("a") == pytest.approx((0.0, 0.25))
    assert found.overhead("b") is None


def test_every_arm_runs_a_step_untimed_before_the_timed_one(monkeypatch):
    model = chain()
    ran = []
    step = Step.of(model, torch.randn(4, 32), square)
    monkeypatch.setattr("remat.planner.finding.times_in_turn.train_once", lambda _: ran.append(1))
    found = time_in_turn(step, {UNPLANNED: lambda: torch.enable_grad()}, CPU, 3, lambda _: None)
    assert len(ran) == 6
    assert len(found.rounds[UNPLANNED]) == 3


def test_a_row_of_a_comparison_tells_ranges():
    row = pd.Series(
        {
            "solver": "dp",
            "budget_bytes": 1,
            "status": "optimal",
            "predicted_peak_bytes": 1,
            "predicted_overhead": 0.1,
            "predicted_overhead_low": 0.08,
            "predicted_overhead_high": 0.12,
            "measured_peak_bytes": None,
            "measured_overhead": None,
            "lower_bound_overhead": 0.1,
            "gap": 0.0,
            "segments": 2,
            "solve_seconds": 1.0,
        }
    )
    assert "10.0 % (8.0 to 12.0)" in table_cells(row)
