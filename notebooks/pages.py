"""Turn the notebooks, with the outputs they are stored with, into pages of the documentation; mkdocs calls it."""

from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PICTURES = ("demo_memory_over_time.png", "demo_peak_against_overhead.png")
"""Of `remat demo`, kept with the results of the benchmarks."""


def lesson(notebook: nbformat.NotebookNode) -> str:
    """Return a notebook as Markdown."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [shown for output in cell.outputs if (shown := of_output(output))]
    return "\n\n".join(parts) + "\n"


def of_output(output: nbformat.NotebookNode) -> str:
    """Return what a cell showed: a picture, a table, or text."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="what the cell above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        # The site makes tables scroll where they are too wide, but for those with a class. A blank line ends HTML.
        content = data["text/html"].replace(' border="1" class="dataframe"', "")
        return "\n".join(line for line in content.splitlines() if line.strip())
    return f"```text\n{data['text/plain']}\n```"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the lessons, the demo's pictures and the examples to what is built."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        content = lesson(nbformat.read(path, as_version=4))
        files.append(File.generated(config, f"lessons/{path.stem}.md", content=content))
    for name in PICTURES:
        source = ROOT / "benchmarks" / "results" / name
        files.append(File.generated(config, f"pictures/{name}", abs_src_path=str(source)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead a page's links to examples, which stand beside `docs/` in the repository, to those built with the site."""
    return markdown.replace("](../examples/", "](examples/")
