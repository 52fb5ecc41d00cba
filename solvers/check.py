"""Refuse problems that contradict themselves, before a solver turns them into a wrong plan."""

from __future__ import annotations

from itertools import pairwise

from .problem import Candidate, Kind, Operator, Problem, Tensor


def check_problem(problem: Problem) -> None:
    """Check everything that `Problem` promises about its parts.

    Raises:
        ValueError: At the first promise that does not hold, with the numbers.
    """
    count = len(problem.stages)
    if count == 0:
        raise ValueError("a problem needs at least one stage, got none")
    for stage in problem.stages:
        if stage.forward_ns < 0:
            raise ValueError(f"stage {stage.name!r}: forward_ns must not be negative, got {stage.forward_ns}")
    for index, tensor in enumerate(problem.tensors):
        _check_tensor(index, tensor, count)
    for index, operator in enumerate(problem.operators):
        _check_operator(index, operator, problem)
    seen: set[tuple[int, int]] = set()
    for candidate in problem.candidates:
        _check_candidate(candidate, problem)
        if (candidate.start, candidate.stop) in seen:
            raise ValueError(f"candidate {candidate.start}:{candidate.stop} is listed twice")
        seen.add((candidate.start, candidate.stop))
    _check_kinds(problem)


def _check_tensor(index: int, tensor: Tensor, count: int) -> None:
    name = f"tensor {index}"
    if tensor.nbytes < 0:
        raise ValueError(f"{name}: nbytes must not be negative, got {tensor.nbytes}")
    if not -1 <= tensor.producer < count:
        raise ValueError(f"{name}: producer {tensor.producer} is not in -1..{count - 1}")
    for word, stages, first in (
        ("holders", tensor.holders, max(tensor.producer, 0)),
        ("consumers", tensor.consumers, tensor.producer + 1),
    ):
        if any(later <= earlier for earlier, later in pairwise(stages)):
            raise ValueError(f"{name}: {word} must ascend, got {stages}")
        if stages and not (first <= stages[0] and stages[-1] < count):
            raise ValueError(f"{name}: {word} {stages} are not within stages {first}..{count - 1}")
    unread = set(tensor.holders) - set(tensor.consumers) - {tensor.producer}
    if unread:
        raise ValueError(f"{name}: stages {sorted(unread)} save it without being its producer or among its consumers")
    last = max((tensor.producer, *tensor.holders[-1:], *tensor.consumers[-1:]))
    if tensor.last_alive < last:
        raise ValueError(f"{name}: last_alive {tensor.last_alive} is before its last use, at stage {last}")


def _check_operator(index: int, operator: Operator, problem: Problem) -> None:
    if operator.forward_ns < 0:
        raise ValueError(f"operator {index}: forward_ns must not be negative, got {operator.forward_ns}")
    for output in operator.outputs:
        if not 0 <= output < len(problem.tensors):
            raise ValueError(f"operator {index}: there is no tensor {output} among {len(problem.tensors)}")
        if problem.tensors[output].producer != operator.stage:
            raise ValueError(
                f"operator {index} of stage {operator.stage}: its output, tensor {output}, is made by stage "
                f"{problem.tensors[output].producer}"
            )


def _check_candidate(candidate: Candidate, problem: Problem) -> None:
    name = f"candidate {candidate.start}:{candidate.stop}"
    if not 0 <= candidate.start < candidate.stop <= len(problem.stages):
        raise ValueError(f"{name} is not an interval of stages 0..{len(problem.stages)}")
    if candidate.replay_ns < 0 or candidate.selective_ns < 0:
        raise ValueError(f"{name}: times must not be negative, got {candidate.replay_ns}, {candidate.selective_ns}")
    for index in candidate.operators:
        if not 0 <= index < len(problem.operators):
            raise ValueError(f"{name}: there is no operator {index} among {len(problem.operators)}")
        if not candidate.start <= problem.operators[index].stage < candidate.stop:
            raise ValueError(f"{name}: operator {index} is of stage {problem.operators[index].stage}, outside it")
    if any(later <= earlier for earlier, later in pairwise(candidate.operators)):
        raise ValueError(f"{name}: operators must ascend, got {candidate.operators}")
    barred = candidate.never_within
    if any(later <= earlier for earlier, later in pairwise(barred)) or any(stop < candidate.stop for stop in barred):
        raise ValueError(f"{name}: never_within must ascend, from {candidate.stop} on, got {barred}")


def _check_kinds(problem: Problem) -> None:
    for number, kind in enumerate(problem.kinds):
        _check_kind(f"kind {number}", kind, problem)
    blocks = sorted((bounds[0], bounds[-1]) for kind in problem.kinds for bounds in kind.bounds)
    for (_, stop), (start, _) in pairwise(blocks):
        if start < stop:
            raise ValueError(
                f"blocks to be treated alike overlap: one ends at stage {stop}, the next starts at {start}"
            )


def _check_kind(name: str, kind: Kind, problem: Problem) -> None:
    if len({len(bounds) for bounds in kind.bounds}) != 1 or len({len(own) for own in kind.operators}) > 1:
        raise ValueError(f"{name}: its blocks need as many boundaries and operators each")
    if len(kind.operators) != len(kind.bounds):
        raise ValueError(f"{name}: {len(kind.bounds)} blocks, and operators of {len(kind.operators)}")
    for bounds, own in zip(kind.bounds, kind.operators, strict=True):
        if any(later <= earlier for earlier, later in pairwise(bounds)) or len(bounds) < 2:
            raise ValueError(f"{name}: boundaries of a block must ascend from its start to its end, got {bounds}")
        if not 0 <= bounds[0] < bounds[-1] <= len(problem.stages):
            raise ValueError(f"{name}: block {bounds[0]}:{bounds[-1]} is not within stages 0..{len(problem.stages)}")
        if not all(bounds[0] <= problem.operators[index].stage < bounds[-1] for index in own):
            raise ValueError(f"{name}: block {bounds[0]}:{bounds[-1]} has operators outside of it")
