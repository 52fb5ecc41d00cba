"""The documentation builds with every link in it right, and what its pages tell to run runs."""

import ast
import logging
import re
import shlex
from pathlib import Path

import pytest
from remat.command_line.app import app
from typer.main import get_command

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


RUN = [page for page in PAGES if any(not SNIPPET.search(block) for block in blocks(page, "python"))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        if not SNIPPET.search(block):
            exec(compile(ast.parse(block), str(page), "exec"), names)
    assert "NOT exact" not in capsys.readouterr().out


def test_programs_that_pages_show_whole_are_examples_which_are_run_by_another_test():
    shown = [name for page in PAGES for name in SNIPPET.findall(page.read_text())]
    assert shown
    assert [name for name in shown if not (name.startswith("examples/") and (ROOT / name).is_file())] == []


def test_beside_each_program_that_a_page_includes_is_a_link_to_its_file():
    # Where pages are read as files, an include is a line of punctuation.
    for page in PAGES:
        text = page.read_text()
        assert [
            name for name in SNIPPET.findall(text) if f"\n```\n\nThe file: [`{name}`](../{name})." not in text
        ] == []


def test_every_command_that_pages_show_is_one_with_options_that_exist():
    commands = get_command(app).commands
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("remat ")]
    assert ours
    for name, *words in ours:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_every_block_is_of_a_kind_that_a_test_looks_at():
    kinds = {kind for page in PAGES for kind in re.findall(r"^```(\w+)", page.read_text(), re.MULTILINE)}
    assert kinds <= {"python", "sh", "text"}


def test_it_builds_strictly(tmp_path: Path, caplog, monkeypatch):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs")] == []
    for page in PAGES:
        built = tmp_path / "site" / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert "<h1" in built.read_text()
        assert not re.search(r'(?:src|href)="https?://(?!squidfunk|www\.mkdocs)', built.read_text())
