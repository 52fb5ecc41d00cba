"""Lookup tables derived once from a problem, shared by the simulator and the solvers.

Tensors are renumbered by producer here, so that what an interval of stages produces is one slice. Tensors that
outlive the forward are counted by every plan alike; they have weight 0 in `weight` and their own sums.

Extras may be negative in a problem, never here: every moment of every plan is raised by the same `raised_bytes`, and so
is the room (`room_bytes`). Each moment counts one backward extra, or one forward extra together with the entry extra
of the segment that is replayed, or at the top level with `top_forward`; so raising is a constant on each kind.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .check import check_problem
from .problem import Candidate, Problem, Stage, Tensor

IntArray = npt.NDArray[np.int64]

_MOST_PROBLEMS = 8
_MOST_CACHED_PEAKS = 400_000


class Peak(NamedTuple):
    """Say where the largest moment is: bytes, what happens then, and at which stage."""

    nbytes: int
    phase: str
    stage: int


def alive_bytes(birth: IntArray, death: IntArray, weight: IntArray, length: int) -> IntArray:
    """Return the bytes that are alive at each of `length` moments: born by then and not yet dead."""
    born = np.bincount(birth, weights=weight, minlength=length + 1)
    dead = np.bincount(death, weights=weight, minlength=length + 1)
    return np.cumsum(born - dead)[:length].astype(np.int64)


class Tables:
    """Hold arrays over stages and tensors of one problem; whatever depends on budget, fixed or floor is left out."""

    def __init__(self, problem: Problem) -> None:
        check_problem(problem)
        self.stage_count = len(problem.stages)
        self._lay_out_tensors(problem.tensors)
        self._raise_extras(problem.stages)
        self.operators = problem.operators
        self.operator_outputs = [tuple(self.rank[output] for output in item.outputs) for item in problem.operators]
        self.candidates: dict[tuple[int, int], Candidate] = {
            (item.start, item.stop): item for item in problem.candidates
        }
        self.peaks: dict[object, Peak] = {}
        self.graphs: dict[object, object] = {}
        self._inputs: dict[tuple[int, int], tuple[int, ...]] = {}

    def _lay_out_tensors(self, given: tuple[Tensor, ...]) -> None:
        """Number tensors by producer, and list who saves and who reads each, by stage."""
        count = self.stage_count
        producer = np.array([tensor.producer for tensor in given], dtype=np.int64)
        self.order: list[int] = [int(index) for index in np.argsort(producer, kind="stable")]
        self.rank: dict[int, int] = {tensor: rank for rank, tensor in enumerate(self.order)}
        tensors = [given[index] for index in self.order]
        self.producer = producer[self.order] if tensors else producer
        self.last_alive = np.array([tensor.last_alive for tensor in tensors], dtype=np.int64)
        nbytes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
        outlives = self.last_alive >= count
        self.weight = np.where(outlives, 0, nbytes)
        self.outliving_bytes = int(nbytes[outlives].sum())
        # By stage, the bytes it makes of those.
        self.outliving_made: IntArray = np.bincount(
            np.maximum(self.producer[outlives], 0), weights=nbytes[outlives], minlength=count
        ).astype(np.int64)
        # Tensors made by stages before `stage` are those below `first_made[stage + 1]`; producer -1 comes first.
        self.first_made = [int(index) for index in np.searchsorted(self.producer, np.arange(-1, count + 1))]

        self.holders = [tensor.holders for tensor in tensors]
        self.consumers = [tensor.consumers for tensor in tensors]
        self.reads: list[list[int]] = [[] for _ in range(count)]
        pairs = [(stage, rank) for rank, tensor in enumerate(tensors) for stage in tensor.holders]
        pairs.sort()
        self.pair_stage = np.array([stage for stage, _ in pairs], dtype=np.int64)
        self.pair_tensor = np.array([rank for _, rank in pairs], dtype=np.int64)
        self.first_pair = [int(index) for index in np.searchsorted(self.pair_stage, np.arange(count + 1))]
        for rank, tensor in enumerate(tensors):
            for stage in tensor.consumers:
                self.reads[stage].append(rank)
        # last_saver[stop]: the last stage before `stop` that saves a tensor, or -1.
        self.last_saver = [-1]
        for stage in range(count):
            saves = self.first_pair[stage] < self.first_pair[stage + 1]
            self.last_saver.append(stage if saves else self.last_saver[-1])

    def _raise_extras(self, stages: tuple[Stage, ...]) -> None:
        """Raise the extras of all stages by the same, so that none is negative."""
        count = self.stage_count
        forward = np.array([stage.forward_extra_bytes for stage in stages], dtype=np.int64)
        backward = np.array([stage.backward_extra_bytes for stage in stages], dtype=np.int64)
        entry = np.array([stage.entry_extra_bytes for stage in stages], dtype=np.int64)
        forward_raised = max(0, -int(forward.min()))
        self.raised_bytes = max(0, -int(backward.min()), forward_raised - int(entry.min()))
        self.forward_extra: IntArray = forward + forward_raised
        self.backward_extra: IntArray = backward + self.raised_bytes
        self.entry_extra: IntArray = entry + (self.raised_bytes - forward_raised)
        # What a forward moment of the top level counts beside its tensors and its extra, by stage.
        self.top_forward: IntArray = np.cumsum(self.outliving_made) + (self.raised_bytes - forward_raised)
        # By stage: its extra, and the tensors in use as it runs forward though nobody holds them.
        self.in_use: IntArray = self.forward_extra + alive_bytes(
            np.maximum(self.producer, 0), np.minimum(self.last_alive, count - 1) + 1, self.weight, count
        )

    def inputs(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tensors that stages start..stop-1 read and that exist before `start`."""
        found = self._inputs.get((start, stop))
        if found is None:
            limit = self.first_made[start + 1]
            found = tuple({rank for stage in range(start, stop) for rank in self.reads[stage] if rank < limit})
            self._inputs[start, stop] = found
        return found

    def outputs(self, keep: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensors that a save set holds, those that outlive the forward left out."""
        ranks = {rank for operator in keep for rank in self.operator_outputs[operator]}
        return tuple(rank for rank in ranks if self.weight[rank])

    def room_bytes(self, problem: Problem, total_bytes: int) -> int:
        """Return the room that moments have here where the whole step has so many bytes."""
        return total_bytes - problem.fixed_bytes + self.raised_bytes

    def total(self, ranks: tuple[int, ...]) -> int:
        """Return the bytes of tensors, none named twice."""
        return int(sum(self.weight[rank] for rank in ranks))

    def remember(self, key: object, peak: Peak) -> Peak:
        """Store a segment's peak and return it."""
        if len(self.peaks) >= _MOST_CACHED_PEAKS:
            self.peaks.clear()
        self.peaks[key] = peak
        return peak


_recent: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], Tables]] = OrderedDict()


def tables_of(problem: Problem) -> Tables:
    """Return the problem's tables, made once for all problems that differ in budget, fixed or floor bytes only.

    Raises:
        ValueError: If the problem contradicts itself.
    """
    parts = (problem.stages, problem.tensors, problem.candidates, problem.operators)
    key = tuple(id(part) for part in parts)
    if key in _recent:
        _recent.move_to_end(key)
        return _recent[key][1]
    tables = Tables(problem)
    _recent[key] = (parts, tables)  # The parts are held so that no other object can take their ids.
    if len(_recent) > _MOST_PROBLEMS:
        _recent.popitem(last=False)
    return tables
