"""`dp_nested`: segments inside segments, on top of the one-level programme.

What nesting a segment's inside saves in memory and costs in time comes from `NestedTables`; each such trade is one
more edge of the retention graph, so the flat plans stay in the search and the top level is exact.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from . import dp
from .errors import BudgetTooSmallError
from .labels import LabelSearch
from .nested_tables import INFINITE, NestedTables, Place, TooManyStatesError
from .problem import Problem, Segment
from .retention_graph import RetentionGraph, retention_graph
from .save_options import save_options
from .simulate import segment_peak, simulate
from .solution import Solution, Status, make_solution
from .tables import Tables, tables_of

UNITS = 1024
_MOST_TRADES = 24
_Choice = tuple[Place, int]


class _NestedGraph:
    """The retention graph with an edge for each trade that nesting offers."""

    def __init__(
        self, problem: Problem, tables: Tables, room_bytes: int, save_sets: bool, deadline: float | None
    ) -> None:
        flat = retention_graph(problem, tables, save_sets=save_sets)
        leaves = {
            place: segment_peak(tables, Segment(start=place[0], stop=place[1])).nbytes for place in tables.candidates
        }
        most = min(room_bytes, max(leaves.values(), default=1))
        unit = _round_unit(-(-max(most, 1) // UNITS))
        self.tables = _nested_tables(problem, tables, unit, -(-max(most, 1) // unit), save_sets, deadline)
        self.exact = unit == 1 and not flat.pinned
        self.graph = replace(
            flat,
            source=list(flat.source),
            target=list(flat.target),
            added_bytes=list(flat.added_bytes),
            forward_bytes=list(flat.forward_bytes),
            entered_bytes=list(flat.entered_bytes),
            needed_bytes=list(flat.needed_bytes),
            added_ns=list(flat.added_ns),
            items=list(flat.items),
        )
        self.choices: dict[int, _Choice] = {}
        trades: dict[Place, list[tuple[int, int]]] = {}
        for edge, item in enumerate(flat.items):
            if item is None or item.keep:
                continue
            place = (item.start, item.stop)
            if place not in trades:
                trades[place] = self._trades(place, leaves[place])
            for units, cost in trades[place]:
                self._add(flat, edge, place, units, cost)

    def _trades(self, place: Place, leaf_bytes: int) -> list[tuple[int, int]]:
        """Return (units of room, time) pairs of nested insides that need less room than the bare segment."""
        row = self.tables.costs[place]
        better = np.flatnonzero(row[1:] < row[:-1]) + 1
        if row[0] < INFINITE:
            better = np.concatenate([[0], better])
        found = [(int(units), int(row[units])) for units in better if units * self.tables.unit < leaf_bytes]
        if len(found) > _MOST_TRADES:
            self.exact = False
            found = [found[round(index)] for index in np.linspace(0, len(found) - 1, _MOST_TRADES)]
        return found

    def _add(self, flat: RetentionGraph, edge: int, place: Place, units: int, cost: int) -> None:
        graph = self.graph
        self.choices[len(graph.source)] = (place, units)
        graph.source.append(flat.source[edge])
        graph.target.append(flat.target[edge])
        graph.added_bytes.append(flat.added_bytes[edge])
        graph.forward_bytes.append(flat.forward_bytes[edge])
        graph.entered_bytes.append(flat.entered_bytes[edge])
        inner = flat.entered_bytes[edge] + units * self.tables.unit
        graph.needed_bytes.append(max(flat.forward_bytes[edge], inner))
        graph.added_ns.append(cost)
        graph.items.append(flat.items[edge])

    def segments(self, edges: list[int]) -> tuple[Segment, ...]:
        """Return the segments on a path, their insides worked out."""
        found: list[Segment] = []
        for edge in edges:
            item = self.graph.items[edge]
            if item is not None:
                choice = self.choices.get(edge)
                found.append(item if choice is None else self.tables.tree(*choice[0], choice[1]))
        return tuple(found)


def _round_unit(nbytes: int) -> int:
    """Round up to a power of two, or halfway to the next, so that close budgets share their tables."""
    power = 1 << (nbytes - 1).bit_length() if nbytes > 1 else 1
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= nbytes else power


def _nested_tables(
    problem: Problem, tables: Tables, unit: int, units: int, save_sets: bool, deadline: float | None
) -> NestedTables:
    key = ("nested", save_sets, unit)
    known = tables.graphs.get(key)
    if isinstance(known, NestedTables) and known.size > units:
        return known
    options = save_options(problem) if save_sets else {}
    made = NestedTables(tables, options, unit_bytes=unit, units=units)
    made.build(deadline)
    tables.graphs[key] = made
    return made


def solve(problem: Problem, *, time_limit_s: float | None = None, gap: float = 0.0, save_sets: bool = True) -> Solution:
    """Find the plan with segments nested to any depth that adds least time and fits the budget.

    The plan space: trees of candidates; each leaf has no save set or one of those that `save_options` lists. Room
    inside segments is counted in units of the budget's 1024th part or a little more, rounded up. Where the unit is one
    byte the answer is optimal; otherwise it is feasible, safe, and never worse than that of `dp`.

    Args:
        problem: The problem.
        time_limit_s: Seconds after which the best plan known, at worst that of `dp`, is returned.
        gap: Share of its own added time that the plan may be away from the optimum.
        save_sets: Whether segments may keep some operators' outputs.

    Raises:
        BudgetTooSmallError: If no plan fits, with the plan of the least peak.
    """
    started = time.perf_counter_ns()
    deadline = None if time_limit_s is None else time.perf_counter() + time_limit_s
    flat: Solution | BudgetTooSmallError
    try:
        flat = dp.solve(problem, time_limit_s=time_limit_s, gap=gap, save_sets=save_sets)
    except BudgetTooSmallError as error:
        flat = error
    if isinstance(flat, Solution) and flat.added_ns == 0:
        return make_solution(problem, flat.segments, solver="dp_nested", started_ns=started)
    try:
        return _solve_nested(problem, flat, gap, deadline, save_sets, started)
    except TooManyStatesError:
        note = "too many tensors travel inside segments: nesting was not searched"
        status = Status.FEASIBLE
    except TimeoutError:
        note = f"stopped at the time limit of {time_limit_s} s before nesting was searched"
        status = Status.TIME_LIMIT
    known = flat if isinstance(flat, Solution) else flat.solution
    solution = make_solution(problem, known.segments, solver="dp_nested", started_ns=started, status=status, note=note)
    if isinstance(flat, BudgetTooSmallError):
        raise BudgetTooSmallError(problem, solution) from None
    return solution


def _solve_nested(
    problem: Problem,
    flat: Solution | BudgetTooSmallError,
    gap: float,
    deadline: float | None,
    save_sets: bool,
    started: int,
) -> Solution:
    """Search flat and nested plans together.

    Raises:
        BudgetTooSmallError: If none fits.
        TooManyStatesError: If nesting cannot be searched.
        TimeoutError: If the deadline passes before it is.
    """
    tables = tables_of(problem)
    if problem.floor_bytes <= problem.budget_bytes:
        room = problem.budget_bytes - problem.fixed_bytes
        nested = _NestedGraph(problem, tables, room, save_sets, deadline)
        path = LabelSearch(nested.graph, tables, room).cheapest(gap=gap, deadline=deadline)
        if path is not None:
            segments = nested.segments(path.edges)
            added = simulate(problem, segments, trace=False).added_ns
            if isinstance(flat, Solution) and flat.added_ns < added:
                segments = flat.segments
            exact = nested.exact and path.finished and path.bound_ns == path.added_ns
            note = "" if nested.exact else f"room inside segments is counted in units of {nested.tables.unit} bytes"
            return make_solution(
                problem,
                segments,
                solver="dp_nested",
                started_ns=started,
                status=Status.OPTIMAL if exact else Status.FEASIBLE if path.finished else Status.TIME_LIMIT,
                lower_bound_ns=path.bound_ns if nested.exact else 0,
                note=note,
            )
    assert isinstance(flat, BudgetTooSmallError)
    least = _least_peak_plan(problem, flat.solution, save_sets)
    solution = make_solution(problem, least, solver="dp_nested", started_ns=started)
    if solution.peak_bytes <= problem.budget_bytes:
        return solution
    raise BudgetTooSmallError(problem, solution)


def _least_peak_plan(problem: Problem, flat: Solution, save_sets: bool) -> tuple[Segment, ...]:
    """Return the plan of the least peak, by bisection below what flat plans reach; it does not depend on the budget."""
    tables = tables_of(problem)
    high = flat.peak_bytes - problem.fixed_bytes
    low = -1
    best = flat.segments
    nested = _NestedGraph(problem, tables, high, save_sets, None)
    while low < high - 1:
        room = (low + high) // 2
        path = LabelSearch(nested.graph, tables, room).smallest()
        if path is None:
            low = room
            continue
        best = nested.segments(path)
        high = min(room, simulate(problem, best, trace=False).peak_bytes - problem.fixed_bytes)
    return best
