"""The README's examples run as they stand, and its lists are those of the tree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from remat.solvers import SOLVERS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = ("package", "planner", "profiler", "solvers")


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def listed_folders() -> list[str]:
    tree = README.split("<!-- tree:begin -->")[1].split("<!-- tree:end -->")[0]
    lines = [line.partition(" ") for line in tree.strip().splitlines()[1:-1]]
    assert all(phrase.strip() for _, _, phrase in lines)
    return [folder for folder, _, _ in lines]


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


def test_every_package_is_in_the_readmes_tree_once_and_every_folder_of_it_exists():
    listed = listed_folders()
    packages = {f"{init.parent.relative_to(ROOT)}/" for top in FOLDERS for init in (ROOT / top).rglob("__init__.py")}
    assert len(listed) == len(set(listed))
    assert packages - set(listed) == set()
    assert [folder for folder in listed if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("path", sorted(p for top in FOLDERS for p in (ROOT / top).rglob("*.py")), ids=lambda p: p.stem)
def test_every_file_begins_with_a_line_that_says_what_it_is(path: Path):
    assert re.match(r'"""\S.{10,}', path.read_text())


def test_every_solver_is_in_the_readmes_table():
    named = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    assert named == set(SOLVERS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_names_exists(page: str):
    folders = "package|planner|profiler|solvers|tests|benchmarks|examples|notebooks|docs"
    names = re.findall(rf"`((?:{folders})/[\w./]*)`", (ROOT / page).read_text())
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_make_target_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`|^    make ([\w-]+)", README, re.MULTILINE)):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
