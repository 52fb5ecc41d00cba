"""Write the blocks that a shortened step left out into its record.

The record is a line of operators. Each operator belongs to a block of the run, or to none; a step goes along the run
several times (forward, replays, backward), each time in the blocks' order or against it: these are its sweeps. What the
second and the third block do must be the same in every sweep, after renaming: operators, what they read and make, how
long that lives, and the calls. Then it is what every block left out does between them, and it is written there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

from .shortened import FIRST, LAST, NotAlikeError, Run
from .step_record import ModuleCall, Operator, StepRecord, Storage

_KEPT = FIRST + LAST
_PATTERN = FIRST - 1
"""The block that is copied: the last of those run at the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """Hold the record of a shortened step, with what is needed to lengthen it.

    Attributes:
        record: The record.
        met: By storage, how many operators there had been when it was met.
        fixed: Storages known before the first operator.
    """

    record: StepRecord
    met: tuple[int, ...]
    fixed: int


def lengthened(short: Shortened, runs: Sequence[Run]) -> StepRecord:
    """Return the record of the whole step.

    Raises:
        NotAlikeError: The blocks run do not show what those left out would do.
    """
    _check_findings(short.record, runs)
    line = _Step.of(short)
    for run in runs:
        line = _Splice(line, run).lengthened()
    return line.record(short.record)


def _check_findings(record: StepRecord, runs: Sequence[Run]) -> None:
    blocks = tuple(f"{name}." for run in runs for name in run.names)
    for call in record.calls:
        if any(f"{call.module}.".startswith(blocks) or finding.startswith("draws from") for finding in call.findings):
            raise NotAlikeError("a block changes something besides its output, or layers may be dropped at random")


_REFERENCES = ("call", "forward_of", "reads", "produces", "writes")
"""By which an operator refers to others, to storages and to calls."""


class _Operator(NamedTuple):
    """An operator: what it is, alike in all blocks, and what it refers to."""

    what: Operator
    key: Hashable
    call: int
    forward_of: int
    reads: tuple[int, ...]
    produces: tuple[int, ...]
    writes: tuple[int, ...]
    saves: tuple[int, ...]


class _Storage(NamedTuple):
    """A storage: what it is, alike in all blocks, and what differs."""

    what: Storage
    name: str
    born: int
    last: int | None
    met: int


class _Step(NamedTuple):
    """A step in pieces, which are cheap to copy.

    Attributes:
        operators: Its operators.
        storages: Its storages; who reads them is told by the operators.
        calls: Its calls.
        forward_stop: As in `StepRecord`.
        loss_stop: As in `StepRecord`.
        fixed: Storages known before the first operator.
    """

    operators: list[_Operator]
    storages: list[_Storage]
    calls: list[ModuleCall]
    forward_stop: int
    loss_stop: int
    fixed: int

    @staticmethod
    def of(short: Shortened) -> _Step:
        """Take a record apart."""
        record = short.record
        saves: list[list[int]] = [[] for _ in record.operators]
        for number, storage in enumerate(record.storages):
            for saver in storage.saved_by:
                saves[saver].append(number)
        keys = record.scratch_keys or (None,) * len(record.operators)
        operators = [
            _Operator(_outer(o), key, o.call, o.forward_of, o.reads, o.produces, o.writes, tuple(saved))
            for o, key, saved in zip(record.operators, keys, saves, strict=True)
        ]
        storages = [
            _Storage(
                replace(s, name="", born=-1, last=None, last_unsaved=None, saved_by=(), read_by=(), written_by=()),
                s.name,
                s.born,
                s.last,
                met,
            )
            for s, met in zip(record.storages, short.met, strict=True)
        ]
        return _Step(operators, storages, list(record.calls), record.forward_stop, record.loss_stop, short.fixed)

    def record(self, short: StepRecord) -> StepRecord:
        """Put the pieces together; the rest is as in the record that they came from."""
        saved: list[list[int]] = [[] for _ in self.storages]
        read: list[list[int]] = [[] for _ in self.storages]
        written: list[list[int]] = [[] for _ in self.storages]
        for number, operator in enumerate(self.operators):
            for users, used in ((saved, operator.saves), (read, operator.reads), (written, operator.writes)):
                for storage in used:
                    users[storage].append(number)
        return replace(
            short,
            operators=tuple(map(_Maker(), self.operators)),
            calls=tuple(self.calls),
            storages=tuple(
                replace(
                    storage.what,
                    name=storage.name,
                    born=storage.born,
                    last=storage.last,
                    last_unsaved=storage.last,
                    saved_by=tuple(saved[number]),
                    read_by=tuple(read[number]),
                    written_by=tuple(written[number]),
                )
                for number, storage in enumerate(self.storages)
            ),
            forward_stop=self.forward_stop,
            loss_stop=self.loss_stop,
            scratch_keys=tuple(operator.key for operator in self.operators) if short.scratch_keys else (),
        )


class _Place(NamedTuple):
    """Where something is: in which sweep, at which block, and which of the things there."""

    sweep: int
    block: int
    offset: int


class _Maker:
    """Make operators of pieces; what many have in common is taken apart once."""

    def __init__(self) -> None:
        self._known: dict[int, Callable[..., Operator]] = {}

    def __call__(self, piece: _Operator) -> Operator:
        what = piece.what
        make = self._known.get(id(what))
        if make is None:
            alike = {field.name: getattr(what, field.name) for field in fields(what) if field.name not in _REFERENCES}
            make = self._known[id(what)] = partial(Operator, **alike)
        return make(
            call=piece.call,
            forward_of=piece.forward_of,
            reads=piece.reads,
            produces=piece.produces,
            writes=piece.writes,
        )


_Target = int | tuple[list[int], int, int]
"""A new number that is the same in all copies; or by block left out where a block's things begin, which of these counts
from there on, and which of the things."""


class _Line:
    """A list of things, cut into the blocks' parts in every sweep; copies of the pattern's parts are put into it.

    Args:
        count: How many things there are.
        parts: By sweep and block, the first thing and the one past the last.
        ascending: By sweep, whether it goes in the blocks' order.
        copies: How many blocks are left out.
        dropped: Things that are taken out: what stands for the blocks left out.

    Attributes:
        order: By new number, the old one, or the number of the block left out and the old one of what is copied.
    """

    def __init__(
        self,
        count: int,
        parts: list[list[tuple[int, int]]],
        ascending: list[bool],
        copies: int,
        dropped: frozenset[int] = frozenset(),
    ) -> None:
        self.parts = parts
        self._place: list[_Place | None] = [None] * count
        for sweep, blocks in enumerate(parts):
            for block, (start, stop) in enumerate(blocks):
                for position in range(start, stop):
                    self._place[position] = _Place(sweep, block, position - start)
            lengths = {blocks[block][1] - blocks[block][0] for block in (_PATTERN - 1, _PATTERN, _PATTERN + 1)}
            if len(lengths) > 1:
                raise NotAlikeError("blocks run different operators")
        self.order: list[int | tuple[int, int]] = []
        self._kept: list[int] = []
        # By sweep: where the block before those left out begins, each of them, and the one behind.
        self._starts: list[list[int]] = [[0] * (copies + 2) for _ in parts]
        inserted: dict[int, list[int]] = {}
        for sweep, blocks in enumerate(parts):
            inserted.setdefault(blocks[_PATTERN][1 if ascending[sweep] else 0], []).append(sweep)
        for position in range(count + 1):
            for sweep in inserted.get(position, ()):
                start, stop = parts[sweep][_PATTERN]
                for number in range(copies) if ascending[sweep] else reversed(range(copies)):
                    self._starts[sweep][number + 1] = len(self.order)
                    self.order += [(number, thing) for thing in range(start, stop)]
            self._kept.append(len(self.order))
            if position < count and position not in dropped:
                self.order.append(position)
        for starts, blocks in zip(self._starts, parts, strict=True):
            starts[0], starts[-1] = (self._kept[blocks[block][0]] for block in (_PATTERN, _PATTERN + 1))

    def place(self, position: int) -> _Place | None:
        """Return where a thing is; None outside of all blocks."""
        return self._place[position] if 0 <= position < len(self._place) else None

    def kept(self, position: int) -> int:
        """Return the new number of a thing that was there, or of the end; what is below 0 stays."""
        return self._kept[position] if position >= 0 else position

    def start(self, place: _Place, copy: int | None) -> int:
        """Return the new number of the first thing of a part, or of its copy in a block left out."""
        if copy is None:
            return self.kept(self.parts[place.sweep][place.block][0])
        return self._starts[place.sweep][copy + 1]

    def relative(self, position: int | None, block: int) -> Hashable:
        """Name a thing as seen from a block: the same name means the same, seen from another one."""
        place = None if position is None else self.place(position)
        if place is None:
            return position
        if self._is_the_end_for(block, place):
            return position
        if abs(place.block - block) > 1:
            raise NotAlikeError("a block refers to what is more than one block away")
        return place.sweep, place.block - block, place.offset

    @staticmethod
    def _is_the_end_for(block: int | None, place: _Place) -> bool:
        """Say whether all blocks see a thing alike: the last block's, whose backward begins a replay of all of them."""
        return block is not None and place.block == _KEPT - 1 and block <= _PATTERN

    def target(self, position: int, block: int) -> _Target:
        """Return what a reference in the block that is copied means in every copy: see `resolved`."""
        place = self.place(position)
        if place is None or self._is_the_end_for(block, place):
            return self.kept(position)
        step = place.block - block
        if abs(step) > 1:
            raise NotAlikeError("a block refers to what is more than one block away")
        return self._starts[place.sweep], step + 1, place.offset

    def seen_from(self, position: int, block: int | None) -> int:
        """Return the new number of what something that was run refers to, in a block or, with None, outside."""
        place = self.place(position)
        if place is None or self._is_the_end_for(block, place):
            return self.kept(position)
        if block is None:
            if place.block in (_PATTERN - 1, _PATTERN):
                raise NotAlikeError("something outside of the blocks uses what is inside of one")
            return self.kept(position)
        if (block > _PATTERN) == (place.block > _PATTERN):
            return self.kept(position)
        if abs(place.block - block) > 1:
            raise NotAlikeError("a block refers to what is more than one block away")
        # Across those left out: the first of them, or the last.
        return self._starts[place.sweep][-2 if block > _PATTERN else 1] + place.offset


def resolved(target: _Target, copy: int) -> int:
    """Return the new number that a target means in a copy, by the number of the block left out."""
    if isinstance(target, int):
        return target
    starts, step, offset = target
    return starts[copy + step] + offset


class _Splice:
    """Put one run's blocks that were left out into a record."""

    def __init__(self, step: _Step, run: Run) -> None:
        self._step, self._run = step, run
        self._prefixes = {f"{name}.": block for block, name in enumerate(run.kept)}
        self._left_out = tuple(f"{name}." for name in run.left_out)
        copies = len(run.left_out)
        called = [self._block_of(call.module) for call in step.calls]
        parts, ascending = self._sweeps(self._blocks_of_operators(called))
        self._operators = _Line(len(step.operators), parts, ascending, copies)
        self._storages = _Line(len(step.storages), self._parts_of_storages(parts), ascending, copies)
        dropped = frozenset(
            number for number, call in enumerate(step.calls) if f"{call.module}.".startswith(self._left_out)
        )
        calls = self._parts_of_calls(called, dropped, len(parts))
        self._calls = _Line(len(step.calls), calls, ascending, copies, dropped)
        self._named = {
            (storage.what.kind, storage.name): number
            for number, storage in enumerate(step.storages[: step.fixed])
            if storage.name
        }
        self._travels = self._handed_on()

    def _handed_on(self) -> frozenset[int]:
        """Return the storages made in a block that operators elsewhere use."""
        found: set[int] = set()
        for number, operator in enumerate(self._step.operators):
            here = self._operators.place(number)
            block = None if here is None else here.block
            for storage in (*operator.reads, *operator.saves):
                there = self._storages.place(storage)
                if there is not None and there.block != block:
                    found.add(storage)
        return frozenset(found)

    def lengthened(self) -> _Step:
        """Return the step with the blocks left out."""
        self._check()
        line = self._operators
        patterns: dict[int, Callable[[int], _Operator]] = {}
        operators: list[_Operator] = []
        for thing in line.order:
            if isinstance(thing, int):
                operators.append(self._operator(thing))
            else:
                copy, number = thing
                if number not in patterns:
                    patterns[number] = self._copied(number)
                operators.append(patterns[number](copy))
        return _Step(
            operators=operators,
            storages=list(map(self._storage, self._storages.order)),
            calls=list(map(self._call, self._calls.order)),
            forward_stop=line.kept(self._step.forward_stop),
            loss_stop=line.kept(self._step.loss_stop),
            fixed=self._step.fixed,
        )

    def _block_of(self, module: str) -> int | None:
        module = f"{module}."
        return next((block for prefix, block in self._prefixes.items() if module.startswith(prefix)), None)

    def _blocks_of_operators(self, called: list[int | None]) -> list[int | None]:
        """Return each operator's block: where it is called, or where that is called whose gradient it computes."""
        blocks: list[int | None] = []
        for operator in self._step.operators:
            if operator.call >= 0:
                blocks.append(called[operator.call])
            else:
                blocks.append(blocks[operator.forward_of] if operator.forward_of >= 0 else None)
        return blocks

    @staticmethod
    def _sweeps(blocks: list[int | None]) -> tuple[list[list[tuple[int, int]]], list[bool]]:
        """Cut the operators into sweeps."""
        pieces: list[tuple[int, int, int]] = []
        start = 0
        for block, group in groupby(blocks):
            stop = start + sum(1 for _ in group)
            if block is not None:
                pieces.append((block, start, stop))
            start = stop
        parts: list[list[tuple[int, int]]] = []
        ascending: list[bool] = []
        while pieces:
            if [block for block, _, _ in pieces[:2]] == [_KEPT - 1, 0]:
                # The last block's backward begins, and needs what a replay of all of them makes.
                pieces = pieces[1:]
            upward = pieces[0][0] == 0
            sweep, pieces = pieces[:_KEPT], pieces[_KEPT:]
            if [block for block, _, _ in sweep] != (list(range(_KEPT)) if upward else list(reversed(range(_KEPT)))):
                raise NotAlikeError("the blocks are not run one after the other")
            if pieces and pieces[0][0] == (_KEPT - 2 if upward else 1):
                # It turns round: the last block's operators of both ways are in one piece, and count in the first.
                pieces.insert(0, (sweep[-1][0], sweep[-1][2], sweep[-1][2]))
            found = [(start, stop) for _, start, stop in sorted(sweep)]
            _adjoin(found, upward)
            parts.append(found)
            ascending.append(upward)
        if not parts or not ascending[0]:
            raise NotAlikeError("the blocks are not run one after the other")
        return parts, ascending

    def _parts_of_storages(self, parts: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        met, fixed = [storage.met for storage in self._step.storages], self._step.fixed
        return [
            [(bisect_left(met, start, lo=fixed), bisect_left(met, stop, lo=fixed)) for start, stop in blocks]
            for blocks in parts
        ]

    def _parts_of_calls(
        self, called: list[int | None], dropped: frozenset[int], sweeps: int
    ) -> list[list[tuple[int, int]]]:
        calls = self._step.calls
        found: list[list[tuple[int, int] | None]] = [[None] * _KEPT for _ in range(sweeps)]
        for block, group in groupby(range(len(calls)), key=lambda number: -1 if number in dropped else called[number]):
            numbers = list(group)
            if block is None or block < 0:
                continue
            places = (self._operators.place(calls[number].start) for number in numbers)
            sweep = next((place.sweep for place in places if place is not None and place.block == block), None)
            if sweep is None or found[sweep][block] is not None:
                raise NotAlikeError("a block's calls are not together")
            found[sweep][block] = numbers[0], numbers[-1] + 1
        parts: list[list[tuple[int, int]]] = []
        for blocks in found:
            middle = [part for part in blocks[_PATTERN - 1 : _PATTERN + 2] if part is not None]
            if len(middle) not in (0, 3):
                raise NotAlikeError("blocks make different calls")
            end = len(calls)
            parts.append([(end, end) if part is None else part for part in blocks])
            if middle:
                (_, first), (second, third), (fourth, _) = middle if middle == sorted(middle) else reversed(middle)
                skipped = set(range(first, second)) | set(range(third, fourth))
                if not skipped <= dropped:
                    raise NotAlikeError("something is called between the blocks")
        return parts

    def _check(self) -> None:
        """Check that what is copied is what the block before it did, and that the block after it does the same."""
        one, two, three = _PATTERN - 1, _PATTERN, _PATTERN + 1
        for line, pattern in (
            (self._operators, self._operator_pattern),
            (self._storages, self._storage_pattern),
            (self._calls, self._call_pattern),
        ):
            for blocks in line.parts:
                if [pattern(k, one) for k in range(*blocks[one])] != [pattern(k, two) for k in range(*blocks[two])]:
                    raise NotAlikeError("a block does not do what the one before it does")
        operators = self._step.operators
        for blocks in self._operators.parts:
            seen = [[operators[k].what for k in range(*blocks[block])] for block in (two, three)]
            if seen[0] != seen[1]:
                raise NotAlikeError("a block does not do what the one before it does")

    def _reference(self, number: int, block: int) -> Hashable:
        """Name a storage as seen from a block."""
        storage = self._step.storages[number]
        if number < self._step.fixed and storage.name:
            owner = self._block_of(storage.name)
            if owner == block:
                return storage.what.kind, self._short_name(storage.name, block)
            if owner is not None or storage.name.startswith(self._left_out):
                raise NotAlikeError("a block uses another one's parameters")
        return self._storages.relative(number, block)

    def _short_name(self, name: str, block: int) -> str:
        return name.removeprefix(f"{self._run.kept[block]}.") if f"{name}." != f"{self._run.kept[block]}." else ""

    def _renamed(self, name: str, copy: int) -> str:
        old, new = self._run.kept[_PATTERN], self._run.left_out[copy]
        return f"{new}{name[len(old) :]}" if f"{name}.".startswith(f"{old}.") else name

    def _operator_pattern(self, number: int, block: int) -> Hashable:
        operator = self._step.operators[number]
        return (
            operator.what,
            operator.key,
            self._calls.relative(operator.call, block),
            self._operators.relative(operator.forward_of, block),
            *(
                tuple(self._reference(storage, block) for storage in storages)
                for storages in (operator.reads, operator.produces, operator.writes, operator.saves)
            ),
        )

    def _storage_pattern(self, number: int, block: int) -> Hashable:
        storage, line = self._step.storages[number], self._operators
        last = line.relative(storage.last, block)
        if number in self._travels and not isinstance(last, tuple):
            # What one block hands to another may be collected; of which blocks is not known.
            raise NotAlikeError("what a block returns outlives the next one")
        name, met = self._short_name(storage.name, block), line.relative(storage.met, block)
        return storage.what, name, line.relative(storage.born, block), last, met

    def _call_pattern(self, number: int, block: int) -> Hashable:
        call, place = self._step.calls[number], self._calls.place(number)
        assert place is not None
        begin, _ = self._operators.parts[place.sweep][block]
        name = self._short_name(call.module, block)
        outer = replace(call, module=name, parent=-1, start=call.start - begin, stop=call.stop - begin)
        return outer, self._calls.relative(call.parent, block)

    def _operator(self, number: int) -> _Operator:
        """Return an operator that was run, renumbered."""
        operator, place = self._step.operators[number], self._operators.place(number)
        block = None if place is None else place.block

        def storages(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([self._storages.seen_from(k, block) for k in numbers])

        return _Operator(
            operator.what,
            operator.key,
            self._calls.seen_from(operator.call, block),
            self._operators.seen_from(operator.forward_of, block),
            storages(operator.reads),
            storages(operator.produces),
            storages(operator.writes),
            storages(operator.saves),
        )

    def _copied(self, number: int) -> Callable[[int], _Operator]:
        """Return what makes copies of an operator, by the number of the block left out."""
        operator = self._step.operators[number]
        call, forward_of = (
            self._calls.target(operator.call, _PATTERN),
            self._operators.target(operator.forward_of, _PATTERN),
        )
        reads, produces, writes, saves = (
            tuple(map(self._storage_target, numbers))
            for numbers in (operator.reads, operator.produces, operator.writes, operator.saves)
        )

        def storages(targets: tuple[_Target, ...], copy: int) -> tuple[int, ...]:
            return tuple([resolved(target, copy) for target in targets])

        return lambda copy: _Operator(
            operator.what,
            operator.key,
            resolved(call, copy),
            resolved(forward_of, copy),
            storages(reads, copy),
            storages(produces, copy),
            storages(writes, copy),
            storages(saves, copy),
        )

    def _storage_target(self, number: int) -> _Target:
        storage = self._step.storages[number]
        if number < self._step.fixed and storage.name:
            kind, name = storage.what.kind, storage.name
            numbers = [self._named[kind, self._renamed(name, copy)] for copy in range(len(self._run.left_out))]
            return [self._storages.kept(k) for k in numbers], 0, 0
        return self._storages.target(number, _PATTERN)

    def _storage(self, thing: int | tuple[int, int]) -> _Storage:
        number, copy = _thing(thing)
        storage, line = self._step.storages[number], self._operators
        if copy is None:
            place = self._storages.place(number)
            block = None if place is None else place.block
            born = line.seen_from(storage.born, block)
            last = None if storage.last is None else line.seen_from(storage.last, block)
            return _Storage(storage.what, storage.name, born, last, line.seen_from(storage.met, block))
        targets = [line.target(k, _PATTERN) for k in (storage.born, storage.met)]
        born, met = (resolved(target, copy) for target in targets)
        last = None if storage.last is None else resolved(line.target(storage.last, _PATTERN), copy)
        return _Storage(storage.what, self._renamed(storage.name, copy), born, last, met)

    def _call(self, thing: int | tuple[int, int]) -> ModuleCall:
        number, copy = _thing(thing)
        call, place, line = self._step.calls[number], self._calls.place(number), self._operators
        if place is None:
            return replace(
                call, parent=self._calls.kept(call.parent), start=line.kept(call.start), stop=line.kept(call.stop)
            )
        shift = line.start(place, copy) - line.parts[place.sweep][place.block][0]
        if copy is None:
            parent = self._calls.seen_from(call.parent, place.block)
            return replace(call, parent=parent, start=call.start + shift, stop=call.stop + shift)
        parent = resolved(self._calls.target(call.parent, _PATTERN), copy)
        module = self._renamed(call.module, copy)
        return replace(call, module=module, parent=parent, start=call.start + shift, stop=call.stop + shift)


def _thing(thing: int | tuple[int, int]) -> tuple[int, int | None]:
    return (thing, None) if isinstance(thing, int) else (thing[1], thing[0])


def _outer(operator: Operator) -> Operator:
    """Return an operator without what it refers to."""
    return replace(operator, call=-1, forward_of=-1, reads=(), produces=(), writes=())


def _adjoin(parts: list[tuple[int, int]], upward: bool) -> None:
    """Check that nothing runs between the blocks among which others are left out."""
    middle = parts[_PATTERN - 1 : _PATTERN + 2]
    ordered = middle if upward else list(reversed(middle))
    if any(before[1] != after[0] for before, after in pairwise(ordered)):
        raise NotAlikeError("something runs between the blocks")
