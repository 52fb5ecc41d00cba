"""A minimisation built row by row: variables and linear constraints, in PuLP's terms."""

from __future__ import annotations

import pulp  # pyright: ignore[reportMissingTypeStubs] - it has annotations, but no py.typed

Expression = dict[pulp.LpVariable, float]


class Rows:
    """Collect variables and numbered rows.

    Attributes:
        programme: What they make up.
    """

    def __init__(self) -> None:
        self.programme = pulp.LpProblem("checkpoints", pulp.LpMinimize)
        self._count = 0

    def binary(self, name: str) -> pulp.LpVariable:
        """Add a variable that is 0 or 1."""
        return self.programme.add_variable(name, cat=pulp.LpBinary)

    def continuous(self, name: str) -> pulp.LpVariable:
        """Add a variable that is 0 or more."""
        return self.programme.add_variable(name, lowBound=0)

    def at_most(self, expression: Expression, limit: float) -> None:
        """Add a row: the expression is at most so much."""
        self._add(expression, pulp.LpConstraintLE, limit)

    def equal(self, expression: Expression, value: float) -> None:
        """Add a row: the expression is exactly so much."""
        self._add(expression, pulp.LpConstraintEQ, value)

    def _add(self, expression: Expression, sense: int, value: float) -> None:
        constraint = pulp.LpConstraint(pulp.LpAffineExpression(expression), sense, rhs=value)
        self.programme.addConstraint(constraint, f"r{self._count}")
        self._count += 1
