"""Every notebook is stored with what its code shows, uses names that there are, and runs in a fresh kernel."""

import ast
import importlib
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
sys.path.insert(0, str(FOLDER))
from run import code_digest, run, shown  # noqa: E402

NOTEBOOKS = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
RUN_ALWAYS = "worked_example"
"""The others are run by `make test-all`."""


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def test_the_notebooks_are_the_three_lessons():
    assert list(NOTEBOOKS) == ["gpt2", "solvers_compared", "worked_example"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_lesson_begins_with_its_point_and_ends_with_what_to_remember(name: str):
    cells = stored(name).cells
    assert cells[0].source.startswith("# ")
    assert "**The point.**" in cells[0].source
    assert cells[-1].source.startswith("## To remember")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_outputs_stored_are_those_of_the_code_stored(name: str):
    notebook = stored(name)
    assert notebook.metadata["ran"] == code_digest(notebook), "run `make lessons`"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert any("a picture" in outputs for outputs in shown(notebook))
    assert not [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "error"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_imports_from_the_library_is_there(name: str):
    code = "\n".join(cell.source for cell in stored(name).cells if cell.cell_type == "code")
    wanted = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, alias.name) for node in wanted for alias in node.names if node.module.startswith("remat")]
    assert ours
    assert [(home, what) for home, what in ours if not hasattr(importlib.import_module(home), what)] == []


@pytest.mark.parametrize(
    "name", [name if name == RUN_ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS]
)
def test_a_notebook_shows_what_is_stored_with_it(name: str, monkeypatch: pytest.MonkeyPatch):
    for variable in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "MPLBACKEND", "IPYTHONDIR"):
        monkeypatch.setenv(variable, "")
    found = run(NOTEBOOKS[name])
    assert [cell.source for cell in found.cells] == [cell.source for cell in stored(name).cells]
    for number, (now, then) in enumerate(zip(shown(found), shown(stored(name)), strict=True), 1):
        assert now == then, f"cell {number} shows something else: run `make lessons`"
