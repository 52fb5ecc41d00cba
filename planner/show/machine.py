"""Say what a report was made on: the machine, and the versions of what took part."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, platform, processor, python_version

import torch

_PACKAGES = ("remat", "torch", "transformers", "numpy", "pulp", "highspy")


def machine_words() -> str:
    """Return the processor, its cores, the memory and torch's threads in a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_processor()}, {_count(cores, 'core')}{_memory()}, {_count(torch.get_num_threads(), 'thread')} for torch; "
        f"{platform()}"
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that figures depend on, as far as installed."""
    found = {"Python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _count(number: int | None, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else processor() or machine()


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return ""
    return f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
