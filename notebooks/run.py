"""Run the notebooks and store them with what they show, for readers who do not run them."""

import hashlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def run(path: Path) -> nbformat.NotebookNode:
    """Return a notebook as it is after running it in a fresh kernel and an empty folder; warnings are left out."""
    # Models this small gain nothing from a second thread, and lose much where the machine is busy.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = f"{folder}/ipython"
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(_kept(output) for output in cell.outputs if output.get("name") != "stderr")
    notebook.metadata["ran"] = code_digest(notebook)
    return notebook


def code_digest(notebook: nbformat.NotebookNode) -> str:
    """Return what tells whether outputs belong to the code they stand below: a hash of all code, in order."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def _joined(outputs: Iterable[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Put together what was printed in a row: where a kernel cuts it is chance."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def _kept(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leave out what says the same again: a picture's and a table's text."""
    if "data" in output:
        best = next(kind for kind in ("image/png", "text/html", "text/plain") if kind in output.data)
        output.data = {best: output.data[best]}
    return output


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return what each cell shows but for numbers, which vary with the machine, and pictures, which are named only."""
    return [[_words(output) for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


def _words(output: nbformat.NotebookNode) -> str:
    if "text" in output:
        return _without_numbers(output.text)
    ((kind, content),) = output.data.items()
    return "a picture" if kind == "image/png" else _without_numbers(content)


def _without_numbers(text: str) -> str:
    """Leave out numbers with their signs and units, spaces, a solver's status, which hangs on its time, and remarks.

    Remarks are mostly on how the machine was disturbed while it was measured.
    """
    text = re.sub(r"(?m)^note: .*$|<p>note: .*?</p>", "", text)
    # pandas names its styled tables by chance.
    text = re.sub(r"T_[0-9a-f]{5}", "T", text)
    text = re.sub(r"[-+]?\d[\d,.]*(?:e-?\d+)?", "#", text)
    text = re.sub(r"\b(?:optimal|feasible|time[ _]limit)\b|\b[KMG]iB\b", "", text)
    return re.sub(r"\s+", " ", text)


def main() -> None:
    """Run the notebooks named, or all."""
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(run(path), path)
        print(f"stored {path.name}")


if __name__ == "__main__":
    main()
