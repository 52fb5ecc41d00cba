"""The integer programme of the retention model, in a compact form.

One level of segments is a path from boundary to boundary: one binary for each kept stage and each candidate (a second
one where it runs with a save set). What is held up to a position is a running sum; a tensor that several items may
hold has one continuous variable for each place where it may be held first. Operators of save sets are single binaries
however many candidates contain them: a segment that is not chosen makes its rows weaker than rows that hold anyway,
because resident bytes and save sets together never exceed what the last backward moment bounds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations

import pulp  # pyright: ignore[reportMissingTypeStubs] - it has annotations, but no py.typed

from ..leaf_peaks import leaf_peaks
from ..problem import Candidate, Kind, Problem
from ..simulate import replay_ns
from ..tables import Tables
from .replay_moments import replay_moments
from .rows import Expression, Rows


@dataclass(slots=True, kw_only=True)
class IlpModel:
    """Hold the programme and the variables that are read back.

    Attributes:
        programme: Minimises added time in units of `unit_ns`.
        kept: The binary of each kept stage.
        plain: The binary of each candidate run without a save set.
        selective: The binary of each candidate run with one.
        operators: The binary of each operator that some candidate may keep.
        changes: By kind that is treated alike, a binary for each block but the first: its pattern is another one.
        unit_ns: What one unit of the objective is.
    """

    programme: pulp.LpProblem
    unit_ns: float
    kept: list[pulp.LpVariable] = field(default_factory=list)
    plain: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    selective: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    operators: dict[int, pulp.LpVariable] = field(default_factory=dict)
    changes: list[list[pulp.LpVariable]] = field(default_factory=list)


class ModelBuilder:
    """Build the programme for one budget."""

    def __init__(
        self, problem: Problem, tables: Tables, room_bytes: int, *, save_sets: bool, alike: bool = False
    ) -> None:
        """Prepare.

        Args:
            problem: The problem.
            tables: Its tables.
            room_bytes: The room that moments have, as `Tables.room_bytes` gives it.
            save_sets: Whether segments may keep operators' outputs.
            alike: Whether blocks of a kind are treated alike, but for one block at which that may change.
        """
        self.tables = tables
        self.count = tables.stage_count
        self.unit = max(1.0, room_bytes / 1024)
        self.room = room_bytes / self.unit
        self.candidates = [item for item in problem.candidates if tables.last_saver[item.stop] >= item.start]
        self.save_sets = save_sets
        self.kinds = problem.kinds if alike else ()
        most = max((item.replay_ns + item.selective_ns for item in self.candidates), default=1)
        self.rows = Rows()
        self.model = IlpModel(programme=self.rows.programme, unit_ns=max(1.0, most / 1000))
        self.objective: Expression = defaultdict(float)
        self.kept_tensors: dict[int, pulp.LpVariable] = {}
        self.held: list[pulp.LpVariable] = []
        self.kept_before: list[pulp.LpVariable] = []

    def build(self) -> IlpModel:
        """Return the programme."""
        self._add_variables()
        self._add_path()
        self._add_save_sets()
        for number, kind in enumerate(self.kinds):
            self._add_kind(number, kind)
        final = self._add_holding()
        self._add_forward_moments(final)
        self._add_backward_moments()
        self.model.programme.setObjective(pulp.LpAffineExpression(self.objective))
        return self.model

    def _bytes(self, nbytes: int) -> float:
        return nbytes / self.unit

    def _add_variables(self) -> None:
        model, tables = self.model, self.tables
        model.kept = [self.rows.binary(f"kept_{stage}") for stage in range(self.count)]
        for item in self.candidates:
            place = (item.start, item.stop)
            model.plain[place] = self.rows.binary(f"plain_{item.start}_{item.stop}")
            self.objective[model.plain[place]] = replay_ns(tables, *place, ()) / model.unit_ns
            if self.save_sets and item.operators:
                chosen = self.rows.binary(f"selective_{item.start}_{item.stop}")
                model.selective[place] = chosen
                self.objective[chosen] = (item.replay_ns + item.selective_ns) / model.unit_ns
                for index in item.operators:
                    if index not in model.operators:
                        operator = self.rows.binary(f"operator_{index}")
                        model.operators[index] = operator
                        self.objective[operator] = -tables.operators[index].forward_ns / model.unit_ns

    def _items_of(self, item: Candidate) -> list[pulp.LpVariable]:
        place = (item.start, item.stop)
        selective = self.model.selective.get(place)
        return [self.model.plain[place]] if selective is None else [self.model.plain[place], selective]

    def _add_path(self) -> None:
        """Cover every stage once: what ends at a boundary begins there.

        Valid because items are intervals: a one-level plan, kept stages included, is a path from boundary to boundary,
        and every unit flow of binaries is one.
        """
        flow: list[Expression] = [defaultdict(float) for _ in range(self.count + 1)]
        for stage, variable in enumerate(self.model.kept):
            flow[stage][variable] += 1.0
            flow[stage + 1][variable] -= 1.0
        for item in self.candidates:
            for variable in self._items_of(item):
                flow[item.start][variable] += 1.0
                flow[item.stop][variable] -= 1.0
        for position in range(self.count):
            self.rows.equal(flow[position], 1.0 if position == 0 else 0.0)

    def _add_save_sets(self) -> None:
        """Keep an operator only where a segment with a save set that may name it is chosen.

        Valid because at most one chosen segment contains a stage, so one binary for each operator serves all
        candidates around it: which segment keeps it follows from the path. A tensor that several operators make is kept
        when one of them is, hence not less than each of their binaries.
        """
        model, tables = self.model, self.tables
        containing: dict[int, list[pulp.LpVariable]] = {index: [] for index in model.operators}
        for item in self.candidates:
            selective = model.selective.get((item.start, item.stop))
            if selective is not None:
                for index in item.operators:
                    containing[index].append(selective)
                self._keep_cost_positive(item, selective)
        makers: dict[int, list[pulp.LpVariable]] = defaultdict(list)
        for index, variable in model.operators.items():
            self.rows.at_most({variable: 1.0, **dict.fromkeys(containing[index], -1.0)}, 0.0)
            for rank in tables.outputs((index,)):
                makers[rank].append(variable)
        for rank, variables in makers.items():
            kept = variables[0] if len(variables) == 1 else self.rows.continuous(f"output_{rank}")
            self.kept_tensors[rank] = kept
            if len(variables) > 1:
                for variable in variables:
                    self.rows.at_most({variable: 1.0, kept: -1.0}, 0.0)

    def _add_kind(self, number: int, kind: Kind) -> None:
        """Give the blocks of a kind what the block before has, except at one block at most.

        Valid because what is chosen inside a block is its candidates' and operators' binaries, and two blocks have the
        same pattern exactly when those that correspond are equal.
        """
        by_block = [self._choices(kind, block) for block in range(len(kind.bounds))]
        changes = [self.rows.binary(f"change_{number}_{block}") for block in range(1, len(by_block))]
        self.rows.at_most(dict.fromkeys(changes, 1.0), 1.0)
        self.model.changes.append(changes)
        for change, before, after in zip(changes, by_block, by_block[1:], strict=False):
            for one, other in zip(before, after, strict=True):
                self.rows.at_most({one: 1.0, other: -1.0, change: -1.0}, 0.0)
                self.rows.at_most({other: 1.0, one: -1.0, change: -1.0}, 0.0)

    def _choices(self, kind: Kind, block: int) -> list[pulp.LpVariable]:
        """Return the binaries of one block, those that correspond in the same place in each."""
        model, bounds = self.model, kind.bounds[block]
        places = list(combinations(bounds, 2))
        found = [chosen[place] for chosen in (model.plain, model.selective) for place in places if place in chosen]
        return found + [model.operators[index] for index in kind.operators[block] if index in model.operators]

    def _keep_cost_positive(self, item: Candidate, selective: pulp.LpVariable) -> None:
        """Add what a segment's save set saves beyond its whole replay back to the objective.

        Valid because a replay takes no less than nothing: where the segment is chosen, the row says that `back` is at
        least the time of what is kept less the whole; where it is not, all its operators together stay below the limit.
        """
        total = item.replay_ns + item.selective_ns
        excess = sum(self.tables.operators[index].forward_ns for index in item.operators) - total
        if excess <= 0:
            return
        unit = self.model.unit_ns
        back = self.rows.continuous(f"excess_{item.start}_{item.stop}")
        self.objective[back] = 1.0
        saved = {self.model.operators[i]: self.tables.operators[i].forward_ns / unit for i in item.operators}
        self.rows.at_most({**saved, back: -1.0, selective: excess / unit}, (total + excess) / unit)

    def _add_holding(self) -> dict[int, Expression]:
        """Add the running sums of held bytes; return for each tensor whether anything holds it.

        `held_p` is at least what items that start at `p` or before hold, save sets made before `p` included: the sum up
        to the position before, and what is held first here. An inequality is enough, for only upper limits are put on
        it. What a save set takes is counted from behind the stage that makes it, and `save_sets_before` counts the same
        bytes alone, so that a segment can tell those made inside it.
        """
        events = self._events()
        gains: list[Expression] = [defaultdict(float) for _ in range(self.count + 1)]
        final: dict[int, Expression] = {}
        for rank, places in events.items():
            final[rank] = self._hold(rank, places, gains)
        previous: pulp.LpVariable | None = None
        for position in range(self.count):
            held = self.rows.continuous(f"held_{position}")
            row: Expression = defaultdict(float, gains[position])
            row[held] -= 1.0
            if previous is not None:
                row[previous] += 1.0
            self.rows.at_most(row, 0.0)
            self.held.append(held)
            previous = held
        made: list[Expression] = [defaultdict(float) for _ in range(self.count)]
        for rank, variable in self.kept_tensors.items():
            made[int(self.tables.producer[rank])][variable] += self._bytes(int(self.tables.weight[rank]))
        self.kept_before = [self.rows.continuous(f"save_sets_before_{stage}") for stage in range(self.count + 1)]
        for stage in range(self.count):
            row = made[stage]
            row[self.kept_before[stage]] = 1.0
            row[self.kept_before[stage + 1]] = -1.0
            self.rows.equal(row, 0.0)
        return final

    def _events(self) -> dict[int, dict[int, list[pulp.LpVariable]]]:
        """Return, for each tensor and each position, what starts holding it there; save sets count one stage later."""
        tables = self.tables
        events: dict[int, dict[int, list[pulp.LpVariable]]] = defaultdict(lambda: defaultdict(list))
        weights = [int(weight) for weight in tables.weight]
        for rank, holders in enumerate(tables.holders):
            for stage in holders:
                if weights[rank]:
                    events[rank][stage].append(self.model.kept[stage])
        for item in self.candidates:
            variables = self._items_of(item)
            for rank in tables.inputs(item.start, item.stop):
                if weights[rank]:
                    events[rank][item.start] += variables
        for rank, variable in self.kept_tensors.items():
            events[rank][int(tables.producer[rank]) + 1].append(variable)
        return events

    def _hold(self, rank: int, places: dict[int, list[pulp.LpVariable]], gains: list[Expression]) -> Expression:
        """Add one tensor's bytes to the positions where it may be held first.

        Valid because a tensor counts once however many hold it: `holds_t_p` is the largest of the sums that say so up
        to `p`, each of which is at most 1, and the bytes gained at `p` are those of the difference to the place before.
        """
        nbytes = self._bytes(int(self.tables.weight[rank]))
        producer = int(self.tables.producer[rank])
        users = {*self.tables.consumers[rank], *self.tables.holders[rank]}
        if rank in self.kept_tensors:
            users.add(producer)
        so_far: Expression = {}
        for position in sorted(places):
            starting: Expression = dict.fromkeys(places[position], 1.0)
            parts = self._exclusive_sums(rank, position, so_far, starting, len(users) == 1)
            if len(parts) == 1:
                now = parts[0]
            else:
                variable = self.rows.continuous(f"holds_{rank}_{position}")
                now = {variable: 1.0}
                for part in parts:
                    self.rows.at_most({**part, variable: -1.0}, 0.0)
            gain: Expression = defaultdict(float, now)
            for variable, value in so_far.items():
                gain[variable] -= value
            for variable, value in gain.items():
                gains[position][variable] += nbytes * value
            so_far = now
        return so_far

    def _exclusive_sums(
        self, rank: int, position: int, so_far: Expression, starting: Expression, alone: bool
    ) -> list[Expression]:
        """Return sums that are at most 1 each and whose largest says whether a tensor is held up to a position.

        Valid because a plan has one item at a stage: items that cover one and the same stage exclude each other, and so
        do items that start together. A sum over such items is 0 or 1. Where nothing ties two groups together, each is a
        sum of its own, and the larger of them says whether the tensor is held.

        Args:
            rank: The tensor.
            position: The position.
            so_far: Whether it is held before it.
            starting: What starts to hold it there.
            alone: Whether everything that may hold it covers one and the same stage.
        """
        if alone or (not so_far and rank not in self.kept_tensors):
            return [{**so_far, **starting}]
        producer = int(self.tables.producer[rank])
        kept = self.kept_tensors.get(rank)
        if kept is None or position != producer + 1:
            return [part for part in (so_far, starting) if part]
        # Up to here only its own stage may hold it, when kept; its own operator does when that stage is replayed.
        others = {variable: value for variable, value in starting.items() if variable is not kept}
        return [part for part in ({**so_far, kept: 1.0}, others) if part]

    def _add_forward_moments(self, final: dict[int, Expression]) -> None:
        """Bound what is alive as each stage runs: what is still in use, and what is held beyond its last use.

        Valid because what is in use does not depend on the plan, and a tensor lingers behind its last use exactly when
        something holds it, earlier or later. The running sum over last uses is the same in all rows.
        """
        tables, count = self.tables, self.count
        alive = tables.in_use + tables.top_forward
        lost: dict[int, list[int]] = defaultdict(list)
        for rank in final:
            lost[int(tables.last_alive[rank])].append(rank)
        lingering: pulp.LpVariable | None = None
        most = 0.0
        for stage in range(count):
            row: Expression = defaultdict(float)
            for rank in lost.get(stage - 1, ()):
                most += self._bytes(int(tables.weight[rank]))
                for variable, value in final[rank].items():
                    row[variable] += value * self._bytes(int(tables.weight[rank]))
            if row:
                now = self.rows.continuous(f"lingering_{stage}")
                row[now] -= 1.0
                if lingering is not None:
                    row[lingering] += 1.0
                self.rows.at_most(row, 0.0)
                lingering = now
            limit = self.room - self._bytes(int(alive[stage]))
            if limit < 0:
                # What every plan has in use is over the limit here: a row that nothing satisfies says so.
                self.rows.at_most({self.model.kept[0]: 0.0}, limit)
            # Where all that could linger fits, no row is needed.
            if lingering is not None and most > limit:
                self.rows.at_most({lingering: 1.0}, limit)

    def _add_backward_moments(self) -> None:
        """Bound the moment at which backward comes to the item that starts at each position.

        One row for a position is enough, for at most one item starts there. Where none does, the row says that what is
        held up to it fits, and that is so in every plan that fits: all that is held is alive when backward begins.
        """
        tables = self.tables
        limit = self.room - self._bytes(tables.outliving_bytes)
        rows: list[Expression] = [defaultdict(float) for _ in range(self.count)]
        for stage in range(self.count):
            rows[stage][self.held[stage]] = 1.0
            rows[stage][self.model.kept[stage]] = self._bytes(int(tables.backward_extra[stage]))
        for item in self.candidates:
            place = (item.start, item.stop)
            rows[item.start][self.model.plain[place]] = self._bytes(leaf_peaks(tables)[place])
            if place in self.model.selective:
                self._bound_selective(item, limit)
        for row in rows:
            self.rows.at_most(row, limit)

    def _bound_selective(self, item: Candidate, limit: float) -> None:
        """Bound the moments of a segment with a save set that no other of its moments outweighs.

        A moment of the replay counts what the segment has made by then, kept or not; the rest of the save set comes on
        top (`ahead`, `uncounted`). No big constant switches a row off where its segment is not chosen: it then adds to
        what is held up to the segment's start what save sets hold from there on, and all that is held fits in any case.
        The binaries of two other items that start here are added with their own needs, because they exclude this one,
        and with it all save sets inside: that cuts off fractions.
        """
        tables = self.tables
        chosen = self.model.selective[item.start, item.stop]
        plain_bytes = self._bytes(leaf_peaks(tables)[item.start, item.stop])
        names = frozenset(tables.outputs(item.operators))
        for moment in replay_moments(tables, item, names):
            row: Expression = defaultdict(float)
            row[self.held[item.start]] = 1.0
            row[chosen] = self._bytes(moment.nbytes)
            row[self.model.plain[item.start, item.stop]] = plain_bytes
            if item.stop == item.start + 1:
                row[self.model.kept[item.start]] = self._bytes(int(tables.backward_extra[item.start]))
            if moment.ahead < item.stop:
                row[self.kept_before[item.stop]] += 1.0
                row[self.kept_before[moment.ahead]] -= 1.0
            for rank in moment.uncounted:
                row[self.kept_tensors[rank]] += self._bytes(int(tables.weight[rank]))
            self.rows.at_most(row, limit)
