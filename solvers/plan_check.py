"""Refuse a tree of segments that is no plan of the problem."""

from __future__ import annotations

from itertools import pairwise

from .problem import Segment
from .tables import Tables


def check_plan(tables: Tables, segments: tuple[Segment, ...]) -> None:
    """Check that every segment is a candidate, siblings are disjoint and ascending, and the nesting rules hold.

    Raises:
        ValueError: With the segment and the rule that it breaks.
    """
    _check_siblings(tables, segments, 0, tables.stage_count)


def _check_siblings(tables: Tables, segments: tuple[Segment, ...], start: int, stop: int) -> None:
    free_from = start
    for segment in segments:
        name = f"segment {segment.start}:{segment.stop}"
        if segment.start < free_from:
            raise ValueError(f"{name} starts before stage {free_from}: siblings must ascend and be disjoint")
        if segment.stop > stop:
            raise ValueError(f"{name} ends after stage {stop}, where its parent ends")
        free_from = segment.stop
        _check_segment(tables, segment, name)


def _check_segment(tables: Tables, segment: Segment, name: str) -> None:
    candidate = tables.candidates.get((segment.start, segment.stop))
    if candidate is None:
        raise ValueError(f"{name} is none of the problem's {len(tables.candidates)} candidates")
    if segment.keep:
        if any(later <= earlier for earlier, later in pairwise(segment.keep)):
            raise ValueError(f"{name}: its save set must ascend, got {segment.keep}")
        unknown = set(segment.keep) - set(candidate.operators)
        if unknown:
            raise ValueError(f"{name}: operators {sorted(unknown)} are not among those it may keep")
    if not segment.children:
        return
    if segment.keep:
        raise ValueError(f"{name} has a save set of {len(segment.keep)} operators and children; it may have one only")
    _check_siblings(tables, segment.children, segment.start, segment.stop)
    last = tables.last_saver[segment.stop]
    for child in segment.children:
        if (child.start, child.stop) == (segment.start, segment.stop):
            raise ValueError(f"{name} is nested in itself")
        inside = f"segment {child.start}:{child.stop}"
        if child.keep:
            raise ValueError(f"{inside} has a save set of {len(child.keep)} operators and is nested in {name}")
        if segment.stop in tables.candidates[child.start, child.stop].never_within:
            raise ValueError(f"{inside} must not be nested in one that stops at {segment.stop}, as {name} does")
        if child.start <= last < child.stop:
            raise ValueError(
                f"{name}: its last stage that saves a tensor, {last}, lies inside {child.start}:{child.stop}"
            )
