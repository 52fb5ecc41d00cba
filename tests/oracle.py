"""Exhaustive search of a plan space, using nothing but the simulator: the oracle for small problems."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from remat.solvers import Problem, Segment, simulate


@dataclass
class Oracle:
    """All plans of a space with their peaks and times."""

    priced: list[tuple[int, int]]

    def least_peak(self) -> int:
        return min(peak for peak, _ in self.priced)

    def least_added(self, budget: int) -> int | None:
        return min((added for peak, added in self.priced if peak <= budget), default=None)


def flat_oracle(problem: Problem, options: dict[tuple[int, int], tuple[tuple[int, ...], ...]]) -> Oracle:
    """Price every one-level plan; each segment keeps nothing or one of the save sets listed for it."""
    return _price(problem, _flat(problem, options, 0))


def operator_oracle(problem: Problem) -> Oracle:
    """Price every one-level plan with every subset of operators."""
    options = {(c.start, c.stop): tuple(_subsets(c.operators)) for c in problem.candidates}
    return flat_oracle(problem, options)


def nested_oracle(problem: Problem, options: dict[tuple[int, int], tuple[tuple[int, ...], ...]], depth: int) -> Oracle:
    """Price every plan of at most `depth` levels."""
    return _price(problem, _nested(problem, options, 0, len(problem.stages), depth, None))


def _price(problem: Problem, plans: Iterator[tuple[Segment, ...]]) -> Oracle:
    prices = [simulate(problem, plan, trace=False) for plan in plans]
    return Oracle([(price.peak_bytes, price.added_ns) for price in prices])


def _subsets(operators: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(operators) + 1):
        yield from combinations(operators, size)


def _flat(problem, options, position) -> Iterator[tuple[Segment, ...]]:
    return _nested(problem, options, position, len(problem.stages), 1, None)


def _nested(problem, options, position, stop, depth, parent) -> Iterator[tuple[Segment, ...]]:
    if position == stop:
        yield ()
        return
    yield from _nested(problem, options, position + 1, stop, depth, parent)
    for candidate in problem.candidates:
        place = (candidate.start, candidate.stop)
        if candidate.start != position or candidate.stop > stop or place == parent:
            continue
        if parent is not None and candidate.start <= _last_saver(problem, parent) < candidate.stop:
            continue
        if parent is not None and stop in candidate.never_within:
            continue
        if not any(i in t.holders for t in problem.tensors for i in range(*place)):
            continue
        sets = options.get(place, ()) if parent is None else ()
        bodies = [Segment(start=place[0], stop=place[1], keep=keep) for keep in sets]
        insides = _nested(problem, options, *place, depth - 1, place) if depth > 1 else [()]
        bodies += [Segment(start=place[0], stop=place[1], children=inside) for inside in insides]
        for rest in _nested(problem, options, candidate.stop, stop, depth, parent):
            for body in bodies:
                yield (body, *rest)


def _last_saver(problem: Problem, place: tuple[int, int]) -> int:
    return max(i for t in problem.tensors for i in t.holders if place[0] <= i < place[1])
