"""The README's examples run as they stand, and its lists are those of the tree."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from remat.solvers import SOLVERS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = ("planner", "profiler", "solvers")


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def listed_files() -> list[str]:
    tree = README.split("<!-- tree:begin -->")[1].split("<!-- tree:end -->")[0]
    folder, listed = "", []
    for line in tree.strip().splitlines()[1:-1]:
        name, _, phrase = line.strip().partition(" ")
        assert phrase.strip(), f"no phrase for {name}"
        if name.endswith("/"):
            folder = name
        else:
            listed.append(folder + name)
    return listed


def files_of_the_packages() -> set[str]:
    """Return the tracked files, or those that exist where the tests run outside a git checkout."""
    if shutil.which("git") and (ROOT / ".git").exists():
        done = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
        found = {name for name in done.stdout.split() if (ROOT / name).exists()}
    else:
        found = {str(path.relative_to(ROOT)) for top in FOLDERS for path in (ROOT / top).rglob("*")}
    return {name for name in found if name.endswith((".py", ".html"))}


def test_there_is_an_example():
    assert any("verify(model, batch" in block for block in python_blocks())


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_every_python_block_of_the_readme_runs(number: int, tmp_path: Path):
    (tmp_path / "example.py").write_text(python_blocks()[number])
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "bitwise equal" in done.stdout
    assert "NOT exact" not in done.stdout
    assert (tmp_path / "plan.json").exists()


def test_every_module_is_in_the_readmes_tree_once():
    listed = listed_files()
    assert len(listed) == len(set(listed))
    assert files_of_the_packages() - set(listed) == set()


def test_every_file_of_the_readmes_tree_exists():
    assert [name for name in listed_files() if not (ROOT / name).is_file()] == []


def test_every_solver_is_in_the_readmes_table():
    named = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    assert named == set(SOLVERS)


def test_every_path_the_readme_names_exists():
    names = re.findall(r"`((?:planner|profiler|solvers|tests|benchmarks|examples|notebooks)/[\w./]*)`", README)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_make_target_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`|^    make ([\w-]+)", README, re.MULTILINE)):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
