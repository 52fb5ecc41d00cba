"""Write a file whole or not at all: nobody ever reads half of one, whatever happens meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(target: Path, text: str) -> None:
    """Write text to a file, replacing an existing one once the new one is complete.

    Args:
        target: The file; its folder exists.
        text: What to write, in UTF-8.

    Raises:
        OSError: It cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a private file; these are meant to be read by all ranks and by colleagues.
        Path(name).chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
