"""Read budgets and shares of them: the edge between people's units and the integers inside."""

from __future__ import annotations

from remat.amounts import AmountError, format_bytes, read_amount

from .errors import PlanError

__all__ = ["BudgetError", "check_share", "format_bytes", "meant_words", "parse_budget"]

_LEAST_MEANT = 2**20
"""A budget from this many bytes on is taken for one, however large the model: then the error says what the least is."""


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


def meant_words(budget: int | str, parameter_bytes: int) -> str:
    """Say what a small number of bytes may have been meant as: per cent, MiB or GiB; "" where it may be meant.

    Args:
        budget: The budget as it was given; one with a unit is meant.
        parameter_bytes: What the model's parameters alone take.
    """
    if not str(budget).strip().isdecimal() or int(budget) >= min(_LEAST_MEANT, parameter_bytes):
        return ""
    budget_bytes = int(budget)
    meant = f'"{budget_bytes}%", "{budget_bytes}GiB" or "{budget_bytes}MiB"'
    return f" A number alone is bytes: did you mean {meant if budget_bytes <= 100 else repr(f'{budget_bytes}MiB')}?"


def check_share(name: str, value: float) -> float:
    """Return a share below 1, checked.

    Raises:
        BudgetError: It is not in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise BudgetError(f"{name} must be a share in [0, 1), got {value!r}: 0.05 keeps five per cent free")
    return float(value)
