"""A card's figures by measurement: what is timed, what is written, and what is predicted from it."""

import json

import pytest
import torch
from remat.planner import Plan, plan
from remat.profiler import profile
from remat.profiler.calibrate import Sizes, calibrate
from remat.profiler.cards import CardError, card
from remat.profiler.devices import DeviceError
from torch import nn

SMALL = Sizes(rows=128, copied_bytes=1 << 20, attention=(1, 2, 64, 32), repeats=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("cards") / "mine.json"
    calibrate("cpu", SMALL).save(target)
    return target


def test_a_measured_card_is_read_as_it_was_written(path):
    found = card(str(path))
    assert found.name == str(path)
    assert found.measured
    assert found.rates.keys() >= {"float64", "float32", "bfloat16"}
    assert all(rate > 0 for rate in found.rates.values())
    assert found.bandwidth > 0
    assert found.reached.products == found.reached.bandwidth == 1
    assert found.reached.attention > 0
    assert found.source.startswith("measured on cpu, 20")


def test_a_rate_is_operations_over_the_median_of_their_times(monkeypatch):
    monkeypatch.setattr("remat.profiler.calibrate._seconds", lambda device, run, repeats: 0.5)
    found = calibrate("cpu", SMALL)
    assert found.rate("float32") == 2 * 128**3 / 0.5
    assert found.bandwidth == 2 * (1 << 20) / 0.5
    assert found.reached.attention == pytest.approx(4 * 2 * 64 * 64 * 32 / 0.5 / found.rate("bfloat16"))


def test_times_of_a_measured_card_follow_its_figures_and_say_so(path, tmp_path):
    figures = json.loads(path.read_text())
    halved = tmp_path / "slower.json"
    slower = figures | {"bandwidth": figures["bandwidth"] / 2}
    slower["rates"] = {dtype: rate / 2 for dtype, rate in figures["rates"].items()}
    halved.write_text(json.dumps(slower))
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.empty(4096, 256)
    fast, slow = (profile(model, batch, device=str(where)) for where in (path, halved))
    assert slow.step_ns == pytest.approx(2 * fast.step_ns, rel=1e-4)
    made = plan(model, batch, "95%", solver="dp", device=str(path))
    assert any("predicted from rates that were measured on cpu" in note for note in made.notes)
    assert str(path) in str(Plan.from_json(made.to_json()))


def test_a_card_that_is_not_here_cannot_be_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="there is no cuda here to be measured: run this on the machine that has"):
        calibrate("cuda", SMALL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("{", "does not hold a card's figures"),
        ('{"format": 1}', "does not hold a card's figures.*remat calibrate --out"),
        ('{"format": 99}', "of format 99, this remat reads 1: calibrate again"),
    ],
)
def test_a_file_that_holds_no_card_is_refused(tmp_path, text, words):
    target = tmp_path / "card.json"
    if text is not None:
        target.write_text(text)
    with pytest.raises(CardError, match=words):
        card(str(target))
