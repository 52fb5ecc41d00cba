"""The command line does the whole way from a factory to a verified plan, and says mistakes in one line."""

import json
import re
import subprocess
import sys
import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from remat.command_line.app import main
from remat.command_line.commands import COMMANDS
from remat.command_line.failures import MEANINGS
from remat.command_line.options import Dtype, Output, Step
from remat.command_line.terminal import Terminal, TimeLeft
from remat.planner import Plan, StepOptions, plan, verify
from remat.planner.phases import Bounded, Over, Phase
from torch import nn

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

def in_eval():
    model, *others = build()
    return model.eval(), *others

def failing():
    raise KeyError("no such checkpoint")

def quitting():
    raise SystemExit("usage: train.py DATA")

def interrupted():
    raise KeyboardInterrupt

def wrong_count():
    return build()[0]

def wrong_model():
    return "model", torch.randn(2)

def wrong_shape():
    return build()[0], torch.randn(256, 31)

def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in model:
        assert isinstance(block, Block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

def on_meta():
    with torch.device("meta"):
        return build()

def bound(size=256):
    targets = torch.zeros(size, dtype=torch.long)
    return *build()[:2], lambda out: nn.functional.cross_entropy(out, targets)

def bound_to_another():
    return bound(2)

def several():
    return [torch.randn(64, 32), torch.randn(512, 32)]

def one():
    return torch.randn(64, 32)

def by_size():
    return build()[0], lambda size: torch.randn(size, 32)

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
    monkeypatch.setenv("COLUMNS", "120")

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
        *("--budget", "80%", "--budget", "1KB", "--solver", "sqrt", "--solver", "dp", "--repeats", "0"),
        "--out",
        "c.csv",
        "--picture",
        "c.png",
    )
    assert code == 0, err
    assert "infeasible" in out
    assert len(Path("c.csv").read_text().splitlines()) == 5
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")


PLAN = ["plan", "factories.py:build", "--budget"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "nowhere:build", "--budget", "60%"], "there is no module 'nowhere'"),
        (["plan", "factories.py:made", "--budget", "60%"], "made is not there in factories.py"),
        (["plan", "factories.py:buildd", "--budget", "60%"], "did you mean 'build'?"),
        (["plan", "factories.py:number", "--budget", "60%"], "number is not callable"),
        (["plan", "factories.py:failing", "--budget", "60%"], "raises KeyError: 'no such checkpoint' (line"),
        (["plan", "factories.py:quitting", "--budget", "60%"], "it raises SystemExit: usage: train.py DATA"),
        (["plan", "factories.py:wrong_count", "--budget", "60%"], "(model, batch, loss), got Sequential"),
        (["plan", "factories.py:wrong_model", "--budget", "60%"], "the model is a str"),
        (["plan", "factories.py:wrong_batch", "--budget", "60%"], "batch holds no tensor"),
        (
            ["plan", "factories.py:wrong_shape", "--budget", "60%"],
            "the model in 0.up (Linear) raises RuntimeError: mat1",
        ),
        ([*PLAN, "60%", "--optimizer", "adan"], "unknown optimizer 'adan'"),
        ([*PLAN, "60%", "--card", "h100-8gb"], "unknown card 'h100-8gb': did you mean"),
        ([*PLAN, "60%", "--units", "h.*"], "--units 'h.*': no module has such a path"),
        ([*PLAN, "60%", "--exclude", "h.*"], "exclude 'h.*': no module of the model has such a path"),
        (["largest-batch", "factories.py:build", "--budget", "1MiB"], "the factory returns one batch"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error(remat, arguments, words):
    code, out, err = remat(*arguments)
    mistakes = [line for line in err.splitlines() if not re.match(r"\[\d+ s\] ", line)]
    assert (code, out) == (2, "")
    assert len(mistakes) == 1
    assert mistakes[0].startswith("remat: ")
    assert words in mistakes[0]


TYPED = {
    "--version": "",
    "--help": "",
    "plan --help": "",
    "paint": "No such command 'paint'. Did you mean 'plan'?",
    "xyz": "No such command 'xyz': choose one of profile, plan,",
    "answer": "No such command 'answer': it is there in Python only, remat.answer",
    "plan factories.py:build": "Missing option '--budget': such as 8GiB, 750MB, 60%",
    "plan --budget 60%": "missing; pass one, such as train.py:build",
    "plan a.py:b --model a.py:b --budget 60%": "given twice",
    "plan factories.py --budget 60%": "expected FILE.py:FUNCTION",
    "plan nowhere.py:build --budget 60%": "there is no file nowhere.py",
    "plan factories.py:build --budget plenty": "cannot read the budget 'plenty'",
    "plan factories.py:build --budget 60": "the budget '60' has no unit",
    "plan factories.py:build --budget 0.6": 'write "60%"',
    "plan factories.py:build --budget auto": "is for plan_once and the callbacks",
    "plan factories.py:build --budget 60% --solver x": "unknown solver 'x'",
    "plan factories.py:build --budget 60% --solver dp_nestd": "did you mean 'dp_nested'?",
    "plan factories.py:build --budget 60% --headroom 2": "headroom must be a share",
    "plan factories.py:build --budget 60% --out no/p.json": "there is no folder no",
    "plan factories.py:build --budget 60% --device tpu": "Invalid value",
    "plan factories.py:build --budget 60% --autocast fp8": "Invalid value",
    "plan factories.py:build --budget 60% --ranks 0": "Invalid value",
    "plan factories.py:build --budget 60% --exlude 0": "No such option",
    "plan factories.py:build --budget 60% -q -v": "pass one of them",
    "compare factories.py:build --picture front.tga": "the name must end with one of",
    "verify factories.py:build --plan none.json": "none.json: cannot read the plan file",
    "plan factories.py:build --budget 60% --reshard-after-forward maybe": "expected yes, no, or a number",
    "plan factories.py:build --budget 60% --parallelize shard": "expected FILE.py:FUNCTION",
    "diff none.json none.json": "none.json: cannot read the plan file",
    "largest-batch factories.py:build --budget 1MiB --sizes 8,x": "expected batch sizes",
}


def test_what_was_typed_wrong_is_found_before_torch_is_imported(tmp_path):
    (tmp_path / "factories.py").write_text(FACTORIES)
    code = """
import contextlib, io, json, shlex, sys
from remat.command_line.app import main
told = {}
for line in json.loads(sys.argv[1]):
    sys.argv = ["remat", *shlex.split(line)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as stopped:
            told[line] = int(stopped.code), err.getvalue(), "torch" in sys.modules
print(json.dumps(told))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(TYPED))], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [line for line, (_, _, torch) in told.items() if torch] == []
    for line, words in TYPED.items():
        code, err, _ = told[line]
        assert code == (2 if words else 0), line
        assert words in err


def test_an_infeasible_budget_has_its_own_exit_code_and_is_told_as_json(remat):
    code, out, err = remat("plan", "factories.py:build", "--budget", "1KB", "--json", "--repeats", "0")
    assert code == 3
    assert "the smallest peak found is" in err
    told = json.loads(out)["error"]
    assert (told["kind"], told["code"]) == ("infeasible", 3)
    assert told["least_peak_bytes"] > 1000


def test_an_error_of_our_own_has_its_own_exit_code_and_says_where(remat, monkeypatch):
    from remat.planner import Planner

    monkeypatch.setattr(Planner, "of", lambda *_, **__: 1 / 0)
    code, _, err = remat(*PLAN, "60%", "--repeats", "0")
    assert code == 70
    assert "internal error: ZeroDivisionError" in err
    assert "Traceback" not in err
    assert "Traceback" in remat(*PLAN, "60%", "--repeats", "0", "--verbose")[2]


def test_what_a_loss_raises_is_no_error_of_our_own(remat):
    code, _, err = remat("plan", "factories.py:bound_to_another", "--budget", "60%", "--repeats", "0")
    assert code == 2, err
    assert "the loss raises ValueError: Expected input batch_size" in err


def test_a_report_whose_budget_is_not_met_is_written_and_ends_as_infeasible(remat, tmp_path):
    page = tmp_path / "report.html"
    code, _, err = remat(
        "report", "factories.py:build", "--budget", "1KB", "--solver", "dp", "--repeats", "0", "--out", str(page)
    )
    assert code == 3, err
    assert "warning: the budget is not met: no plan of the comparison fits 1000 Bytes" in err
    assert "The budget is not met" in page.read_text()


def test_an_interrupt_is_told_and_has_its_own_exit_code(remat):
    assert remat("plan", "factories.py:interrupted", "--budget", "60%") == (130, "", "remat: interrupted\n")


def test_the_whole_way_as_json_where_each_output_is_data(remat):
    code, out, err = remat(*PLAN, "70%", "--solver", "dp", "--json", "--autocast", "bf16", "--repeats", "0")
    assert code == 0, err
    plan = Plan.from_json(out)
    assert plan.circumstances.autocast == {"cpu": "bfloat16"}
    Path("plan.json").write_text(out)
    code, out, err = remat("verify", "factories.py:build", "--plan", "plan.json", "--repeats", "0", "--json")
    told = json.loads(out)
    assert code == 0, err
    assert told["exact"]
    # Under the plan's own autocast: without it the step would take more.
    assert told["measured_peak_bytes"] <= plan.budget_bytes
    code, out, _ = remat("profile", "factories.py:build", "--json", "--quiet", "--repeats", "0")
    assert sum(json.loads(out)["parts"].values()) == json.loads(out)["peak_bytes"]


def test_an_edited_plan_is_priced_and_differs_from_what_it_was(remat):
    asked = [*PLAN, "70%", "--solver", "dp", "--repeats", "0", "--quiet"]
    assert remat(*asked, "--out", "plan.json") == (0, "", "")
    content = json.loads(Path("plan.json").read_text())
    content |= {"segments": ["*: act"], "budget_bytes": 2 * content["budget_bytes"]}
    Path("edited.json").write_text(json.dumps(content))
    priced = ["price", "factories.py:build", "--plan", "edited.json", "--repeats", "0"]
    code, out, err = remat(*priced, "--out", "priced.json")
    assert code == 0, err
    assert "edited plan (priced)" in out
    assert "predicted added time" in out
    assert "over the budget" not in out
    assert "two measurements" not in out
    assert "are two measurements, each by a profile of its own" in remat(*priced[:-1], "1")[1]
    code, out, _ = remat("diff", "plan.json", "priced.json", "--json")
    assert code == 1
    assert json.loads(out)["only_second"] == ["*: act"]
    assert remat("diff", "plan.json", "plan.json")[:2] == (0, "no difference\n")
    edited = Path("edited.json").read_text()
    assert "before, other segments" not in remat(*priced, "--out", "edited.json")[1]
    Path("edited.json").write_text(edited)
    out = remat(*asked[:-1], "--out", "edited.json")[1]
    assert "what edited.json held before, other segments, is edited.json~ now" in out
    assert Path("edited.json~").read_text() == edited
    content["budget_bytes"] = 1000
    Path("edited.json").write_text(json.dumps(content))
    code, out, _ = remat(*priced)
    assert code == 1
    assert re.match(r"over the budget by [\d.]+ [KM]iB \(peak [\d.]+ [KM]iB, budget 1000 Bytes\)\n", out)
    code, out, err = remat(*priced, "--json")
    assert code == 1
    assert "over the budget by " in err
    assert Plan.from_json(out).budget_bytes == 1000


def test_a_plan_made_in_eval_mode_is_warned_of_on_standard_error(remat):
    code, out, err = remat("plan", "factories.py:in_eval", "--budget", "100%", "--solver", "none", "--repeats", "0")
    assert code == 0, err
    assert "warning: this plan does nothing in training: it was made in eval mode" in err
    assert "warning: " not in out


def test_a_plan_for_another_model_is_refused(remat):
    assert remat(*PLAN, "90%", "--repeats", "0", "--out", "plan.json")[0] == 0
    Path("other.py").write_text(FACTORIES.replace("range(3)", "range(2)"))
    code, _, err = remat("verify", "other.py:build", "--plan", "plan.json")
    assert code == 4
    assert "the plan was made for another model" in err


def test_the_largest_batch_is_found_from_a_factory_that_makes_batches(remat):
    sizes = ["--budget", "1500KiB", "--sizes", "64,512", "--solver", "dp", "--repeats", "0"]
    code, out, err = remat("largest-batch", "factories.py:by_size", *sizes, "--out", "plan.json")
    assert code == 0, err
    assert "<- chosen" in out
    assert Plan.load("plan.json").predicted_peak_bytes <= 1500 * 1024


def test_blocks_are_treated_alike_where_that_is_asked_for_and_the_cost_is_told(remat):
    code, out, err = remat(*PLAN, "80%", "--alike", "--repeats", "0", "--solver", "dp", "--out", "plan.json")
    assert code == 0, err
    assert re.search(r"note: one pattern, .*in 3 blocks alike, 0 to 2", out)
    assert re.search(r"note: treating blocks alike costs [^:]+: \d+\.\d % added, \d+\.\d % without", out)
    made = Plan.load("plan.json")
    assert made.circumstances.alike
    assert made.unrestricted_overhead <= made.predicted_overhead
    patterns = [
        {tuple(c.module[2:] for c in one.members) for one in made.segments if one.members[0].module[0] == block}
        for block in "012"
    ]
    assert any(patterns)
    assert sum(one != other for one, other in pairwise(patterns)) <= 1
    assert remat("verify", "factories.py:build", "--plan", "plan.json", "--repeats", "1")[0] == 0


def test_compare_takes_solvers_that_treat_blocks_alike_and_others_are_refused(remat):
    code, out, err = remat(
        "compare", "factories.py:build", "--alike", "--budget", "80%", "--repeats", "0", "--json", "--time-limit", "2"
    )
    assert code == 0, err
    assert {row["solver"] for row in json.loads(out)["plans"]} == {"all", "dp", "ilp"}
    code, _, err = remat(*PLAN, "80%", "--alike", "--solver", "sqrt", "--repeats", "0")
    assert code == 2
    assert "cannot treat blocks alike: choose one of none, all, dp, ilp, auto" in err
    code, _, err = remat(*PLAN, "80%", "--alike", "--batches", "factories.py:several")
    assert code == 2
    assert "alike= is about one batch" in err


def test_a_plan_for_several_batches_says_what_it_does_with_each(remat):
    code, out, err = remat(*PLAN, "90%", "--batches", "factories.py:several", "--repeats", "0", "--solver", "dp")
    assert code == 0, err
    assert "with 0 float32 [64, 32]: peak" in out
    assert "with 0 float32 [512, 32]: peak" in out
    code, _, err = remat(
        "plan", "factories.py:bound", "--budget", "90%", "--batches", "factories.py:several", "--repeats", "0"
    )
    assert code == 2, err
    assert "the step fails with batch 1 (0 float32 [64, 32]): the loss raises ValueError: Expected input" in err
    assert "it must make its targets from the output" in err
    code, _, err = remat(*PLAN, "90%", "--batches", "factories.py:one")
    assert code == 2
    assert "returns a Tensor, not a list of batches" in err


def test_every_option_of_a_step_can_be_typed(remat):
    model = nn.Sequential(nn.Linear(2, 2))
    nothing = Step().keywords(model)
    assert StepOptions(**nothing) == StepOptions(
        **{name: [] for name in ("exclude", "only", "repeatable_hooks", "units")}
    )
    place = {"param_dtype": Dtype.BF16, "reshard_after_forward": "no", "parallelize": "factories.py:shard"}
    words = Step(card="h100-80gb", **place).keywords(model)
    assert {*words, "loss"} == {field.name for field in fields(StepOptions)}
    assert (words["mp_policy"].param_dtype, words["mp_policy"].reduce_dtype) == (torch.bfloat16, None)
    assert words["reshard_after_forward"] is False
    assert Step(reshard_after_forward="2").keywords(model)["reshard_after_forward"] == 2


def test_a_model_that_is_not_there_is_planned_for_a_card_and_priced_for_it(remat):
    code, out, err = remat(
        "plan", "factories.py:on_meta", "--budget", "80%", "--card", "h100-80gb", "--solver", "dp", "--out", "plan.json"
    )
    assert code == 0, err
    assert re.search(r"h100-80gb \(not there: predicted\): peak [\d.]+ [KM]iB of tensors, in the ", out)
    assert re.search(r"peak [\d.]+ MiB instead of [\d.]+ MiB \(\d+%\) reserved on the card, budget ", out)
    plan = Plan.load("plan.json")
    assert "h100-80gb" in plan.circumstances.device
    assert plan.segments
    code, out, err = remat("price", "factories.py:on_meta", "--plan", "plan.json", "--json")
    assert code == 0, err
    assert Plan.from_json(out).circumstances == plan.circumstances
    assert Plan.from_json(out).predicted_peak_bytes == plan.predicted_peak_bytes
    cast = ["--budget", "100%", "--card", "h100-80gb", "--autocast", "bf16", "--solver", "none", "--out", "cast.json"]
    code, out, err = remat("plan", "factories.py:on_meta", *cast)
    assert code == 0, err
    code, out, err = remat("price", "factories.py:on_meta", "--plan", "cast.json", "--json")
    assert code == 0, err
    assert Plan.from_json(out).circumstances == Plan.load("cast.json").circumstances
    assert Plan.from_json(out).circumstances.autocast == {"cuda": "bfloat16"}
    code, _, err = remat("plan", "factories.py:on_meta", "--budget", "80%")
    assert code == 2
    assert "remat: " in err


def test_a_model_is_sharded_by_a_function_of_the_same_file(remat):
    sharded = ["--ranks", "2", "--units", "*", "--repeats", "0", "--solver", "none", "--json"]
    code, by_units, err = remat(*PLAN, "100%", *sharded)
    assert code == 0, err
    code, by_function, err = remat(*PLAN, "100%", *sharded, "--parallelize", "factories.py:shard")
    assert code == 0, err
    assert Plan.from_json(by_function).unplanned_peak_bytes == Plan.from_json(by_units).unplanned_peak_bytes


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_every_option_a_meaning(remat, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = remat(command, "--help")
    assert code == 0
    assert "Example" in out
    for line in out.splitlines():
        if line.startswith("│ ") and "--" in line:
            assert re.search(r"  [A-Z]", line), line


def test_the_help_tells_the_exit_codes_and_the_documentation_the_same(remat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    page = (Path(__file__).parent.parent / "docs" / "shell.md").read_text()
    out = remat("--help")[1]
    for code, meaning in MEANINGS.items():
        assert f"{code.value} {meaning}" in out
        assert f"| {code.value} | {meaning} |" in page


def test_counted_phases_tell_how_many_there_are_and_how_long_they_will_take(capsys):
    with Terminal(Output(verbose=True)).progress() as say:
        say(Phase("dp at 60%", 0, 4))
        say("dp, round 1")
        say(Phase("dp at 40%", 1, 4))
        say(Phase("ilp at 40%", 2, 4))
    err = capsys.readouterr().err
    assert "] dp at 60% (1 of 4)" in err
    assert re.search(r"\[\d+ s, about \d+ s left\] ilp at 40% \(3 of 4\)", err)


def test_the_time_left_is_told_by_what_counted_phases_took_and_by_the_limit_of_one():
    now = [0.0]
    left = TimeLeft(lambda: now[0])

    def told(at, words):
        now[0] = at
        left.note(words)
        return left.words()

    assert told(0, "recording") == ""
    assert told(1, Bounded("solving", 20.0)) == "at most 0:00:20"
    now[0] = 6
    assert left.words() == "at most 0:00:15"
    now[0] = 30
    assert left.words() == ""
    assert told(40, Phase("sqrt", 0, 3)) == "0 of 3 done"
    assert told(45, Bounded("solving", 20.0)) == "0 of 3 done"
    assert told(50, Phase("dp", 1, 3)) == "1 of 3 done, about 0:00:20 left"
    assert told(52, "dry run") == "1 of 3 done, about 0:00:18 left"
    assert told(80, Phase("ilp", 2, 3)) == "2 of 3 done, about 0:00:20 left"
    now[0] = 200
    assert left.words() == "2 of 3 done, about 0:00:00 left"
    assert told(201, Over("timed")) == ""
    # A second count begins anew.
    assert told(300, Phase("timing", 0, 2)) == "0 of 2 done"
    assert told(301, Phase("timing", 1, 2)) == "1 of 2 done, about 0:00:01 left"


def test_what_takes_long_tells_how_long_it_can_take_or_how_often_it_is_done():
    model, said = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]), []
    made = plan(model, torch.randn(256, 32), "95%", solver="dp", time_limit_s=7.0, progress=said.append, repeats=0)
    solving = [words for words in said if "solving for" in words]
    assert solving
    assert all(words.startswith(f"dp, round {n} of at most 8: ") for n, words in enumerate(solving, 1))
    assert {words.limit_s for words in solving} == {7.0}
    said.clear()
    verify(model, torch.randn(256, 32), made, repeats=2, progress=said.append)
    rounds = [(words.done, words.total) for words in said if isinstance(words, Phase)]
    assert rounds == [(0, 2), (1, 2)]


def test_on_a_terminal_the_count_and_the_time_left_are_shown_and_nothing_when_quiet(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    for quiet in (False, True):
        with Terminal(Output(quiet=quiet)).progress() as say:
            for number in range(3):
                say(Phase("dp at 60%", number, 3))
                time.sleep(0.15)
            say(Over("writing"))
            time.sleep(0.15)
        shown = capsys.readouterr().err
        if quiet:
            assert shown == ""
        else:
            assert re.search(
                r"dp at 60% \(3 of 3\).*2 of 3 done, about 0:00:00 left", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
            )


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
