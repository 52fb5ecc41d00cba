"""Every notebook runs from top to bottom in a fresh kernel, and is committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def test_the_notebooks_are_the_three_the_readme_speaks_of():
    assert NAMES == ["gpt2", "solvers_compared", "worked_example"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_committed_without_outputs(path: Path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    # Models this small gain nothing from a second thread, and lose much where the machine is busy.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
