"""Amounts of memory as people write and read them: "8GiB", "750 MB", "60%"."""

from __future__ import annotations

import re
from typing import cast

from humanize import naturalsize
from pydantic import ByteSize

AUTO = "auto"
"""Stands, where a trainer is about to train, for what its device can give."""
_UNITS = {unit: size for unit, size in ByteSize.byte_sizes.items() if not unit.endswith("bit")}
_LEAST_BARE = 2**16
"""A smaller number in text is rather a share or a count of larger units than bytes."""
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")
_EXPECTED = 'pass bytes as an int, or text such as "8GiB", "750MB" or "60%" (of the unplanned peak)'


class AmountError(ValueError):
    """Raised when an amount cannot be read."""


def read_amount(amount: int | str, whole_bytes: int) -> int:
    """Return an amount in bytes.

    Args:
        amount: Bytes, or text such as "8GiB", "750 MB" or "60%".
        whole_bytes: What per cent are of.

    Raises:
        AmountError: It is not a positive amount in a known unit.
    """
    given = cast("object", amount)
    if isinstance(given, float) and 0 < given <= 1:
        raise AmountError(f'the budget {given!r} is no number of bytes: a share is written "{100 * given:g}%"')
    if isinstance(amount, bool) or not isinstance(amount, (int, str)):
        raise AmountError(f"budget must be an int or text, got {amount!r} ({type(amount).__name__}): {_EXPECTED}")
    if isinstance(amount, int):
        found: float = amount
    elif amount.strip() == AUTO:
        raise AmountError(
            f'the budget "{AUTO}" is for plan_once and the callbacks of trainers, which ask the device what it has '
            f"free: here, {_EXPECTED}"
        )
    else:
        match = _PATTERN.fullmatch(amount)
        unit = match[2].lower() if match else "?"
        if match is None or (unit not in ("", "%") and unit not in _UNITS):
            raise AmountError(f"cannot read the budget {amount!r}: {_EXPECTED}")
        number = float(match[1])
        if not unit and number < _LEAST_BARE:
            text = match[1]
            meant = f'"{100 * number:g}%"' if 0 < number < 1 else f'"{text}%", "{text}MiB"'
            raise AmountError(f'the budget {amount!r} has no unit: write {meant} or "{text}GiB"')
        found = number / 100 * whole_bytes if unit == "%" else number * _UNITS.get(unit, 1)
    if found < 1:
        raise AmountError(f"the budget {amount!r} is not positive: {_EXPECTED}")
    return int(found)


def format_bytes(count: float) -> str:
    """Return bytes for people: "7.91 GiB", "512.0 MiB", "12 Bytes"."""
    return naturalsize(count, binary=True, format="%.2f" if abs(count) >= 2**30 else "%.1f")
