"""Write the blocks that a shortened step left out into its record.

The record is a line of operators. Each operator belongs to a block of the run, or to none; a step goes along the run
several times (forward, replays, backward), each time in the blocks' order or against it: these are its sweeps. What the
second and the third block do must be the same in every sweep, after renaming: operators, what they read and make, how
long that lives, and the calls. Then it is what every block left out does between them, and it is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from .lengthened_line import Line, Target, resolved
from .shortened import PATTERN, NotAlikeError, Run
from .step_pieces import OperatorPiece, Shortened, StepPieces, StoragePiece
from .step_record import ModuleCall, StepRecord
from .sweeps import parts_of_calls, parts_of_operators, parts_of_storages


def lengthened(short: Shortened, runs: Sequence[Run]) -> StepRecord:
    """Return the record of the whole step.

    Raises:
        NotAlikeError: The blocks run do not show what those left out would do.
    """
    _check_findings(short.record, runs)
    line = StepPieces.of(short)
    for run in runs:
        line = _Splice(line, run).lengthened()
    return line.record(short.record)


def _check_findings(record: StepRecord, runs: Sequence[Run]) -> None:
    blocks = tuple(f"{name}." for run in runs for name in run.names)
    for call in record.calls:
        if any(f"{call.module}.".startswith(blocks) or finding.startswith("draws from") for finding in call.findings):
            raise NotAlikeError("a block changes something besides its output, or layers may be dropped at random")


class _Splice:
    """Put one run's blocks that were left out into a record."""

    def __init__(self, step: StepPieces, run: Run) -> None:
        self._step, self._run = step, run
        self._prefixes = {f"{name}.": block for block, name in enumerate(run.kept)}
        self._left_out = tuple(f"{name}." for name in run.left_out)
        copies = len(run.left_out)
        called = [self._block_of(call.module) for call in step.calls]
        parts, ascending = parts_of_operators(self._blocks_of_operators(called))
        self._operators = Line(len(step.operators), parts, ascending, copies)
        parts = parts_of_storages([storage.met for storage in step.storages], step.fixed, parts)
        self._storages = Line(len(step.storages), parts, ascending, copies)
        dropped = frozenset(
            number for number, call in enumerate(step.calls) if f"{call.module}.".startswith(self._left_out)
        )
        parts = parts_of_calls(step.calls, called, dropped, self._operators)
        self._calls = Line(len(step.calls), parts, ascending, copies, dropped)
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

    def lengthened(self) -> StepPieces:
        """Return the step with the blocks left out."""
        self._check()
        line = self._operators
        patterns: dict[int, Callable[[int], OperatorPiece]] = {}
        operators: list[OperatorPiece] = []
        for thing in line.order:
            if isinstance(thing, int):
                operators.append(self._operator(thing))
            else:
                copy, number = thing
                if number not in patterns:
                    patterns[number] = self._copied(number)
                operators.append(patterns[number](copy))
        return StepPieces(
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

    def _check(self) -> None:
        """Check that what is copied is what the block before it did, and that the block after it does the same."""
        one, two, three = PATTERN - 1, PATTERN, PATTERN + 1
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
        old, new = self._run.kept[PATTERN], self._run.left_out[copy]
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

    def _operator(self, number: int) -> OperatorPiece:
        """Return an operator that was run, renumbered."""
        operator, place = self._step.operators[number], self._operators.place(number)
        block = None if place is None else place.block

        def storages(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([self._storages.seen_from(k, block) for k in numbers])

        return OperatorPiece(
            operator.what,
            operator.key,
            self._calls.seen_from(operator.call, block),
            self._operators.seen_from(operator.forward_of, block),
            storages(operator.reads),
            storages(operator.produces),
            storages(operator.writes),
            storages(operator.saves),
        )

    def _copied(self, number: int) -> Callable[[int], OperatorPiece]:
        """Return what makes copies of an operator, by the number of the block left out."""
        operator = self._step.operators[number]
        call, forward_of = (
            self._calls.target(operator.call, PATTERN),
            self._operators.target(operator.forward_of, PATTERN),
        )
        reads, produces, writes, saves = (
            tuple(map(self._storage_target, numbers))
            for numbers in (operator.reads, operator.produces, operator.writes, operator.saves)
        )

        def storages(targets: tuple[Target, ...], copy: int) -> tuple[int, ...]:
            return tuple([resolved(target, copy) for target in targets])

        return lambda copy: OperatorPiece(
            operator.what,
            operator.key,
            resolved(call, copy),
            resolved(forward_of, copy),
            storages(reads, copy),
            storages(produces, copy),
            storages(writes, copy),
            storages(saves, copy),
        )

    def _storage_target(self, number: int) -> Target:
        storage = self._step.storages[number]
        if number < self._step.fixed and storage.name:
            kind, name = storage.what.kind, storage.name
            numbers = [self._named[kind, self._renamed(name, copy)] for copy in range(len(self._run.left_out))]
            return [self._storages.kept(k) for k in numbers], 0, 0
        return self._storages.target(number, PATTERN)

    def _storage(self, thing: int | tuple[int, int]) -> StoragePiece:
        number, copy = _thing(thing)
        storage, line = self._step.storages[number], self._operators
        if copy is None:
            place = self._storages.place(number)
            block = None if place is None else place.block
            born = line.seen_from(storage.born, block)
            last = None if storage.last is None else line.seen_from(storage.last, block)
            return StoragePiece(storage.what, storage.name, born, last, line.seen_from(storage.met, block))
        targets = [line.target(k, PATTERN) for k in (storage.born, storage.met)]
        born, met = (resolved(target, copy) for target in targets)
        last = None if storage.last is None else resolved(line.target(storage.last, PATTERN), copy)
        return StoragePiece(storage.what, self._renamed(storage.name, copy), born, last, met)

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
        parent = resolved(self._calls.target(call.parent, PATTERN), copy)
        module = self._renamed(call.module, copy)
        return replace(call, module=module, parent=parent, start=call.start + shift, stop=call.stop + shift)


def _thing(thing: int | tuple[int, int]) -> tuple[int, int | None]:
    return (thing, None) if isinstance(thing, int) else (thing[1], thing[0])
