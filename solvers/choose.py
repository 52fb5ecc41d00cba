"""Pick among plans that are listed one by one: the baselines' last step."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import BudgetTooSmallError
from .problem import Problem, Segment
from .simulate import simulate
from .solution import Solution, make_solution


def cheapest_fitting(
    problem: Problem, plans: Iterable[tuple[Segment, ...]], *, solver: str, started_ns: int, note: str = ""
) -> Solution:
    """Return the plan that adds least time among those that fit the budget; the smaller peak where times are equal.

    Raises:
        BudgetTooSmallError: If none fits; it carries the plan of the smallest peak.
    """
    priced = [(simulate(problem, plan, trace=False), plan) for plan in dict.fromkeys(plans)]
    fitting = [
        (price.added_ns, price.peak_bytes, plan) for price, plan in priced if price.peak_bytes <= problem.budget_bytes
    ]
    if fitting:
        plan = min(fitting, key=lambda item: item[:2])[2]
        return make_solution(problem, plan, solver=solver, started_ns=started_ns, note=note)
    plan = min(priced, key=lambda item: (item[0].peak_bytes, item[0].added_ns))[1]
    raise BudgetTooSmallError(problem, make_solution(problem, plan, solver=solver, started_ns=started_ns, note=note))
