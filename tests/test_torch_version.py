"""Another torch is refused at import, by its version, and only by what needs torch's private parts."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from remat.profiler.torch_version import ADMITTED, TorchVersionError, check

IMPORTS = """
import sys
import torch
torch.__version__ = sys.argv[1]
import remat, remat.solvers
for name in ("remat.planner", "remat.profiler", "remat.planner.applier.apply", "remat.integrations"):
    try:
        __import__(name)
    except ImportError as error:
        print(name, type(error).__name__, error)
try:
    remat.plan
except ImportError as error:
    print("remat.plan", type(error).__name__, error)
"""


def test_what_needs_another_torch_says_at_import_which_and_what_to_do():
    command = [sys.executable, "-c", IMPORTS, "2.14.0.dev1+cu130"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(sys.prefix))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("remat.planner", "remat.profiler", "remat.planner.applier.apply", "remat.integrations", "remat.plan")
    ]
    for line in lines:
        assert "TorchVersionError torch 2.14.0.dev1+cu130 is installed, and remat needs torch>=2.13,<2.14" in line
        assert "Run pip install 'torch>=2.13,<2.14'" in line


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git1234567"])
def test_the_release_that_was_checked_is_admitted_however_it_was_built(version):
    check(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "2.14.0rc1", "3.13.0", "2.130.0", "2"])
def test_no_other_release_is_admitted(version):
    with pytest.raises(TorchVersionError, match="is installed, and remat needs"):
        check(version)


def test_installing_asks_for_the_torch_that_is_admitted():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    major, minor = ADMITTED
    assert f"torch>={major}.{minor},<{major}.{minor + 1}" in project["dependencies"]
