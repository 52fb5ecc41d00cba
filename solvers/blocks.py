"""Find the blocks a user would wrap by hand, and cover intervals with candidates."""

from __future__ import annotations

from .problem import Problem, Segment

NO_BLOCKS_NOTE = "no candidate is marked as a block: the shortest candidate at each place stands for one"


def blocks_of(problem: Problem) -> tuple[list[Segment], str]:
    """Return the blocks as segments, in order, and a note that is empty when they are the model's own.

    Where no candidate is marked as a block, the shortest candidate at each place is taken, left to right.
    """
    marked = sorted((item.start, item.stop) for item in problem.candidates if item.block)
    note = ""
    if not marked:
        marked = sorted((item.start, item.stop) for item in problem.candidates)
        note = NO_BLOCKS_NOTE if marked else "the problem has no candidates"
    segments: list[Segment] = []
    for start, stop in marked:
        if not segments or start >= segments[-1].stop:
            segments.append(Segment(start=start, stop=stop))
    return segments, note


def stops_by_start(problem: Problem) -> dict[int, list[int]]:
    """Return, for each stage where candidates start, where they stop, ascending."""
    stops: dict[int, list[int]] = {}
    for start, stop in sorted((item.start, item.stop) for item in problem.candidates):
        stops.setdefault(start, []).append(stop)
    return stops


def cover(stops: dict[int, list[int]], start: int, stop: int) -> list[Segment]:
    """Cover start:stop with candidates inside it, the longest at each place, left to right; the rest stays kept."""
    segments: list[Segment] = []
    position = start
    while position < stop:
        fitting = [end for end in stops.get(position, ()) if end <= stop]
        if fitting:
            segments.append(Segment(start=position, stop=fitting[-1]))
            position = fitting[-1]
        else:
            position += 1
    return segments
