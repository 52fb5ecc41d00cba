"""Read budgets and write bytes: the edge between people's units and the integers inside."""

from __future__ import annotations

import re

from .errors import PlanError

_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {**_DECIMAL, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LEAST_BARE = 2**16
"""A smaller number in text is rather a share or a count of larger units than bytes."""
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")


class BudgetError(PlanError):
    """Raised when a budget cannot be read."""


def parse_budget(budget: int | str, unplanned_peak_bytes: int) -> int:
    """Return a budget in bytes.

    Args:
        budget: Bytes, or text such as "8GiB", "750 MB" or "60%" (of the unplanned step's peak).
        unplanned_peak_bytes: What a per cent budget is a share of.

    Raises:
        BudgetError: It is not a positive amount in a known unit.
    """
    expected = 'pass bytes as an int, or text such as "8GiB", "750MB" or "60%" (of the unplanned peak)'
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise BudgetError(f"budget must be an int or text, got {budget!r} ({type(budget).__name__}): {expected}")
    if isinstance(budget, int):
        amount: float = budget
    else:
        match = _PATTERN.fullmatch(budget)
        unit = match[2].lower() if match else "?"
        if match is None or (unit != "%" and unit not in _UNITS):
            raise BudgetError(f"cannot read the budget {budget!r}: {expected}")
        number = float(match[1])
        if not unit and number < _LEAST_BARE:
            raise BudgetError(
                f'the budget {budget!r} has no unit: write "{match[1]}%", "{match[1]}MiB" or "{match[1]}GiB"'
            )
        amount = number / 100 * unplanned_peak_bytes if unit == "%" else number * _UNITS[unit]
    if amount < 1:
        raise BudgetError(f"the budget {budget!r} is not positive: {expected}")
    return int(amount)


def check_share(name: str, value: float) -> float:
    """Return a share below 1, checked.

    Raises:
        BudgetError: It is not in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise BudgetError(f"{name} must be a share in [0, 1), got {value!r}: 0.05 keeps five per cent free")
    return float(value)


def format_bytes(count: float) -> str:
    """Return bytes for people: "7.9 GiB", "512 MiB", "12 KiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            digits = 2 if unit in ("TiB", "GiB") else 1
            return f"{count / size:.{digits}f} {unit}"
    return f"{int(count)} B"
