"""What plans are left where blocks of a kind are to be treated alike: corresponding candidates of all, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from .problem import Candidate, Kind, Problem, Segment
from .tables import tables_of


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Name one segment of a block by what all blocks of its kind have in common.

    Attributes:
        first: The boundary where it starts: an index into each block's `Kind.bounds`.
        last: The boundary where it ends.
        keep: Its save set: indices into each block's `Kind.operators`.
    """

    first: int
    last: int
    keep: tuple[int, ...] = ()

    def segment(self, kind: Kind, block: int) -> Segment:
        """Return the segment that it is in one block."""
        bounds, operators = kind.bounds[block], kind.operators[block]
        keep = tuple(sorted(operators[index] for index in self.keep))
        return Segment(start=bounds[self.first], stop=bounds[self.last], keep=keep)


def parts_of(kind: Kind, block: int, segments: Iterable[Segment]) -> frozenset[Part]:
    """Return what segments inside one block are in the terms of its kind."""
    place = {bound: number for number, bound in enumerate(kind.bounds[block])}
    number = {operator: index for index, operator in enumerate(kind.operators[block])}
    return frozenset(
        Part(place[item.start], place[item.stop], tuple(sorted(number[operator] for operator in item.keep)))
        for item in segments
    )


def pattern_changes(kind: Kind, segments: tuple[Segment, ...]) -> list[int]:
    """Return the blocks of a kind at which the pattern differs from that of the block before."""
    patterns = [
        parts_of(kind, block, (item for item in segments if bounds[0] <= item.start < bounds[-1]))
        for block, bounds in enumerate(kind.bounds)
    ]
    return [block for block in range(1, len(patterns)) if patterns[block] != patterns[block - 1]]


def alike_problem(problem: Problem) -> Problem:
    """Leave out the candidates that plans with blocks alike cannot choose.

    What remains lies outside of all blocks, or inside one with a counterpart in every other block of its kind; of the
    operators that it may keep, those that every counterpart may keep. What crosses a block's border, or holds blocks
    whole, goes.
    """
    # The same object every time keeps its tables.
    graphs: dict[object, Any] = tables_of(problem).graphs
    key = ("candidates", problem.kinds)
    if key not in graphs:
        graphs[key] = _candidates(problem)
    return replace(problem, candidates=graphs[key])


def _candidates(problem: Problem) -> tuple[Candidate, ...]:
    inside = [(bounds[0], bounds[-1]) for kind in problem.kinds for bounds in kind.bounds]
    free = [item for item in problem.candidates if all(item.stop <= a or b <= item.start for a, b in inside)]
    found = [*free, *(item for kind in problem.kinds for item in _counterparts(problem, kind))]
    return tuple(sorted(found, key=lambda item: (item.start, item.stop)))


def _counterparts(problem: Problem, kind: Kind) -> list[Candidate]:
    known = {(item.start, item.stop): item for item in problem.candidates}
    index_of = [{operator: index for index, operator in enumerate(own)} for own in kind.operators]
    found: list[Candidate] = []
    for first, last in combinations(range(len(kind.bounds[0])), 2):
        places = [(bounds[first], bounds[last]) for bounds in kind.bounds]
        if not all(place in known for place in places):
            continue
        items = [known[place] for place in places]
        shared = set.intersection(
            *({own[o] for o in item.operators if o in own} for item, own in zip(items, index_of, strict=True))
        )
        found += [
            replace(item, operators=tuple(sorted(own[index] for index in shared)))
            for item, own in zip(items, kind.operators, strict=True)
        ]
    return found
