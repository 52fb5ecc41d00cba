"""Blocks that are built alike, as solvers know them: boundaries and operators that correspond in all of a kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from itertools import islice, takewhile

from ...profiler.blocks import kinds_of
from ...profiler.records import Profile
from ...solvers.problem import Kind
from .scope import Scope


def kinds_in(profile: Profile, bounds: list[int], kept: list[int], scope: Scope) -> tuple[Kind, ...]:
    """Return the kinds of block in a step, in order of their first blocks.

    Blocks that lie within one stage have nothing to choose, and are left out.

    Args:
        profile: The recorded step.
        bounds: The first operator of each stage, and one past the last of all.
        kept: The operators that save sets may name, ascending.
        scope: Blocks in which a user's patterns name different calls are of different kinds.
    """
    position = {bound: place for place, bound in enumerate(bounds)}
    index_of = {k: index for index, k in enumerate(kept)}
    found: list[Kind] = []
    for blocks in kinds_of(profile):
        by_scope: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for block in blocks:
            call = profile.calls[block]
            if call.start in position and call.stop in position:
                by_scope[_named(profile, block, scope)].append((call.start, call.stop))
        found += [_kind(spans, position, index_of) for spans in by_scope.values() if len(spans) > 1]
    return tuple(found)


def _kind(spans: list[tuple[int, int]], position: dict[int, int], index_of: dict[int, int]) -> Kind:
    """Say what corresponds: stages may be cut in one block and not in another, and times decide what may be kept."""
    length = spans[0][1] - spans[0][0]
    shared = [n for n in range(length + 1) if all(start + n in position for start, _ in spans)]
    operators = [n for n in range(length) if all(start + n in index_of for start, _ in spans)]
    return Kind(
        bounds=tuple(tuple(position[start + n] for n in shared) for start, _ in spans),
        operators=tuple(tuple(index_of[start + n] for n in operators) for start, _ in spans),
    )


def _named(profile: Profile, block: int, scope: Scope) -> Hashable:
    around = profile.calls[block]
    inside = takewhile(lambda call: call.start < around.stop, islice(profile.calls, block, None))
    return tuple((scope.excludes(call.module), scope.admits(call.module)) for call in inside)
