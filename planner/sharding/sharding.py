"""What one rank holds of a step under FSDP2: a recorded step of the whole model, with parameters and gradients divided.

A plan is made before the model is sharded, so the step is recorded on the whole model. Recordings of planned and
unplanned steps are rewritten by the same rules, which `gathering` states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from torch import nn

from ...profiler import BatchError
from ...profiler.records import Profile
from ...profiler.step_record import StepRecord, Storage, alive
from .gathering import Buffer, Gathering, ShardedParameter, moments

_Record = TypeVar("_Record", bound=StepRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Know which unit holds which parameters, and what a rank holds of them.

    Attributes:
        ranks: Processes that the parameters are divided over.
        units: By path, in the model's order, the root first: the parameters each unit gathers.
        accumulation: Gradients are kept over several batches, and reduced after each.
        round_to: Allocation granularity in bytes.
    """

    ranks: int
    units: Mapping[str, tuple[ShardedParameter, ...]]
    accumulation: bool
    round_to: int

    @staticmethod
    def of(model: nn.Module, units: Iterable[str], ranks: int, *, accumulation: bool, round_to: int) -> Sharding:
        """Divide a model's parameters.

        Args:
            model: The whole model.
            units: Paths of the modules that are sharded on their own; the root takes what they leave.
            ranks: Processes.
            accumulation: See `Sharding`.
            round_to: See `Sharding`.

        Raises:
            BatchError: `fully_shard` would refuse a parameter: units share it, or it has no dimension to divide.
        """
        wanted = {"", *units}
        owners = _owners(model, wanted)
        parameters: dict[str, list[ShardedParameter]] = {
            name: [] for name, _ in model.named_modules() if name in wanted
        }
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise BatchError(
                    f"parameter {name!r} is a scalar, which fully_shard cannot divide over {ranks} ranks: "
                    "give it the shape (1,)"
                )
            holders = sorted(owners[id(parameter)])
            if len(holders) > 1:
                raise BatchError(
                    f"parameter {name!r} is shared between the units {' and '.join(h or '(root)' for h in holders)}, "
                    "which fully_shard refuses: leave it to one unit around all of its users, such as the root"
                )
            first, *rest = parameter.shape
            nbytes = -(-first // ranks) * int(np.prod(rest)) * parameter.element_size()
            even = first % ranks == 0
            parameters[holders[0]].append(ShardedParameter(name=name, nbytes=nbytes, even=even))
        return Sharding(
            ranks=ranks,
            units={path: tuple(held) for path, held in parameters.items()},
            accumulation=accumulation,
            round_to=round_to,
        )

    def of_profile(self, whole: Profile, optimizer: tuple[int, int] | None) -> Profile:
        """Return one rank's part of a profiled step.

        Args:
            whole: The step of the whole model, profiled without accumulation.
            optimizer: Bytes of the optimizer's state over the shards, and the most that its step takes besides; None
                without an optimizer.
        """
        divided = self.of_record(whole)
        storages = divided.storages

        def total(kind: str, *, kept: bool = False) -> int:
            return sum(s.nbytes for s in storages if s.kind == kind and (s.last is None or not kept))

        parameters, gradients = total("parameter"), total("gradient", kept=True)
        state, temporaries = optimizer or (0, 0)
        held = parameters + whole.parts.buffers + whole.parts.batch + gradients + state + total("activation", kept=True)
        held += whole.library_bytes
        return replace(
            divided,
            parts=replace(
                whole.parts,
                parameters=parameters,
                gradients=gradients,
                optimizer=state,
                optimizer_step_peak=held + temporaries if optimizer is not None else 0,
            ),
            accumulation=self.accumulation,
            notes=(*whole.notes, self.words()),
        )

    def words(self) -> str:
        """Say whose bytes are counted."""
        return (
            f"bytes are those of each of {self.ranks} ranks under fully_shard, on {len(self.units) - 1} units and the "
            "root, collectives included"
        )

    def of_record(self, whole: _Record) -> _Record:
        """Return one rank's part of a recorded step, planned or not.

        What is gathered or reduced between two operators counts as scratch of the second.
        """
        operators, storages, loss_stop = whole.operators, whole.storages, whole.loss_stop
        replayed = np.array([operator.replayed for operator in operators], dtype=np.bool_)
        forward_of = [operator.forward_of for operator in operators]
        gathering = Gathering(
            moments(whole.calls, forward_of, replayed, loss_stop, self.units),
            self.units,
            storages,
            operators=len(operators),
            loss_stop=loss_stop,
            ranks=self.ranks,
            round_to=self.round_to,
            accumulation=self.accumulation,
        )
        shards = {p.name: -(-p.nbytes // self.round_to) * self.round_to for held in self.units.values() for p in held}
        divided: list[Storage] = []
        for index, storage in enumerate(storages):
            if storage.kind == "parameter":
                storage = replace(storage, nbytes=shards.pop(storage.name))
            elif index in gathering.reduced:
                storage = replace(storage, last=gathering.reduced[index])
            divided.append(storage)
        # Parameters that shared a storage have a shard each.
        rest = [Buffer(kind="parameter", name=name, nbytes=n, born=-1, last=None) for name, n in shards.items()]
        divided += [_as_storage(buffer) for buffer in (*rest, *gathering.buffers)]
        live = alive(divided, len(operators))
        steady = [storage for storage in divided if storage.kind not in ("gradient", "unsharded", "communication")]
        between = alive(steady, len(operators), before=True)
        scratch = whole.scratch_bytes()
        for before, nbytes in gathering.peaks.items():
            at = min(before, len(operators) - 1)
            scratch[at] = max(scratch[at], between[before] + nbytes - live[at])
        sized = (
            replace(operator, scratch_bytes=int(nbytes)) for operator, nbytes in zip(operators, scratch, strict=True)
        )
        return replace(whole, operators=tuple(sized), storages=tuple(divided))


def _owners(model: nn.Module, wanted: set[str]) -> dict[int, set[str]]:
    """Return, by identity of each parameter, the units it belongs to: the innermost ones around its users."""
    units = {id(module): name for name, module in model.named_modules() if name in wanted}
    owners: dict[int, set[str]] = defaultdict(set)

    def visit(module: nn.Module, unit: str) -> None:
        unit = units.get(id(module), unit)
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, "")
    return owners


def _as_storage(buffer: Buffer) -> Storage:
    return Storage(
        nbytes=buffer.nbytes,
        kind=buffer.kind,
        name=buffer.name,
        born=buffer.born,
        last=buffer.last,
        last_unsaved=buffer.last,
    )
