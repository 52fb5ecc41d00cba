"""The moments of a segment's backward as functions of its save set: what the integer programme needs of them."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import Candidate, Segment
from ..simulate import inner_moments
from ..tables import Tables


class ReplayMoment(NamedTuple):
    """Describe one moment of a segment without children.

    Attributes:
        nbytes: Its bytes with an empty save set, above what the backward starts on.
        ahead: Outputs in the save set made by this stage or later come on top.
        uncounted: So do these, made earlier: without a save set they are dead by now.
    """

    nbytes: int
    ahead: int
    uncounted: tuple[int, ...]


def replay_moments(tables: Tables, candidate: Candidate, outputs: frozenset[int]) -> list[ReplayMoment]:
    """Return the moments that can be the largest for some save set made of `outputs`, the largest first."""
    start, stop = candidate.start, candidate.stop
    replay, backward = inner_moments(tables, Segment(start=start, stop=stop))
    # In the backward moments the save set is no longer there, or counts as the inner stages hold it.
    moments = [ReplayMoment(backward, stop, ())]
    for offset, nbytes in enumerate(replay):
        stage = start + offset
        dead = tuple(
            rank
            for rank in outputs
            if tables.producer[rank] <= stage
            and tables.last_alive[rank] < stage
            and not any(start <= holder < stop for holder in tables.holders[rank])
        )
        moments.append(ReplayMoment(int(nbytes), stage + 1, dead))
    moments.sort(key=lambda moment: -moment.nbytes)
    found: list[ReplayMoment] = []
    for moment in moments:
        if not any(_outweighs(tables, larger, moment, outputs) for larger in found):
            found.append(moment)
    return found


def _outweighs(tables: Tables, larger: ReplayMoment, smaller: ReplayMoment, outputs: frozenset[int]) -> bool:
    """Say whether the smaller moment, with all that only it adds for a save set, stays within the larger."""
    margin = larger.nbytes - smaller.nbytes
    only = 0
    for rank in outputs:
        producer = int(tables.producer[rank])
        in_smaller = producer >= smaller.ahead or rank in smaller.uncounted
        in_larger = producer >= larger.ahead or rank in larger.uncounted
        if in_smaller and not in_larger:
            only += int(tables.weight[rank])
    return only <= margin
