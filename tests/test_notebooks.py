"""Every notebook runs from top to bottom in a fresh kernel, and is stored with what it shows."""

import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
sys.path.insert(0, str(FOLDER))
from run import run, shown  # noqa: E402

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def test_the_notebooks_are_the_three_lessons():
    assert NAMES == ["gpt2", "solvers_compared", "worked_example"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_lesson_begins_with_its_point_and_ends_with_what_to_remember(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].source.startswith("# ")
    assert "**The point.**" in cells[0].source
    assert cells[-1].source.startswith("## To remember")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_shows_what_is_stored_with_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "MPLBACKEND", "IPYTHONDIR"):
        monkeypatch.setenv(name, "")
    stored = nbformat.read(path, as_version=4)
    found = run(path)
    assert [cell.source for cell in found.cells] == [cell.source for cell in stored.cells]
    counts = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert any("a picture" in outputs for outputs in shown(stored))
    for number, (now, then) in enumerate(zip(shown(found), shown(stored), strict=True), 1):
        assert now == then, f"cell {number} shows something else: run `make lessons`"
