"""Run an integer programme with HiGHS or CBC and say what the run proved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pulp  # pyright: ignore[reportMissingTypeStubs] - it has annotations, but no py.typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Say how a run ended; the values are in the programme's variables.

    Attributes:
        found: Whether there is a solution.
        proven: Whether it is proven optimal within the gap asked for.
        timed_out: Whether the time limit stopped it.
        bound: Proven bound on the objective; -inf where the solver tells none.
    """

    found: bool
    proven: bool
    timed_out: bool
    bound: float


class _StartedHighs(pulp.HiGHS):
    """PuLP's HiGHS, started from the variables' initial values, which PuLP 3 does not pass on."""

    def callSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 - PuLP's name
        model = cast("Any", lp.solverModel)
        values = [
            (index, value) for index, variable in enumerate(lp.variables()) if (value := variable.varValue) is not None
        ]
        if values:
            indices = np.array([index for index, _ in values], dtype=np.int32)
            model.setSolution(len(values), indices, np.array([value for _, value in values], dtype=np.float64))
        model.run()


def run_highs(programme: pulp.LpProblem, *, gap: float, time_limit_s: float) -> Answer:
    """Solve with HiGHS, from the variables' initial values where they have some.

    Raises:
        pulp.PulpSolverError: If HiGHS is not available.
    """
    limit = None if math.isinf(time_limit_s) else max(time_limit_s, 0.01)
    solver = _StartedHighs(
        msg=False,
        gapRel=gap,
        timeLimit=limit,
        threads=1,
        mip_feasibility_tolerance=1e-7,
        primal_feasibility_tolerance=1e-8,
    )
    programme.solve(solver)
    highs = cast("Any", programme.solverModel)
    information = highs.getInfo()
    status = highs.modelStatusToString(highs.getModelStatus())
    found = information.primal_solution_status == 2
    return Answer(
        found=found,
        proven=status == "Optimal",
        timed_out=status == "Time limit reached",
        bound=float(information.mip_dual_bound),
    )


def run_cbc(programme: pulp.LpProblem, *, gap: float, time_limit_s: float) -> Answer:
    """Solve with CBC, from the variables' initial values where they have some.

    Raises:
        pulp.PulpSolverError: If CBC is not available either.
    """
    limit = None if math.isinf(time_limit_s) else max(time_limit_s, 0.01)
    programme.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=gap, timeLimit=limit, threads=1, warmStart=True))
    found = programme.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    proven = programme.sol_status == pulp.LpSolutionOptimal
    value = float(cast("float", pulp.value(programme.objective) or 0.0)) if found else 0.0
    bound = value * (1.0 - gap) - 1e-6 if proven else -math.inf
    return Answer(found=found, proven=proven, timed_out=found and not proven, bound=bound)
