"""Price any plan on any problem: peak bytes and added nanoseconds. Every solver's answer goes through here.

What one segment needs on top of what is alive when its backward begins does not depend on the rest of the plan. So a
plan is priced level by level: the top level's items, and for each segment the items inside it, relative to that base.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .plan_check import check_plan
from .problem import Problem, Segment
from .tables import IntArray, Peak, Tables, alive_bytes, tables_of

_BoolArray = npt.NDArray[np.bool_]
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Give the bytes alive at one moment of the step.

    Attributes:
        phase: "forward", "replay" or "backward".
        stage: The stage that runs.
        nbytes: Everything alive, fixed bytes included.
    """

    phase: str
    stage: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Say what a plan costs.

    Attributes:
        peak_bytes: Largest of all moments and of the problem's `floor_bytes`.
        added_ns: Time of all replays, in nanoseconds.
        phase: What happens at the peak: "forward", "replay", "backward" or "floor".
        stage: The stage at the peak; -1 at the floor.
        moments: Every moment in the order of execution; empty unless asked for.
    """

    peak_bytes: int
    added_ns: int
    phase: str
    stage: int
    moments: tuple[Moment, ...] = ()


class _Level(NamedTuple):
    """Bytes of one level's tensors, by stage: alive as it runs forward, and held once backward comes to it."""

    alive: IntArray
    held: IntArray
    kept: _BoolArray


def simulate(problem: Problem, segments: tuple[Segment, ...], *, trace: bool = True) -> Simulation:
    """Price a plan.

    Args:
        problem: The problem; its budget plays no part.
        segments: The top level's segments, ascending and disjoint.
        trace: Whether to list the moments; without it, it is several times as fast.

    Raises:
        ValueError: If the segments are no plan of this problem.
    """
    tables = tables_of(problem)
    check_plan(tables, segments)
    added = sum(added_ns(tables, segment) for segment in segments)
    always = problem.fixed_bytes - tables.raised_bytes
    peak = _top_peak(tables, segments)
    moments: tuple[Moment, ...] = ()
    if trace:
        moments = tuple(
            Moment(phase=phase, stage=stage, nbytes=always + nbytes)
            for phase, stage, nbytes in _top_moments(tables, segments)
        )
    if peak.nbytes + always < problem.floor_bytes:
        peak = Peak(problem.floor_bytes - always, "floor", -1)
    return Simulation(
        peak_bytes=peak.nbytes + always,
        added_ns=added,
        phase=peak.phase,
        stage=peak.stage,
        moments=moments,
    )


def added_ns(tables: Tables, segment: Segment) -> int:
    """Return the time of the replays of a segment and of those inside it, in nanoseconds."""
    return sum(replay_ns(tables, item.start, item.stop, item.keep) for item in segment.walk())


def replay_ns(tables: Tables, start: int, stop: int, keep: tuple[int, ...]) -> int:
    """Return the time of one replay of a candidate that keeps a save set; 0 where it saves nothing."""
    if tables.last_saver[stop] < start:
        return 0
    candidate = tables.candidates[start, stop]
    saved = sum(tables.operators[operator].forward_ns for operator in keep)
    return max(0, candidate.replay_ns - saved + (candidate.selective_ns if keep else 0))


def segment_peak(tables: Tables, segment: Segment) -> Peak:
    """Return a segment's largest replay or backward moment, above fixed bytes and all that its backward starts on.

    What it starts on is what earlier items hold, what outlives the forward, and the segment's inputs. Like all bytes of
    the tables it is raised by `Tables.raised_bytes`, so it is never negative.
    """
    known = tables.peaks.get(segment)
    if known is not None:
        return known
    level = _inner_level(tables, segment)
    peak = Peak(-_NEVER, "backward", segment.start)
    replay = _replay(tables, segment, level)
    if len(replay):
        offset = int(replay.argmax())
        peak = Peak(int(replay[offset]), "replay", segment.start + offset)
    peak = max(
        peak, _backward_peak(tables, level, segment.start, segment.stop, segment.children), key=lambda p: p.nbytes
    )
    return tables.remember(segment, peak)


def inner_moments(tables: Tables, segment: Segment) -> tuple[IntArray, int]:
    """Return a leaf segment's replay moments, stage by stage, and the largest of its backward moments.

    Both are above what the segment's backward starts on, as in `segment_peak`.
    """
    level = _inner_level(tables, segment)
    backward = _backward_peak(tables, level, segment.start, segment.stop, segment.children)
    return _replay(tables, segment, level), backward.nbytes


def _top_peak(tables: Tables, segments: tuple[Segment, ...]) -> Peak:
    level = _level(tables, 0, tables.stage_count, segments, (0, len(tables.weight)), ())
    forward = level.alive + tables.forward_extra + tables.top_forward
    offset = int(forward.argmax())
    backward = _backward_peak(tables, level, 0, tables.stage_count, segments)
    backward = backward._replace(nbytes=backward.nbytes + tables.outliving_bytes)
    return max(Peak(int(forward[offset]), "forward", offset), backward, key=lambda peak: peak.nbytes)


def _inner_level(tables: Tables, segment: Segment) -> _Level:
    made = (tables.first_made[segment.start + 1], tables.first_made[segment.stop + 1])
    return _level(tables, segment.start, segment.stop, segment.children, made, tables.outputs(segment.keep))


def _level(
    tables: Tables, start: int, stop: int, children: tuple[Segment, ...], made: tuple[int, int], kept: tuple[int, ...]
) -> _Level:
    """Sum up one level: stages start..stop-1, the tensors of rank made[0]..made[1]-1, of which `kept` never died."""
    first, last = made
    length = stop - start
    weight = tables.weight[first:last]
    is_kept = np.ones(length, dtype=np.bool_)
    for child in children:
        is_kept[child.start - start : child.stop - start] = False
    least_hold = np.full(last - first, _NEVER, dtype=np.int64)
    pairs = slice(tables.first_pair[start], tables.first_pair[stop])
    stages, tensors = tables.pair_stage[pairs][::-1], tables.pair_tensor[pairs][::-1]
    chosen = is_kept[stages - start] & (tensors >= first)
    least_hold[tensors[chosen] - first] = stages[chosen]  # Last assignment wins: the earliest stage.
    for child in children:
        held = [rank - first for rank in tables.inputs(child.start, child.stop) if rank >= first]
        held += [rank - first for rank in tables.outputs(child.keep)]
        least_hold[held] = np.minimum(least_hold[held], child.start)

    is_held = least_hold < _NEVER
    birth = np.maximum(tables.producer[first:last] - start, 0)
    death = np.where(is_held, length, np.minimum(tables.last_alive[first:last] - start + 1, length))
    if kept:
        ranks = np.array(kept) - first
        birth[ranks] = 0
        death[ranks] = length
    alive = alive_bytes(birth, death, weight, length)
    held = np.bincount(least_hold[is_held] - start, weights=weight[is_held], minlength=length).cumsum()
    return _Level(alive, held.astype(np.int64), is_kept)


def _replay(tables: Tables, segment: Segment, level: _Level) -> IntArray:
    """Return the bytes at each stage of the replay, which stops early, at the last stage that saves a tensor."""
    stop = max(segment.start, tables.last_saver[segment.stop] + 1)
    alive = level.alive[: stop - segment.start] + tables.forward_extra[segment.start : stop]
    return alive + int(tables.entry_extra[segment.stop - 1])


def _base(tables: Tables, level: _Level, start: int, child: Segment) -> int:
    """Return what a segment's backward starts on, of its own level: its save set is not part of it."""
    return int(level.held[child.start - start]) - tables.total(tables.outputs(child.keep))


def _backward_peak(tables: Tables, level: _Level, start: int, stop: int, children: tuple[Segment, ...]) -> Peak:
    backward = np.where(level.kept, level.held + tables.backward_extra[start:stop], -_NEVER)
    offset = int(backward.argmax())
    peak = Peak(int(backward[offset]), "backward", start + offset)
    for child in children:
        inner = segment_peak(tables, child)
        total = inner.nbytes + _base(tables, level, start, child)
        if total > peak.nbytes:
            peak = inner._replace(nbytes=total)
    return peak


_Plain = tuple[str, int, int]


def _top_moments(tables: Tables, segments: tuple[Segment, ...]) -> Iterator[_Plain]:
    count = tables.stage_count
    level = _level(tables, 0, count, segments, (0, len(tables.weight)), ())
    forward = level.alive + tables.forward_extra + tables.top_forward
    for stage in range(count):
        yield "forward", stage, int(forward[stage])
    yield from _backward_moments(tables, level, 0, count, segments, tables.outliving_bytes)


def _backward_moments(
    tables: Tables, level: _Level, start: int, stop: int, children: tuple[Segment, ...], base: int
) -> Iterator[_Plain]:
    by_last = {child.stop - 1: child for child in children}
    stage = stop - 1
    while stage >= start:
        child = by_last.get(stage)
        if child is None:
            yield "backward", stage, base + int(level.held[stage - start] + tables.backward_extra[stage])
            stage -= 1
            continue
        inner_base = base + _base(tables, level, start, child)
        inner = _inner_level(tables, child)
        for offset, nbytes in enumerate(_replay(tables, child, inner)):
            yield "replay", child.start + offset, inner_base + int(nbytes)
        yield from _backward_moments(tables, inner, child.start, child.stop, child.children, inner_base)
        stage = child.start - 1
