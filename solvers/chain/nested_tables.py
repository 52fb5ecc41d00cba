"""What a segment costs inside, for every amount of room: the persistent recursion over nested segments.

Inside a segment the choice is the same as outside: keep a stage's saved tensors, or keep only the input of an inner
segment and come back to it. Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", ACM TOMS 50 (2024), section 4. Here it
runs over candidates and over held sets, as the flat programme does.

Room is counted in units, and each state has its own zero: `k` units at a state stand for `k * unit + offset` bytes.
What an item needs is thus rounded up exactly. What it adds is rounded, up in tables that promise (a plan is read off
them) and down in tables that bound (no plan takes less time than they say). The first kept stage that leads to a state
gives it its offset, such that what this stage adds is whole units: so a run of kept stages, by far the most frequent
way, loses nothing however long it is, and what is lost is at most a unit at each nested segment and each second way
into a state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..leaf_peaks import leaf_peaks
from ..problem import Segment
from ..simulate import replay_ns
from ..tables import IntArray, Tables
from .level_edges import LevelEdges

INFINITE = np.iinfo(np.int64).max // 4
_MOST_STATES = 20_000

Place = tuple[int, int]


class TooManyStatesError(Exception):
    """Say that the levels inside segments have too many held sets to be searched."""


@dataclass(slots=True, eq=False)
class _State:
    """A boundary of an inner level: what is visible and held there.

    `k` units of room at the state are `k * unit + offset` bytes, with an offset in [0, unit).
    """

    position: int
    visible: int
    held: int
    offset: int
    steps: list[_Step] = field(default_factory=list)


class _Step(NamedTuple):
    """An edge in units: it needs `least`, passes on all but `shift`, and its child, if it has one, all but `entered`.

    `forward` is what its forward moments need in bytes, beyond the state's offset; while the parent replays, the
    parent's entry comes on top. A parent that stops at one of `never_within` does not allow it.
    """

    target: _State
    is_child: bool
    least: int
    forward: int
    shift: int
    entered: int
    never_within: tuple[int, ...]


class NestedTables:
    """Hold, for each candidate and each number of units of room, the least time its backward can take."""

    def __init__(self, tables: Tables, *, unit_bytes: int, units: int, bounding: bool) -> None:
        """Prepare.

        Args:
            tables: Of the problem.
            unit_bytes: Bytes of one unit of room.
            units: Most units of room that matter.
            bounding: Whether times are bounds from below, for any room of at most so many units, rather than promises.
        """
        self.bounding = bounding
        self.tables = tables
        self.unit = unit_bytes
        self.size = units + 1
        self.costs: dict[Place, IntArray] = {}
        self._edges = LevelEdges(tables, {})
        self._states: dict[tuple[int, int, int], _State] = {}

    def build(self, deadline: float | None) -> None:
        """Fill the tables.

        Raises:
            TooManyStatesError: If the held sets of inner levels are too many.
            TimeoutError: If the deadline, in `time.perf_counter()` seconds, passes first.
        """
        by_stop: dict[int, list[int]] = {}
        for start, stop in self.tables.candidates:
            if self.tables.last_saver[stop] >= start:
                by_stop.setdefault(stop, []).append(start)
        for stop in sorted(by_stop):
            if deadline is not None and time.perf_counter() > deadline:
                raise TimeoutError
            values = self._values(stop, by_stop[stop])
            for start in by_stop[stop]:
                replay = replay_ns(self.tables, start, stop, ())
                row = np.minimum(values[self._root(start)] + replay, INFINITE)
                row[self._leaf_units(start, stop) :] = replay
                self.costs[start, stop] = row

    def tree(self, start: int, stop: int, units: int) -> Segment:
        """Return the segment that a table entry stands for; of tables that promise."""
        cost = int(self.costs[start, stop][units])
        assert cost < INFINITE
        if units >= self._leaf_units(start, stop):
            return Segment(start=start, stop=stop)
        values = self._values(stop, [start])
        state = self._root(start)
        children: list[Segment] = []
        while state.position < stop:
            times = {
                step: self._time_by(state, step, values[step.target], units)
                for step, least in self._allowed(state, stop)
                if least <= units
            }
            step = min(times, key=lambda item: times[item])
            assert times[step] == values[state][units]
            place = (state.position, step.target.position)
            if step.is_child:
                children.append(self.tree(*place, units - step.entered))
            units -= step.shift
            state = step.target
        return Segment(start=start, stop=stop, children=tuple(children))

    def _leaf_units(self, start: int, stop: int) -> int:
        return self._units(leaf_peaks(self.tables)[start, stop])

    def _root(self, start: int) -> _State:
        return self._state(start, 0, 0, 0)

    def _state(self, position: int, visible: int, held: int, offset: int) -> _State:
        key = (position, visible, held)
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= _MOST_STATES:
                raise TooManyStatesError
            state = self._states[key] = _State(position, visible, held, offset)
        return state

    def _expand(self, state: _State) -> None:
        """List the steps that leave a state, whatever the parent."""
        for edge in self._edges.leave(state.position, state.visible, state.held):
            # A state met first by this edge has the offset with which the edge passes on whole units:
            # k * unit + state.offset - added = (k - shift) * unit + offset. Met before, it has its own.
            offset = (state.offset - edge.added_bytes) % self.unit
            target = self._state(edge.stop, edge.visible, edge.held, offset)
            shift = self._rounded(edge.added_bytes + target.offset - state.offset)
            entered = self._rounded(edge.entered_bytes - state.offset)
            least = max(shift, self._units(edge.entered_bytes - state.offset))
            forward = edge.forward_bytes - state.offset
            barred: tuple[int, ...] = ()
            if edge.keep is not None:
                barred = self.tables.candidates[state.position, edge.stop].never_within
            step = _Step(target, edge.keep is not None, least, forward, shift, entered, barred)
            state.steps.append(step)

    def _units(self, nbytes: int) -> int:
        """Round up: what is needed."""
        return -(-nbytes // self.unit)

    def _rounded(self, nbytes: int) -> int:
        """Round what is taken away; the result may be -1 where tables bound, for offsets may differ by so much."""
        return nbytes // self.unit if self.bounding else self._units(nbytes)

    def _values(self, stop: int, starts: list[int]) -> dict[_State, IntArray]:
        """Return, for each state between the starts and the stop of a parent, its least time by units of room."""
        last_saver = self.tables.last_saver[stop]
        reached: list[dict[_State, None]] = [{} for _ in range(stop + 1)]
        for start in starts:
            reached[start][self._root(start)] = None
        for position in range(min(starts), stop):
            for state in reached[position]:
                if not state.steps:
                    self._expand(state)
                for step in state.steps:
                    if not step.is_child or step.target.position <= last_saver:
                        reached[step.target.position][step.target] = None
        values = {state: np.zeros(self.size, dtype=np.int64) for state in reached[stop]}
        for position in range(stop - 1, min(starts) - 1, -1):
            for state in reached[position]:
                values[state] = self._value(state, stop, values)
        return values

    def _value(self, state: _State, stop: int, values: dict[_State, IntArray]) -> IntArray:
        """Return the least time from one state, those after it being known."""
        size = self.size
        row = np.full(size, INFINITE, dtype=np.int64)
        for step, least in self._allowed(state, stop):
            if least >= size:
                continue
            part = _moved(values[step.target], least, step.shift)
            if step.is_child:
                part = part + _moved(self.costs[state.position, step.target.position], least, step.entered)
            np.minimum(row[least:], part, out=row[least:])
        return row

    def _allowed(self, state: _State, stop: int) -> Iterator[tuple[_Step, int]]:
        """Yield the steps that a parent ending at `stop` allows, each with the units that it needs there.

        A replay of the parent runs up to its last stage that saves something, and a child there would end the body in a
        checkpoint, which torch replays another number of times than counted. So children end before that stage, and
        only steps that begin at it or before need room for the replay's forward moments.
        """
        last_saver = self.tables.last_saver[stop]
        entry = int(self.tables.entry_extra[stop - 1])
        for step in state.steps:
            if not step.is_child:
                replayed = state.position <= last_saver
            elif step.target.position <= last_saver and stop not in step.never_within:
                replayed = True
            else:
                continue
            yield step, max(step.least, self._units(step.forward + entry)) if replayed else step.least

    def _time_by(self, state: _State, step: _Step, ahead: IntArray, units: int) -> int:
        """Return the least time from a state by one of its steps with so many units of room, if it is enough."""
        total = int(ahead[units - step.shift])
        if step.is_child:
            total += int(self.costs[state.position, step.target.position][units - step.entered])
        return total


def _moved(row: IntArray, least: int, units: int) -> IntArray:
    """Return a row from `least` on, moved by so many units; no more room than the row knows of can be left."""
    if units >= 0:
        return row[least - units : len(row) - units]
    return np.concatenate((row[least - units :], np.repeat(row[-1:], -units)))
