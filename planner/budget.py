"""Read budgets and shares of them: the edge between people's units and the integers inside."""

from __future__ import annotations

from remat.amounts import AmountError, format_bytes, read_amount
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import PlanError

__all__ = ["BudgetError", "check_meant", "check_share", "format_bytes", "parse_budget"]

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


def check_meant(budget: int | str, model: object) -> None:
    """Refuse a small number of bytes that was rather meant as per cent, MiB or GiB, before anything is profiled.

    Args:
        budget: The budget, which can be read.
        model: The model, on one rank, whose parameters alone tell here that it cannot be meant.

    Raises:
        BudgetError: It is less than the parameters take, and less than any budget that was worked out.
    """
    if not isinstance(budget, int) or budget >= _LEAST_MEANT or not isinstance(model, nn.Module):
        return
    taken = sum(parameter.nbytes for parameter in model.parameters() if not is_lazy(parameter))
    if budget < taken:
        meant = f'"{budget}%", "{budget}GiB" or "{budget}MiB"' if budget <= 100 else f'"{budget}MiB"'
        raise BudgetError(
            f"the budget {budget} is bytes, and the parameters alone take {format_bytes(taken)}: did you mean {meant}?"
        )


def check_share(name: str, value: float) -> float:
    """Return a share below 1, checked.

    Raises:
        BudgetError: It is not in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise BudgetError(f"{name} must be a share in [0, 1), got {value!r}: 0.05 keeps five per cent free")
    return float(value)
