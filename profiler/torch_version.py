"""Refuse, at import, a torch whose private parts were never checked: `internals.py` here and in the applier say which.

Both packages import this before anything else, so that another torch is told by its version and not by the first name
that is missing, or worse, that means something else by now.
"""

from __future__ import annotations

import torch

ADMITTED = (2, 13)
"""The major and minor version that the internals were checked with; `pyproject.toml` asks for the same."""


class TorchVersionError(ImportError):
    """The torch that is installed is not one that this library was checked with."""


def check(version: str) -> None:
    """Refuse a version of torch.

    Args:
        version: A version as torch says it, like "2.13.0+cpu" or "2.14.0.dev20261101".

    Raises:
        TorchVersionError: It is not of the release that was checked; an early build of the next one is not either.
    """
    major, minor = ADMITTED
    if version.split(".")[:2] == [str(major), str(minor)]:
        return
    wanted = f"torch>={major}.{minor},<{major}.{minor + 1}"
    raise TorchVersionError(
        f"torch {version} is installed, and remat needs {wanted}: it relies on private parts of torch, of autograd and "
        f"checkpointing, that other releases may change without a word. Run pip install '{wanted}', or look for a "
        "release of remat that names yours"
    )


check(str(torch.__version__))
