"""Print a benchmark's tables as Markdown, write them as CSV, and say what they were measured on."""

import argparse
import csv
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from models import NAMES

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Hold one table.

    Attributes:
        name: File name without ending, for the CSV.
        title: One line of Markdown above it.
        rows: Cells by column; columns may differ, what is missing stays empty.
        notes: Lines below it.
    """

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def columns(self) -> list[str]:
        """Return all columns, in order of appearance."""
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def markdown(self) -> str:
        """Return the table as Markdown."""
        columns = self.columns()
        lines = [f"**{self.title}**", "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def write_csv(self, folder: Path, header: str) -> None:
        """Write the table as CSV, the header in a comment."""
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            file.write(f"# {header}\n")
            writer = csv.DictWriter(file, self.columns(), restval="")
            writer.writeheader()
            writer.writerows(self.rows)


class KeptRows:
    """Keep rows as they are measured, a line of JSON each, so that a run that was stopped goes on where it was.

    A row is known by its key. Rows of another key stay, so that a table can be measured model by model.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        self._rows: dict[str, dict] = {}
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists():
            # A run that was killed may leave half a line behind.
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            self._rows = {kept["key"]: kept["row"] for kept in map(json.loads, lines)}

    def row(self, key: str, measure: Callable[[], dict]) -> dict:
        """Return the row of a key, measured now if it is not known."""
        if key not in self._rows:
            self._rows[key] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "row": self._rows[key]}) + "\n")
            print(self._rows[key], flush=True)
        return self._rows[key]

    def has(self, key: str) -> bool:
        """Say whether the row of a key is known."""
        return key in self._rows

    def all(self, order: Sequence[str]) -> list[dict]:
        """Return all rows by the model that they are of, in this order."""
        return sorted(self._rows.values(), key=lambda row: order.index(row["model"]))


def kept_rows(given: argparse.Namespace, name: str) -> KeptRows:
    """Return the rows kept of a table, under what it is measured with."""
    return KeptRows(given.out / "partial" / f"{name}_{given.scale:g}.jsonl", fresh=given.fresh)


def cell(value: object) -> str:
    """Return a value as people read it: four digits, yes and no, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def publish(
    script: str, tables: Iterable[Table], folder: Path, *, name: str | None = None, verb: str = "Measured"
) -> None:
    """Print the tables, and write `name`.md (by default `script`.md) and one CSV a table; `verb` is what was done."""
    folder.mkdir(parents=True, exist_ok=True)
    header = measured_on()
    parts = [f"{verb} with `benchmarks/{script}.py`, {header}."]
    for table in tables:
        table.write_csv(folder, header)
        parts.append(table.markdown())
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name or script}.md").write_text(text)
    print(text)


def measured_on() -> str:
    """Return date, machine and versions in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "remat"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{date.today().isoformat()}, {_processor()}, {cores} cores, {memory:.0f} GiB, "
        f"{torch.get_num_threads()} threads for torch, {_allocator()}, Python {platform.python_version()}, {packages}"
    )


def _allocator() -> str:
    """Say where tensors on the CPU take their memory from."""
    told = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("MALLOC_", "LD_PRELOAD"))]
    return " ".join(["the C library's allocator", *(["with", *told] if told else [])])


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(none)"


def options(doc: str | None, models: Sequence[str], script: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes: --out, --models, --scale."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the tables")
    parser.add_argument("--models", nargs="*", choices=NAMES, default=list(models), metavar="NAME", help=str(NAMES))
    parser.add_argument("--scale", type=float, default=1.0, help="what to multiply batches by, for quick trials")
    parser.add_argument("--fresh", action="store_true", help="forget the rows that a stopped run has kept")
    parser.set_defaults(script=script)
    return parser


def scale_note(scale: float) -> list[str]:
    """Return what a reader must know where batches were shrunk."""
    return [] if scale == 1.0 else [f"Batches were multiplied by {scale:g}."]


def mib(nbytes: float | None) -> float | None:
    """Return bytes as MiB."""
    return None if nbytes is None else nbytes / 2**20
