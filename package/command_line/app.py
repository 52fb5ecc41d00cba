"""The command line: `remat plan`, `remat verify` and the other `COMMANDS`."""

from __future__ import annotations

import json
import sys
import traceback
from importlib.metadata import version
from typing import Annotated

import typer

from .commands import COMMANDS
from .failures import MEANINGS, Code, code_of, words_of
from .grouped import command

app = typer.Typer(
    help="Find where to checkpoint a PyTorch model so that the training step fits a memory budget and the added time "
    "is least.\n\nStart with: remat plan train.py:build --budget 60% --out plan.json",
    epilog="Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in MEANINGS.items()) + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"remat {version('remat')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Find where to checkpoint a PyTorch model so that the training step fits a memory budget."""


for _name, _function in COMMANDS.items():
    command(app, _name)(_function)


def main() -> None:
    """Run the command line; what goes wrong is one line on standard error and an exit code that says of what kind."""
    try:
        code = app(standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(_failed(error))
    # What typer makes of an interrupt.
    sys.exit(_failed(KeyboardInterrupt()) if code == Code.INTERRUPTED else code or Code.DONE)


def _failed(error: BaseException) -> Code:
    """Tell of an error. It may be about what was typed, so that is looked at as it stands."""
    code = code_of(error)
    words = words_of(error, code)
    if not words:  # Without a command, the help was printed.
        return code
    if code is Code.INTERNAL and not {"--verbose", "-v"}.isdisjoint(sys.argv):
        traceback.print_exception(error)
    print(f"remat: {words}", file=sys.stderr)
    if "--json" in sys.argv:
        facts = {"kind": code.name.lower(), "code": int(code), "message": words}
        least = getattr(error, "least_peak_bytes", None)
        print(json.dumps({"error": facts if least is None else {**facts, "least_peak_bytes": least}}))
    return code
