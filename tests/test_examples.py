"""Every example runs as its reader would run it, with warnings as errors, and reports what it says it achieves."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
IN_THIS_PROCESS = {
    "plain_loop.py": ["exact against the unmodified model", "step 4: loss"],
    "transformers_trainer.py": ["mean loss of 4 steps"],
    "lightning_trainer.py": ["sum of the trained parameters"],
    "with_accelerate.py": ["micro-batch 7: loss"],
    "amp_loop.py": ["averaged weights bitwise equal with and without the plan: True"],
    "compiled.py": ["bitwise equal with and without the plan: True"],
    "without_the_card.py": ["**Yes**. All figures are predicted; nothing was run."],
    "without_timing.py": ["times: estimate", "more time (estimated)"],
}
BY_TORCHRUN = {"fsdp2.py": ["rank 0: sharded gradients", "rank 1: sharded gradients"]}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*IN_THIS_PROCESS, *BY_TORCHRUN}


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
# Lightning 2.6 calls a part of torch's pytree that torch 2.13 announces to change.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_an_example_runs_and_reports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # What is imported is shared, to load torch once only; the example itself starts as a program.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert [report for report in IN_THIS_PROCESS[name] if report not in printed] == [], printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BY_TORCHRUN)
def test_an_example_of_two_processes_runs_and_reports(name: str, tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / name)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [report for report in BY_TORCHRUN[name] if report not in done.stdout] == [], done.stdout
    assert list(tmp_path.iterdir()) == []
