"""A bound on all one-level plans, whatever their save sets: the retention graph with save sets made divisible.

A segment's save set is replaced by an amount of bytes: at least what it takes beyond the segment's end, with the most
time that any set of so few bytes saves (a knapsack whose items may be cut, in steps). What a save set does to its own
segment's moments is left out. Both only make plans cheaper or smaller, so no plan beats the cheapest path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..problem import Candidate, Problem
from ..simulate import replay_ns
from ..tables import Tables, tables_of
from .labels import LabelSearch
from .retention_graph import RetentionGraph, TooManySetsError, build_graph

_STEPS = 100
_MOST_SETS = 1024
_MOST_TRAVELLING = 3
FloatArray = npt.NDArray[np.float64]


def save_set_bound(problem: Problem, known_ns: int, *, deadline: float) -> int:
    """Return a time in nanoseconds that no one-level plan within the budget goes below; 0 where nothing is proven.

    Args:
        problem: The problem.
        known_ns: Time of a plan that fits; the bound is at most that.
        deadline: `time.perf_counter()` at which to return the bound known by then.
    """
    tables = tables_of(problem)
    try:
        graph = _graph(tables, known_ns)
    except TooManySetsError:
        return 0
    room = tables.room_bytes(problem, problem.budget_bytes)
    path = LabelSearch(graph, tables).cheapest(room, gap=0.0, deadline=deadline)
    return known_ns if path is None else min(known_ns, path.bound_ns)


def _graph(tables: Tables, known_ns: int) -> RetentionGraph:
    """Return the graph with an edge for each step of each divisible save set; what takes `known_ns` is left out.

    Raises:
        TooManySetsError: If a boundary has more held sets than are searched.
    """
    travelling = {place: _travelling(tables, candidate) for place, candidate in tables.candidates.items()}
    graph = tables.graphs.get("travelling save sets")
    if graph is None:
        options = {place: tuple(_subsets(operators))[1:] for place, operators in travelling.items() if operators}
        graph = tables.graphs["travelling save sets"] = build_graph(tables, options, pinned=0)
    assert isinstance(graph, RetentionGraph)
    edges = [edge for edge in graph.edges if edge.item is None or (not edge.item.keep and edge.added_ns < known_ns)]
    steps: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for edge in graph.edges:
        if edge.item is None:
            continue
        key = (edge.item.start, edge.item.stop, edge.item.keep)
        if key not in steps:
            steps[key] = _steps(tables, tables.candidates[key[:2]], travelling[key[:2]], edge.item.keep, known_ns)
        edges += [
            edge._replace(added_bytes=edge.added_bytes + nbytes, added_ns=added_ns) for nbytes, added_ns in steps[key]
        ]
    return replace(graph, edges=edges)


def _travelling(tables: Tables, candidate: Candidate) -> tuple[int, ...]:
    """Return the operators whose outputs are in use behind the segment, where others may hold them: not divisible."""
    found = [
        operator
        for operator in candidate.operators
        if any(
            tables.last_alive[rank] >= candidate.stop and tables.weight[rank] for rank in tables.outputs((operator,))
        )
    ]
    return tuple(sorted(found, key=lambda operator: -tables.total(tables.outputs((operator,))))[:_MOST_TRAVELLING])


def _subsets(operators: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for size in range(len(operators) + 1):
        yield from (tuple(sorted(subset)) for subset in combinations(operators, size))


def _steps(
    tables: Tables, candidate: Candidate, travelling: tuple[int, ...], keep: tuple[int, ...], known_ns: int
) -> list[tuple[int, int]]:
    """Return (bytes, nanoseconds) pairs: with `keep`, a save set of so many more bytes takes no less time."""
    rest = [operator for operator in candidate.operators if operator not in travelling]
    uses: dict[int, int] = {}
    for operator in rest:
        for rank in set(tables.operator_outputs[operator]):
            uses[rank] = uses.get(rank, 0) + 1
    counted = set(tables.outputs(travelling))

    def charged(operator: int) -> float:
        # What several operators make is shared among them; what is in use behind the segment may be held there anyway.
        return sum(
            int(tables.weight[rank]) / uses[rank]
            for rank in set(tables.operator_outputs[operator]) - counted
            if tables.last_alive[rank] < candidate.stop
        )

    items = tuple(sorted((charged(operator), tables.operators[operator].forward_ns) for operator in rest))
    nbytes, saved_ns = _best_sets(items)
    most = min(known_ns, replay_ns(tables, candidate.start, candidate.stop, ()))
    whole = candidate.replay_ns + candidate.selective_ns - sum(tables.operators[o].forward_ns for o in keep)
    useful = whole - saved_ns < most
    if not useful.any():
        return []
    nbytes, saved_ns = _thinned(nbytes[useful], saved_ns[useful], known_ns / _STEPS)
    return [(int(least), max(0, whole - int(saved))) for least, saved in zip(nbytes, saved_ns, strict=True)]


@cache
def _best_sets(items: tuple[tuple[float, int], ...]) -> tuple[FloatArray, FloatArray]:
    """Return bytes and time saved of the sets that no other beats in both, bytes ascending."""
    nbytes, saved_ns = np.zeros(1), np.zeros(1)
    for item_bytes, item_ns in items:
        nbytes = np.concatenate((nbytes, nbytes + item_bytes))
        saved_ns = np.concatenate((saved_ns, saved_ns + item_ns))
        order = np.lexsort((-saved_ns, nbytes))
        nbytes, saved_ns = nbytes[order], saved_ns[order]
        better = np.append([True], saved_ns[1:] > np.maximum.accumulate(saved_ns)[:-1])
        nbytes, saved_ns = nbytes[better], saved_ns[better]
        if len(nbytes) > _MOST_SETS:
            nbytes, saved_ns = _thinned(nbytes, saved_ns, saved_ns[-1] / _MOST_SETS * 2)
    return nbytes, saved_ns


def _thinned(nbytes: FloatArray, saved_ns: FloatArray, step_ns: float) -> tuple[FloatArray, FloatArray]:
    """Merge neighbours within a step of time saved into the bytes of the smallest and the time of the largest."""
    changes = np.flatnonzero(np.diff(np.floor(saved_ns / step_ns)))
    return nbytes[np.append(0, changes + 1)], saved_ns[np.append(changes, len(saved_ns) - 1)]
