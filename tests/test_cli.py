"""The command line does the whole way from a factory to a verified plan, and says mistakes in one line."""

import json
import re
import sys
from pathlib import Path

import pytest
from remat.planner import Plan
from remat.planner.show.cli import main

FACTORIES = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

def build():
    return nn.Sequential(*(Block() for _ in range(3))), torch.randn(256, 32), lambda out: out.square().mean()

def without_loss():
    return build()[:2]

def failing():
    raise KeyError("no such checkpoint")

def wrong_count():
    return build()[0]

def wrong_model():
    return "model", torch.randn(2)

def wrong_batch():
    return build()[0], "batch"

number = 3
"""


@pytest.fixture
def remat(tmp_path, monkeypatch, capsys):
    """Run the command line in a folder with the factories; give exit code, standard output and standard error."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["remat", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run


def test_plan_writes_a_plan_that_verify_confirms(remat):
    code, out, err = remat(
        "plan", "--model", "factories.py:build", "--budget", "70%", "--solver", "dp", "--out", "plan.json"
    )
    assert code == 0, err
    assert "Where the memory is" in out
    assert "instead of" in out
    plan = Plan.load("plan.json")
    assert plan.segments
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    code, out, err = remat("verify", "--model", "factories.py:build", "--plan", "plan.json", "--repeats", "1")
    assert code == 0, err
    assert "exact against the unmodified model" in out
    assert "NOT exact" not in out


def test_plan_counts_one_rank_of_a_sharded_model(remat):
    sharded = ["--ranks", "2", "--units", "*"]
    code, out, err = remat("plan", "--model", "factories.py:build", "--budget", "80%", "--out", "plan.json", *sharded)
    assert code == 0, err
    assert "on each of 2 ranks, budget" in out
    plan = Plan.load("plan.json")
    assert (plan.ranks, plan.units) == (2, ("0", "1", "2"))
    code, out, err = remat("verify", "--model", "factories.py:build", "--plan", "plan.json", "--repeats", "0")
    assert code == 0, err
    assert "allowed on each of 2 ranks" in out


def test_profile_shows_where_the_memory_is_and_writes_it(remat):
    code, out, err = remat(
        "profile",
        "--model",
        "factories:without_loss",
        "--optimizer",
        "adamw",
        "--repeats",
        "0",
        "--out",
        "profile.json",
    )
    assert code == 0, err
    assert re.search(r"activations kept for backward\s+[\d.]+ [KM]iB\s+\d+%", out)
    assert "estimate" in out
    assert json.loads(Path("profile.json").read_text())["model"] == "Sequential"


def test_compare_writes_a_table_and_a_picture(remat):
    code, out, err = remat(
        "compare",
        "--model",
        "factories.py:build",
        "--budget",
        "80%",
        "--budget",
        "1KB",
        "--solver",
        "sqrt",
        "--solver",
        "dp",
        "--out",
        "c.csv",
        "--picture",
        "c.png",
    )
    assert code == 0, err
    assert "infeasible" in out
    assert len(Path("c.csv").read_text().splitlines()) == 5
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--budget", "60%"], "Missing option '--model'"),
        (["plan", "--model", "factories.py", "--budget", "60%"], "expected FILE.py:FACTORY"),
        (["plan", "--model", "nowhere.py:build", "--budget", "60%"], "there is no file nowhere.py"),
        (["plan", "--model", "nowhere:build", "--budget", "60%"], "there is no module 'nowhere'"),
        (["plan", "--model", "factories.py:made", "--budget", "60%"], "made is not there in factories.py"),
        (["plan", "--model", "factories.py:number", "--budget", "60%"], "number is not callable"),
        (["plan", "--model", "factories.py:failing", "--budget", "60%"], "raises KeyError: 'no such checkpoint' (line"),
        (["plan", "--model", "factories.py:wrong_count", "--budget", "60%"], "(model, batch, loss), got Sequential"),
        (["plan", "--model", "factories.py:wrong_model", "--budget", "60%"], "the model is a str"),
        (["plan", "--model", "factories.py:wrong_batch", "--budget", "60%"], "batch holds no tensor"),
        (["plan", "--model", "factories.py:build", "--budget", "plenty"], "cannot read the budget 'plenty'"),
        (["plan", "--model", "factories.py:build", "--budget", "1KB"], "the smallest peak found is"),
        (["plan", "--model", "factories.py:build", "--budget", "60%", "--solver", "x"], "unknown solver 'x'"),
        (["plan", "--model", "factories.py:build", "--budget", "60%", "--headroom", "2"], "headroom must be a share"),
        (["plan", "--model", "factories.py:build", "--budget", "60%", "--out", "no/p.json"], "there is no folder no"),
        (["plan", "--model", "factories.py:build", "--budget", "60%", "--device", "tpu"], "Invalid value"),
        (["plan", "--model", "factories.py:build", "--budget", "60%", "--units", "h.*"], "no module has such a path"),
        (["plan", "--model", "factories.py:build", "--budget", "60%", "--ranks", "0"], "Invalid value"),
        (["verify", "--model", "factories.py:build", "--plan", "none.json"], "none.json: cannot read the plan file"),
        (["paint"], "No such command 'paint'"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error(remat, arguments, words):
    code, _, err = remat(*arguments)
    mistakes = [line for line in err.splitlines() if not re.match(r"\[\d+ s\] ", line)]
    assert code == 2
    assert len(mistakes) == 1
    assert mistakes[0].startswith("remat: ")
    assert words in mistakes[0]


def test_a_plan_for_another_model_is_refused(remat):
    assert remat("plan", "--model", "factories.py:build", "--budget", "90%", "--out", "plan.json")[0] == 0
    Path("other.py").write_text(FACTORIES.replace("range(3)", "range(2)"))
    code, _, err = remat("verify", "--model", "other.py:build", "--plan", "plan.json")
    assert code == 2
    assert "the plan was made for another model" in err


@pytest.mark.parametrize("command", ["profile", "plan", "compare", "verify", "report", "demo"])
def test_help_gives_every_option_a_meaning(remat, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = remat(command, "--help")
    assert code == 0
    assert "Example" in out
    for line in out.splitlines():
        if line.startswith("│ ") and "--" in line:
            assert re.search(r"  [A-Z]", line), line


def test_the_demo_writes_its_files(remat):
    pytest.importorskip("transformers")
    code, out, err = remat("demo", "--small", "--out", "made")
    assert code == 0, err
    assert "exact against the unmodified model" in out
    assert {path.name for path in Path("made").iterdir()} == {
        "plan.json",
        "comparison.csv",
        "memory_over_time.png",
        "peak_against_overhead.png",
    }
    assert Plan.load("made/plan.json").segments


def test_without_transformers_the_demo_says_what_to_install(remat, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = remat("demo", "--small")
    assert code == 2
    assert "pip install transformers" in err
