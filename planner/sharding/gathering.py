"""Follow FSDP2 over a recorded step: what `fully_shard` gathers, reduces and frees around each call, in bytes.

Read from and measured on torch 2.13, with `fully_shard` as it is by default (the root keeps what it gathers until
backward, the units do not). The host allocates and frees in this order whatever the device:

- A unit's forward gathers into one buffer, and copies one tensor a parameter out of it. The copies go when the forward
  returns, the root's when its backward ends. The buffer goes when the next unit has gathered, or the root returns.
- Backward gathers again when it reaches the unit's output, frees the buffer at once, and gathers the buffer of the unit
  before it ahead.
- Gradients are whole until the unit's backward ends. They are then copied into one buffer, and that is reduced into
  another, which stays: the gradients' shards. The first goes when the next unit is reduced. A unit whose inputs need no
  gradient, like the root, is reduced at the end of the whole backward.
- A replay gathers the units that it calls, and they stay gathered until their own backward ends.
- A collective takes a copy of its buffer while it runs (gloo's, whose threads may give it back a moment late, which is
  not counted; NCCL takes none from torch's allocator, so on CUDA the count errs on the safe side).
- Gradients that do not divide evenly are padded in a copy each before they are reduced.

Not counted: mixed precision policies, CPU offload, several mesh dimensions, explicit prefetching, and gradients that
wait for a later batch unreduced (`set_requires_gradient_sync`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np

from ...profiler.step_record import ModuleCall, Storage

Kind = Literal["parameter", "gradient", "unsharded", "communication"]
Event = Literal["return", "reduce", "differentiate", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """Describe a parameter that every rank holds a part of.

    Attributes:
        name: Its name in the model.
        nbytes: One rank's part, padded to the largest.
        even: Whether its first dimension divides by the ranks.
    """

    name: str
    nbytes: int
    even: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Describe a storage that the recorded step does not have; `born` and `last` count operators as there."""

    kind: Kind
    name: str
    nbytes: int
    born: int
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Say that something happens to a unit just before an operator."""

    before: int
    event: Event
    unit: str


def moments(
    calls: Sequence[ModuleCall],
    forward_of: Sequence[int],
    replayed: np.ndarray,
    loss_stop: int,
    units: Iterable[str],
) -> list[Moment]:
    """List in order what happens to the units of a recorded step.

    Args:
        calls: The step's module calls, those of replays as well.
        forward_of: By operator, the forward operator whose gradient it computes.
        replayed: Whether each operator belongs to a replay; shape (operators,).
        loss_stop: Operators of forward and loss.
        units: Paths of the units.
    """
    wanted = set(units)
    found: list[tuple[int, int, int, Moment]] = []

    def add(before: int, rank: int, tie: int, event: Event, call: ModuleCall) -> None:
        found.append((before, rank, tie, Moment(before=before, event=event, unit=call.module)))

    backward = np.flatnonzero(~replayed[loss_stop:]) + loss_stop
    sources = np.array(forward_of, dtype=np.int64)[backward]
    for index, call in enumerate(calls):
        if call.module not in wanted:
            continue
        # What ends comes before what begins, inner calls before outer ones; a call without operators ends at once.
        add(call.start, 3, 2 * index, "call", call)
        if call.stop > call.start:
            add(call.stop, 0, -index, "return", call)
        else:
            add(call.start, 3, 2 * index + 1, "return", call)
        own = backward[(sources >= call.start) & (sources < call.stop)]
        if call.start < loss_stop and own.size:
            first = int(own[0])
            while first > loss_stop and replayed[first - 1]:
                first -= 1
            add(first, 2, -index, "differentiate", call)
            if call.differentiable:
                add(int(own[-1]) + 1, 1, -index, "reduce", call)
    return [moment for *_, moment in sorted(found, key=lambda entry: entry[:3])]


@dataclass(slots=True, eq=False)
class _Unit:
    """Hold what is known of one unit while a step is followed."""

    path: str
    parameters: tuple[ShardedParameter, ...]
    differentiations: int
    """Calls whose backward is still to come."""
    gathered: bool = False
    ahead: bool = False
    """Whether its buffer is gathered, and nothing copied out of it yet."""
    state: Literal["idle", "forward", "backward", "reduced"] = "idle"
    reached: bool = False
    """Whether backward has reached it: its calls are then replays, which leave it as it is."""
    turns: list[int] = field(default_factory=list)
    """Places of its calls in the order of forward."""

    @property
    def shards(self) -> str:
        """Return the name of the shards of its gradients, which lie in one buffer."""
        return f"{self.path}.gradients".lstrip(".")


class Gathering:
    """Follow a step; what a rank holds besides activations is then in the attributes.

    Args:
        steps: What `moments` lists.
        parameters: By unit, in the model's order, the root first: what it gathers.
        storages: The recorded step's.
        operators: How many operators the step has.
        loss_stop: Operators of forward and loss.
        ranks: Processes.
        round_to: Allocation granularity in bytes.
        accumulation: Shards of gradients exist throughout; what is reduced is added to them.

    Attributes:
        buffers: Gathered parameters, buffers of collectives, shards of gradients.
        reduced: By index of a gradient's storage, the last operator during which it is whole.
        peaks: By operator, the most bytes of buffers and whole gradients just before it, where something is gathered or
            reduced there; what follows the last operator stands under their count.
    """

    def __init__(
        self,
        steps: Sequence[Moment],
        parameters: Mapping[str, Sequence[ShardedParameter]],
        storages: Sequence[Storage],
        *,
        operators: int,
        loss_stop: int,
        ranks: int,
        round_to: int,
        accumulation: bool,
    ) -> None:
        self.buffers: list[Buffer] = []
        self.reduced: dict[int, int] = {}
        self.peaks: dict[int, int] = {}
        self._storages, self._loss_stop = storages, loss_stop
        self._ranks, self._round_to = ranks, round_to
        self._gradients = {s.name: index for index, s in enumerate(storages) if s.kind == "gradient"}
        self._made = sorted(self._gradients.values(), key=lambda index: -storages[index].born)
        self._whole: set[int] = set()
        self._here = self._held = 0
        self._open: dict[tuple[Kind, str], tuple[int, int]] = {}
        self._order: list[_Unit] = []
        self._outermost: _Unit | None = None
        self._kept: _Unit | None = None
        self._reducing: _Unit | None = None
        to_come = Counter(moment.unit for moment in steps if moment.event == "differentiate")
        self._units = {path: _Unit(path, tuple(held), to_come[path]) for path, held in parameters.items()}
        self._root = self._units[""]
        self._go_to(0)
        if accumulation:
            for unit in self._units.values():
                part = sum(parameter.nbytes for parameter in unit.parameters if parameter.name in self._gradients)
                if part:
                    self._take("gradient", unit.shards, part)
        act = {"call": self._call, "return": self._return, "differentiate": self._reach, "reduce": self._reduce}
        for before, several in groupby(steps, key=lambda moment: moment.before):
            self._go_to(before)
            for moment in several:
                act[moment.event](self._units[moment.unit])
        self._go_to(operators)
        self._finish()

    def _go_to(self, before: int) -> None:
        """Move on, past the operators that made gradients."""
        self._here = before
        self.peaks.setdefault(before, self._held)
        while self._made and self._storages[self._made[-1]].born < before:
            index = self._made.pop()
            self._whole.add(index)
            self._held += self._storages[index].nbytes
        self._take_briefly(0)

    def _take(self, kind: Kind, name: str, nbytes: int) -> None:
        self._open[kind, name] = (self._rounded(nbytes), self._here)
        self._take_briefly(0)
        self._held += self._rounded(nbytes)
        self._take_briefly(0)

    def _take_briefly(self, nbytes: int) -> None:
        self.peaks[self._here] = max(self.peaks[self._here], self._held + nbytes)

    def _drop(self, kind: Kind, name: str) -> None:
        nbytes, born = self._open.pop((kind, name))
        self._held -= nbytes
        if born < self._here:
            self.buffers.append(Buffer(kind=kind, name=name, nbytes=nbytes, born=born, last=self._here - 1))

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._round_to) * self._round_to

    def _call(self, unit: _Unit) -> None:
        if not unit.reached:
            self._outermost = self._outermost or unit
            unit.state = "forward"
        self._gather(unit)
        self._copy_out(unit)

    def _return(self, unit: _Unit) -> None:
        if unit.reached:
            return
        if self._here <= self._loss_stop:
            if unit is not self._root:
                self._free(unit)
            if unit.parameters:
                unit.turns.append(len(self._order))
                self._order.append(unit)
        unit.state = "idle"
        if self._outermost is unit:
            self._free_kept()
            self._outermost = None

    def _reach(self, unit: _Unit) -> None:
        """Get a unit ready for its backward."""
        unit.reached = True
        unit.differentiations -= 1
        if unit.state == "backward":
            return
        unit.state = "backward"
        self._gather(unit)
        self._copy_out(unit)
        turn = unit.turns.pop() if unit.turns else 0
        if turn > 0:
            self._gather(self._order[turn - 1])

    def _gather(self, unit: _Unit) -> None:
        if unit.gathered or unit.ahead or not unit.parameters:
            return
        size = self._ranks * sum(parameter.nbytes for parameter in unit.parameters)
        self._take("communication", f"{unit.path} gathered", size)
        self._take_briefly(self._rounded(size))
        unit.ahead = True

    def _copy_out(self, unit: _Unit) -> None:
        if not unit.ahead:
            return
        if unit.state == "forward":
            self._free_kept()
        for parameter in unit.parameters:
            self._take("unsharded", parameter.name, self._ranks * parameter.nbytes)
        unit.gathered, unit.ahead = True, False
        if unit.state == "forward":
            self._kept = unit
        else:
            self._drop("communication", f"{unit.path} gathered")

    def _free_kept(self) -> None:
        if self._kept is not None:
            self._drop("communication", f"{self._kept.path} gathered")
            self._kept = None

    def _free(self, unit: _Unit) -> None:
        if unit.gathered:
            for parameter in unit.parameters:
                self._drop("unsharded", parameter.name)
            unit.gathered = False

    def _reduce(self, unit: _Unit) -> None:
        unit.state = "reduced"
        self._free(unit)
        if not unit.parameters:
            return
        if self._reducing is not None:
            self._drop("communication", f"{self._reducing.path} reduced")
            self._reducing = None
        trained = [p for p in unit.parameters if self._gradients.get(p.name) in self._whole]
        if not trained:
            return
        part = sum(parameter.nbytes for parameter in trained)
        self._take("communication", f"{unit.path} reduced", self._ranks * part)
        self._take_briefly(sum(self._rounded(self._ranks * p.nbytes) for p in trained if not p.even))
        if not unit.differentiations:
            for parameter in trained:
                index = self._gradients[parameter.name]
                self._whole.remove(index)
                self._held -= self._storages[index].nbytes
                self.reduced[index] = self._here - 1
        if ("gradient", unit.shards) in self._open:
            self._take_briefly(self._rounded(part) + self._rounded(self._ranks * part))
        else:
            self._take("gradient", unit.shards, part)
            self._take_briefly(self._rounded(self._ranks * part))
        self._reducing = unit

    def _finish(self) -> None:
        """End the backward: reduce what is left, and let only the shards of gradients remain."""
        for unit in self._units.values():
            unit.differentiations = 0
            if unit.state != "reduced":
                self._reduce(unit)
        for kind, name in list(self._open):
            if kind != "gradient":
                self._drop(kind, name)
        for (kind, name), (nbytes, born) in self._open.items():
            self.buffers.append(Buffer(kind=kind, name=name, nbytes=nbytes, born=born, last=None))
