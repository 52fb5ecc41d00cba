"""A step's record taken apart, into pieces that are cheap to copy, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

from .step_record import ModuleCall, Operator, StepRecord, Storage


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


_REFERENCES = ("call", "forward_of", "reads", "produces", "writes")
"""By which an operator refers to others, to storages and to calls."""


class OperatorPiece(NamedTuple):
    """An operator: what it is, alike in all blocks, and what it refers to."""

    what: Operator
    key: Hashable
    call: int
    forward_of: int
    reads: tuple[int, ...]
    produces: tuple[int, ...]
    writes: tuple[int, ...]
    saves: tuple[int, ...]


class StoragePiece(NamedTuple):
    """A storage: what it is, alike in all blocks, and what differs."""

    what: Storage
    name: str
    born: int
    last: int | None
    met: int


class StepPieces(NamedTuple):
    """A step in pieces, which are cheap to copy.

    Attributes:
        operators: Its operators.
        storages: Its storages; who reads them is told by the operators.
        calls: Its calls.
        forward_stop: As in `StepRecord`.
        loss_stop: As in `StepRecord`.
        fixed: Storages known before the first operator.
    """

    operators: list[OperatorPiece]
    storages: list[StoragePiece]
    calls: list[ModuleCall]
    forward_stop: int
    loss_stop: int
    fixed: int

    @staticmethod
    def of(short: Shortened) -> StepPieces:
        """Take a record apart."""
        record = short.record
        saves: list[list[int]] = [[] for _ in record.operators]
        for number, storage in enumerate(record.storages):
            for saver in storage.saved_by:
                saves[saver].append(number)
        keys = record.scratch_keys or (None,) * len(record.operators)
        operators = [
            OperatorPiece(_outer(o), key, o.call, o.forward_of, o.reads, o.produces, o.writes, tuple(saved))
            for o, key, saved in zip(record.operators, keys, saves, strict=True)
        ]
        storages = [
            StoragePiece(
                replace(s, name="", born=-1, last=None, last_unsaved=None, saved_by=(), read_by=(), written_by=()),
                s.name,
                s.born,
                s.last,
                met,
            )
            for s, met in zip(record.storages, short.met, strict=True)
        ]
        return StepPieces(operators, storages, list(record.calls), record.forward_stop, record.loss_stop, short.fixed)

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


class _Maker:
    """Make operators of pieces; what many have in common is taken apart once."""

    def __init__(self) -> None:
        self._known: dict[int, Callable[..., Operator]] = {}

    def __call__(self, piece: OperatorPiece) -> Operator:
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


def _outer(operator: Operator) -> Operator:
    """Return an operator without what it refers to."""
    return replace(operator, call=-1, forward_of=-1, reads=(), produces=(), writes=())
