"""Run an integer programme with HiGHS or CBC and say what the run proved."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pulp  # pyright: ignore[reportMissingTypeStubs] - it has annotations, but no py.typed

_FEASIBLE = 2  # HighsInfo.primal_solution_status


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
    """PuLP's HiGHS, silent, and started from the variables' initial values, which PuLP 3 does not pass on."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 - PuLP's name
        import highspy  # Here, so that CBC can be used where it is missing.

        class Silent(highspy.Highs):
            def enableCallbacks(self) -> None:  # noqa: N802 - highspy's name
                # Making a solver calls this, which prints a banner unless output is off by then.
                self.setOptionValue("output_flag", False)
                super().enableCallbacks()

        model = cast("Any", Silent())
        for name, value in cast("dict[str, Any]", self.optionsDict).items():
            model.setOptionValue(name, value)
        cast("Any", lp).solverModel = model

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
        ImportError: If HiGHS is not available.
    """
    options: dict[str, float | int] = {
        "mip_rel_gap": gap,
        "threads": 1,
        "mip_feasibility_tolerance": 1e-7,
        "primal_feasibility_tolerance": 1e-8,
        "time_limit": max(time_limit_s, 0.01),
    }
    started = time.perf_counter()
    information, status = _run(programme, options)
    if not _consistent(programme, information):
        # HiGHS 1.16 can misjudge a start's objective after presolve (by what presolve moved into the constant) and
        # then stop too early. What it reports differs from what the variables add up to: run again without a start.
        for variable in programme.variables():
            variable.varValue = None
        options["time_limit"] = max(time_limit_s - (time.perf_counter() - started), 0.01)
        information, status = _run(programme, options)
    return Answer(
        found=information.primal_solution_status == _FEASIBLE and _consistent(programme, information),
        proven=status == "Optimal",
        timed_out=status == "Time limit reached",
        bound=float(information.mip_dual_bound),
    )


def _run(programme: pulp.LpProblem, options: dict[str, float | int]) -> tuple[Any, str]:
    """Run HiGHS and return its information record and the name of its status."""
    solver = _StartedHighs(msg=False)
    solver.optionsDict = options
    programme.solve(solver)
    highs = cast("Any", programme.solverModel)
    return highs.getInfo(), highs.modelStatusToString(highs.getModelStatus())


def _consistent(programme: pulp.LpProblem, information: Any) -> bool:
    """Say whether the objective that HiGHS reports is that of its solution."""
    if information.primal_solution_status != _FEASIBLE:
        return True
    value = float(cast("float", pulp.value(programme.objective) or 0.0))
    return abs(value - information.objective_function_value) <= 1e-5 * max(1.0, abs(value))


def run_cbc(programme: pulp.LpProblem, *, gap: float, time_limit_s: float) -> Answer:
    """Solve with CBC, from the variables' initial values where they have some.

    Raises:
        pulp.PulpSolverError: If CBC is not available either.
    """
    with warnings.catch_warnings():
        # PuLP 3 brings this CBC along and warns that PuLP 4 will not.
        warnings.simplefilter("ignore", DeprecationWarning)
        solver = pulp.PULP_CBC_CMD(msg=False, gapRel=gap, timeLimit=max(time_limit_s, 0.01), threads=1, warmStart=True)
    programme.solve(solver)
    found = programme.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    proven = programme.sol_status == pulp.LpSolutionOptimal
    value = float(cast("float", pulp.value(programme.objective) or 0.0)) if found else 0.0
    bound = value * (1.0 - gap) - 1e-6 if proven else -math.inf
    return Answer(found=found, proven=proven, timed_out=found and not proven, bound=bound)
