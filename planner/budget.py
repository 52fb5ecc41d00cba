"""Read budgets and shares of them: the edge between people's units and the integers inside."""

from __future__ import annotations

from remat.amounts import AmountError, format_bytes, read_amount

from .errors import PlanError

__all__ = ["BudgetError", "check_share", "format_bytes", "parse_budget"]


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
    try:
        return read_amount(budget, unplanned_peak_bytes)
    except AmountError as error:
        raise BudgetError(str(error)) from None


def check_share(name: str, value: float) -> float:
    """Return a share below 1, checked.

    Raises:
        BudgetError: It is not in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise BudgetError(f"{name} must be a share in [0, 1), got {value!r}: 0.05 keeps five per cent free")
    return float(value)
