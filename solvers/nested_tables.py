"""What a segment costs inside, for every amount of room: the persistent recursion over nested segments.

Inside a segment the choice is the same as outside: keep a stage's saved tensors, or keep only the input of an inner
segment and come back to it. Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", ACM TOMS 50 (2024), section 4. Here it
runs over candidates and over held sets, as the flat programme does; room is counted in units, additions and needs
rounded up, so what a table promises is safe.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from .level_edges import LevelEdge, LevelEdges, SaveOptions
from .problem import Segment
from .simulate import replay_ns, segment_peak
from .tables import IntArray, Tables

INFINITE = np.iinfo(np.int64).max // 4
_MOST_STATES = 20_000

Place = tuple[int, int]


class TooManyStatesError(Exception):
    """Say that the levels inside segments have too many held sets to be searched."""


@dataclass(slots=True, eq=False)
class _State:
    """A boundary of an inner level: what is visible and held there.

    `offset` bytes of room are left over beyond whole units: chosen so that what kept stages add loses nothing.
    """

    position: int
    visible: int
    held: int
    offset: int
    edges: list[tuple[LevelEdge, _State]] = field(default_factory=list)
    expanded: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """An edge under one parent, in units: needs `least`, passes on all but `shift`, a child gets all but `entered`."""

    start: int
    edge: LevelEdge
    target: _State
    least: int
    shift: int
    entered: int
    cost: int


class NestedTables:
    """Hold, for each candidate and each number of units of room, the least time its backward can take."""

    def __init__(self, tables: Tables, options: SaveOptions, *, unit_bytes: int, units: int) -> None:
        """Prepare.

        Args:
            tables: Of the problem.
            options: Save sets by candidate.
            unit_bytes: Bytes of one unit of room.
            units: Most units of room that matter.
        """
        self.tables = tables
        self.unit = unit_bytes
        self.size = units + 1
        self.costs: dict[Place, IntArray] = {}
        self._edges = LevelEdges(tables, options)
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
                row = np.minimum(values[self._root(start)][0] + replay, INFINITE)
                row[self._leaf_units(start, stop) :] = replay
                self.costs[start, stop] = row

    def tree(self, start: int, stop: int, units: int) -> Segment:
        """Return the segment that a table entry stands for."""
        cost = int(self.costs[start, stop][units])
        assert cost < INFINITE
        if units >= self._leaf_units(start, stop):
            return Segment(start=start, stop=stop)
        values = self._values(stop, [start])
        state = self._root(start)
        children: list[Segment] = []
        while state.position < stop:
            row, steps = values[state]
            times = [self._time_by(item, values[item.target][0], units) for item in steps]
            assert min(times) == row[units]
            step = steps[times.index(min(times))]
            if step.edge.keep:
                children.append(Segment(start=state.position, stop=step.edge.stop, keep=step.edge.keep))
            elif step.edge.keep is not None:
                children.append(self.tree(state.position, step.edge.stop, units - step.entered))
            units -= step.shift
            state = step.target
        return Segment(start=start, stop=stop, children=tuple(children))

    def _leaf_units(self, start: int, stop: int) -> int:
        return -(-segment_peak(self.tables, Segment(start=start, stop=stop)).nbytes // self.unit)

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
        for edge in self._edges.leave(state.position, state.visible, state.held):
            offset = (state.offset - edge.added_bytes) % self.unit
            state.edges.append((edge, self._state(edge.stop, edge.visible, edge.held, offset)))
        state.expanded = True

    def _values(self, stop: int, starts: list[int]) -> dict[_State, tuple[IntArray, list[_Step]]]:
        """Return, for each state between the starts and the stop of a parent, its least time by units of room."""
        last_saver = self.tables.last_saver[stop]
        reached: list[dict[_State, None]] = [{} for _ in range(stop + 1)]
        for start in starts:
            reached[start][self._root(start)] = None
        for position in range(min(starts), stop):
            for state in reached[position]:
                if not state.expanded:
                    self._expand(state)
                for edge, target in state.edges:
                    if edge.keep is None or edge.stop <= last_saver:
                        reached[edge.stop][target] = None
        values: dict[_State, tuple[IntArray, list[_Step]]] = {}
        for state in reached[stop]:
            values[state] = np.zeros(self.size, dtype=np.int64), []
        for position in range(stop - 1, min(starts) - 1, -1):
            for state in reached[position]:
                steps = self._steps(state, stop, last_saver)
                row = np.full(self.size, INFINITE, dtype=np.int64)
                for step in steps:
                    self._relax(row, step, values[step.target][0])
                values[state] = row, steps
        return values

    def _steps(self, state: _State, stop: int, last_saver: int) -> list[_Step]:
        """Return what a state's edges need as parts of a parent that ends at `stop`."""
        entry = int(self.tables.entry_extra[stop - 1])
        steps: list[_Step] = []
        for edge, target in state.edges:
            if edge.keep is not None and edge.stop > last_saver:
                continue
            need = edge.entered_bytes
            cost = 0
            if edge.keep is None and state.position <= last_saver:
                need = max(need, edge.forward_bytes + entry)
            elif edge.keep is not None:
                child = Segment(start=state.position, stop=edge.stop, keep=edge.keep)
                inner = segment_peak(self.tables, child).nbytes if edge.keep else 0
                need = max(edge.forward_bytes + entry, edge.entered_bytes + inner)
                cost = replay_ns(self.tables, child.start, child.stop, child.keep) if edge.keep else 0
            shift = max(0, self._units(edge.added_bytes + target.offset - state.offset))
            entered = max(0, self._units(edge.entered_bytes - state.offset))
            least = max(shift, self._units(need - state.offset), entered if edge.keep == () else 0)
            if least < self.size:
                steps.append(_Step(state.position, edge, target, least, shift, entered, cost))
        return steps

    def _units(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _relax(self, row: IntArray, step: _Step, ahead: IntArray) -> None:
        part = ahead[step.least - step.shift : self.size - step.shift] + step.cost
        if step.edge.keep == ():
            part += self.costs[step.start, step.edge.stop][step.least - step.entered : self.size - step.entered]
        np.minimum(row[step.least :], part, out=row[step.least :])

    def _time_by(self, step: _Step, ahead: IntArray, units: int) -> int:
        """Return the least time from a state by one of its steps with so many units of room."""
        if units < step.least:
            return INFINITE
        total = int(ahead[units - step.shift]) + step.cost
        if step.edge.keep == ():
            total += int(self.costs[step.start, step.edge.stop][units - step.entered])
        return total
