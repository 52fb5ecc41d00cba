"""Plans that are timed in turn: the measured best is returned, and what is learnt corrects the times of operators."""

import pytest
import torch
from remat.planner import BudgetError, PlanError, Planner, verify
from remat.planner.finding import racing
from remat.planner.finding.calibration import BOUNDS, OTHER, Observation, corrected, factors, kind_of
from remat.planner.finding.search import Effort
from remat.planner.finding.times_in_turn import UNPLANNED, TimesInTurn
from remat.profiler.times import Spread
from remat.solvers import SOLVERS, Segment

from .small_step import build

MODEL, BATCH, LOSS = build(batch=256)
STEP_NS = 1_000_000
EFFORT = Effort(solver="dp", time_limit_s=5, gap=0.0, say=lambda words: None)


@pytest.fixture(scope="module")
def planner():
    return Planner.of(MODEL, BATCH, loss=LOSS, repeats=1)


def observed(added_ns, *, spread=0, host=1000, **replayed):
    names = {"convolutions": 0, "matrix products and attention": 0, "normalizations": 0, OTHER: 0} | replayed
    added = Spread(low_ns=added_ns - spread, median_ns=added_ns, high_ns=added_ns + spread)
    return Observation(replayed_ns=names, host_ns=host, added_ns=added, step_ns=STEP_NS)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten.convolution.default", "convolutions"),
        ("aten.addmm.default", "matrix products and attention"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "matrix products and attention"),
        ("aten.native_layer_norm.default", "normalizations"),
        ("aten.gelu.default", OTHER),
    ],
)
def test_operators_are_told_apart_by_what_they_are(operator, kind):
    assert kind_of(operator) == kind


def test_a_kind_that_replays_take_longer_for_is_found():
    seen = [observed(151_000, convolutions=100_000), observed(301_000, convolutions=200_000)]
    found = factors([*seen, observed(101_000, normalizations=100_000)])
    assert found.by_kind["convolutions"] == pytest.approx(1.5, abs=0.05)
    assert found.by_kind["normalizations"] == pytest.approx(1, abs=0.01)
    assert found.by_kind[OTHER] == 1
    assert "convolutions by 1.48" in found.words()
    assert "normalizations" not in found.words()


def test_a_noisy_measurement_moves_little_and_none_moves_far():
    noisy = factors([observed(151_000, spread=500_000, convolutions=100_000)])
    assert noisy.by_kind["convolutions"] == pytest.approx(1, abs=0.01)
    assert noisy.words() == ""
    wild = factors([observed(5_000_000, convolutions=100_000)])
    assert wild.by_kind["convolutions"] == BOUNDS[1]


def test_what_a_plan_replays_is_what_it_was_priced_by(planner):
    bridge = planner.without_save_sets().bridge
    operators = planner.profile.operators

    def host_ns(candidate):
        replayed = bridge.replayed([Segment(start=candidate.start, stop=candidate.stop)])
        return candidate.replay_ns - sum(operators[k].forward_ns for k in replayed)

    paid = {(candidate.start, candidate.stop): host_ns(candidate) for candidate in bridge.candidates}
    assert min(paid.values()) > 0
    solution = SOLVERS["dp"](bridge.problem(int(0.6 * planner.profile.peak_bytes())))
    seen = Observation.of(bridge, solution, added_ns=Spread.of([1]))
    assert solution.segments
    assert seen.host_ns == sum(paid[segment.start, segment.stop] for top in solution.segments for segment in top.walk())
    assert sum(seen.replayed_ns.values()) + seen.host_ns == solution.added_ns


def test_corrected_times_are_the_profiles_but_for_the_factors(planner):
    seen = factors([observed(201_000, **{"matrix products and attention": 100_000})])
    profile = corrected(planner.profile, seen)
    factor = seen.by_kind["matrix products and attention"]
    assert factor > 1.5
    for k, (before, after) in enumerate(zip(planner.profile.operators, profile.operators, strict=True)):
        grows = k < profile.loss_stop and kind_of(before.operator) == "matrix products and attention"
        assert after.forward_ns == (int(factor * before.forward_ns) if grows else before.forward_ns)
    assert planner.repriced(profile).bridge.candidates[0].start == planner.bridge.candidates[0].start


def timed_by(cost):
    """Return a stand-in for the clock: an arm takes what `cost` says of its place among the plans."""
    heats = []

    def time_in_turn(step, arms, device, rounds, say):
        heats.append(list(arms))
        for name, arm in arms.items():
            with arm():
                assert name
        times = {name: (STEP_NS if name == UNPLANNED else cost(name),) * rounds for name in arms}
        return TimesInTurn(rounds=times)

    return time_in_turn, heats


def test_the_plan_that_is_measured_best_is_returned_and_the_race_is_told(planner, monkeypatch):
    clock, heats = timed_by(lambda name: STEP_NS + (50_000 if name.startswith("plan 2") else 400_000))
    monkeypatch.setattr(racing, "time_in_turn", clock)
    first = planner.plan("60%", solver="sqrt")
    made = planner.plan("60%", solver="sqrt", race=3)
    assert heats[0][-1] == UNPLANNED
    assert 2 <= len(heats[0]) - 1 <= 3
    assert made.segments != first.segments
    assert made.measured_overhead == pytest.approx(0.05)
    assert made.predicted_peak_bytes <= made.budget_bytes
    (told,) = (note for note in made.notes if note.startswith("raced, 5 rounds in turn: plan 1 of sqrt"))
    assert ". Taken: plan 2 of " in told
    assert told.endswith(", measured 5.0 %")
    assert "measured 5.0 %" in str(made)
    assert verify(MODEL, BATCH, made, loss=LOSS, repeats=0).exact
    assert "forward" not in vars(MODEL)


def test_times_that_were_corrected_may_bring_one_more_plan_into_the_race(planner, monkeypatch):
    clock, heats = timed_by(lambda name: STEP_NS + (100_000 if name.startswith("plan 3") else 400_000))
    monkeypatch.setattr(racing, "time_in_turn", clock)
    other = planner.find(int(0.8 * planner.profile.peak_bytes()), EFFORT, check=False)
    monkeypatch.setattr(type(planner), "repriced", lambda self, profile: Fixed(other))
    made = planner.plan("90%", solver="dp", race=2)
    assert len(heats) == 2
    assert [name[:6] for name in heats[1]] == [heats[1][0][:6], "plan 3", UNPLANNED[:6]]
    assert made.segments == other.draft.segments
    assert made.measured_overhead == pytest.approx(0.1)


class Fixed:
    """A planner that always finds the same."""

    def __init__(self, found):
        self.found = found

    def find(self, limit, effort, *, check):
        return self.found


@pytest.mark.parametrize("race", [-1, 2.0, True, "3"])
def test_a_race_of_what_is_no_number_is_refused(planner, race):
    with pytest.raises(BudgetError, match=r"race must be a number of plans"):
        planner.plan("60%", race=race)


def test_what_is_not_here_is_not_raced():
    with torch.device("meta"):
        model, batch, loss = build(batch=64, blocks=2)
    planner = Planner.of(model, batch, loss=loss, device="h100-80gb")
    with pytest.raises(PlanError, match=r"race=2 times plans in real steps here.*a card that is not there"):
        planner.plan("60%", race=2)
