"""Checks of what was typed that need neither torch nor the model: each is a usage error that names the option."""

from __future__ import annotations

from pathlib import Path

import typer

from ..amounts import AmountError, read_amount
from ..near_names import did_you_mean


def target(spec: str, hint: str | None = "TARGET") -> None:
    """Refuse what cannot name a function."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise typer.BadParameter(
            f"{spec!r}: expected FILE.py:FUNCTION or package.module:FUNCTION, such as train.py:build", param_hint=hint
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise typer.BadParameter(
            f"there is no file {place}; pass FILE.py:FUNCTION with a path from {Path.cwd()}", param_hint=hint
        )


def function(spec: str | None) -> str | None:
    """Refuse what cannot name a function."""
    if spec is not None:
        target(spec, None)
    return spec


def reshard(text: str | None) -> str | None:
    """Refuse what is neither yes nor no nor a number of processes."""
    if text is not None and text not in ("yes", "no") and not (text.isdecimal() and int(text) > 0):
        raise typer.BadParameter(f"{text!r}: expected yes, no, or a number of processes")
    return text


def budget(text: str) -> str:
    """Refuse an amount that cannot be read."""
    try:
        read_amount(text, 1 << 40)
    except AmountError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def budgets(texts: list[str]) -> list[str]:
    """Refuse amounts that cannot be read."""
    return [budget(text) for text in texts]


def solver(name: str) -> str:
    """Refuse a solver that there is not."""
    known = solver_names()
    if name not in known:
        meant = did_you_mean(name, known) or f"choose one of {', '.join(known)}"
        raise typer.BadParameter(f"unknown solver {name!r}: {meant}")
    return name


def solvers(names: list[str]) -> list[str]:
    """Refuse solvers that there are not."""
    return [solver(name) for name in names]


def solver_names() -> list[str]:
    """Return the names of the solvers, for completion too."""
    from remat.solvers import SOLVERS

    return list(SOLVERS)


def written_file(path: Path | None) -> Path | None:
    """Refuse, before any work, a file that cannot be written in the end."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}; make it first")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path}: that is a folder; pass the name of a file")
    return path


def picture_file(path: Path | None) -> Path | None:
    """Refuse a picture of a kind that cannot be drawn."""
    if path is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        known = list(FigureCanvasBase.filetypes)
        if path.suffix.removeprefix(".").lower() not in known:
            raise typer.BadParameter(f"{path}: the name must end with one of {', '.join(known)}, such as front.png")
    return written_file(path)


def plan_file(path: Path) -> Path:
    """Refuse a plan file that is not there."""
    if not path.is_file():
        raise typer.BadParameter(f"{path}: cannot read the plan file: there is none; check the path")
    return path


def share(value: float) -> float:
    """Refuse what is no share below 1."""
    if not 0 <= value < 1:
        raise typer.BadParameter(f"headroom must be a share in [0, 1), got {value}: 0.05 keeps five per cent free")
    return value


def sizes(text: str | None) -> str | None:
    """Refuse batch sizes that cannot be read."""
    if text is not None and not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"{text!r}: expected batch sizes with commas between, such as 8,16,32")
    return text
