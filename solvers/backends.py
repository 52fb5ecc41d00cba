"""Run an integer programme with HiGHS or CBC and say what the run proved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pulp


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
        started = [variable for variable in lp.variables() if variable.varValue is not None]
        index = np.array([variable.index for variable in started], dtype=np.int32)
        value = np.array([variable.varValue for variable in started], dtype=np.float64)
        if len(started):
            lp.solverModel.setSolution(len(started), index, value)
        lp.solverModel.run()


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
    highs = programme.solverModel
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
    value = float(pulp.value(programme.objective) or 0.0)
    bound = value * (1.0 - gap) - 1e-6 if proven else -math.inf
    return Answer(found=found, proven=proven, timed_out=found and not proven, bound=bound)
