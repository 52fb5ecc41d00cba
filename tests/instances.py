"""Random problems for the solvers' tests: seeded, small enough for the exhaustive oracle."""

from dataclasses import replace

import numpy as np
from remat.solvers.problem import Candidate, Operator, Problem, Segment, Stage, Tensor


def random_chain(rng: np.random.Generator, count: int, *, every: bool = True) -> Problem:
    """Make a chain: each stage reads its predecessor's output and saves it, and saves tensors of its own."""
    stages = _stages(rng, count)
    tensors = [_boundary(rng, index, count) for index in range(-1, count)]
    tensors += [
        Tensor(nbytes=int(rng.integers(1, 20)), producer=index, holders=(index,), consumers=(), last_alive=index)
        for index in range(count)
        if rng.random() < 0.8
    ]
    return _problem(rng, stages, tensors, (), every=every)


def random_graph(rng: np.random.Generator, count: int, *, operators: bool = True, every: bool = False) -> Problem:
    """Make stages whose tensors are read by any later stages, linger, outlive the step or are shared."""
    stages = _stages(rng, count)
    tensors = [_boundary(rng, index, count) for index in range(-1, count)]
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        producer = int(rng.integers(-1, count))
        later = [index for index in range(producer + 1, count) if rng.random() < 0.3]
        holders = [index for index in [producer, *later] if index >= 0 and rng.random() < 0.6]
        last = max([producer, *later])
        if rng.random() < 0.2:
            last = int(rng.integers(last, count + 1))
        tensors.append(
            Tensor(
                nbytes=int(rng.integers(0, 12)),
                producer=producer,
                holders=tuple(holders),
                consumers=tuple(later),
                last_alive=last,
            )
        )
    made: list[Operator] = []
    for index in range(count):
        own = [t for t, tensor in enumerate(tensors) if tensor.producer == index]
        made += [
            Operator(stage=index, forward_ns=int(rng.integers(0, 8)), outputs=(output,))
            for output in own
            if operators and rng.random() < 0.5
        ]
        if operators and own and rng.random() < 0.2:
            made.append(Operator(stage=index, forward_ns=int(rng.integers(0, 8)), outputs=tuple(own)))
    return _problem(rng, stages, tensors, tuple(made), every=every, barred=0.3 if rng.random() < 0.5 else 0.0)


def with_negative_extras(rng: np.random.Generator, problem: Problem) -> Problem:
    """Let some extras correct what the tensors overstate."""
    extras = rng.integers(-25, 15, (len(problem.stages), 3))
    stages = tuple(
        replace(
            stage,
            forward_extra_bytes=int(row[0]),
            backward_extra_bytes=int(row[1]),
            entry_extra_bytes=int(row[2]),
        )
        for stage, row in zip(problem.stages, extras, strict=True)
    )
    return replace(problem, stages=stages)


def random_plan(rng: np.random.Generator, problem: Problem) -> tuple[Segment, ...]:
    """Choose a valid tree of segments."""
    return _plan(rng, problem, 0, len(problem.stages), None)


def with_budget(rng: np.random.Generator, problem: Problem, least: int, most: int) -> Problem:
    """Set a budget between two peaks, sometimes a little outside of them."""
    return replace(problem, budget_bytes=int(rng.integers(least - 1, max(least, most) + 2)))


def _stages(rng: np.random.Generator, count: int) -> tuple[Stage, ...]:
    extras = rng.integers(0, 15, (count, 3)) * (rng.random((count, 3)) < 0.7)
    return tuple(
        Stage(
            name=f"s{index}",
            forward_ns=int(rng.integers(1, 12)),
            forward_extra_bytes=int(extras[index, 0]),
            backward_extra_bytes=int(extras[index, 1]),
            entry_extra_bytes=int(extras[index, 2]),
        )
        for index in range(count)
    )


def _boundary(rng: np.random.Generator, index: int, count: int) -> Tensor:
    """Make the tensor that travels from a stage to the next; the last one outlives the forward."""
    consumers = (index + 1,) if index + 1 < count else ()
    holders = tuple(stage for stage in (index, index + 1) if 0 <= stage < count and rng.random() < 0.6)
    last = index + 1 if index + 1 < count else count
    return Tensor(
        nbytes=int(rng.integers(1, 20)), producer=index, holders=holders, consumers=consumers, last_alive=last
    )


def _problem(
    rng: np.random.Generator,
    stages: tuple[Stage, ...],
    tensors: list[Tensor],
    operators: tuple[Operator, ...],
    *,
    every: bool,
    barred: float = 0.0,
) -> Problem:
    count = len(stages)
    candidates = []
    for start in range(count):
        for stop in range(start + 1, count + 1):
            saved = [index for index in range(start, stop) if any(index in tensor.holders for tensor in tensors)]
            if not saved or not (every or rng.random() < 0.6):
                continue
            inside = tuple(o for o, operator in enumerate(operators) if start <= operator.stage <= saved[-1])
            candidates.append(
                Candidate(
                    start=start,
                    stop=stop,
                    replay_ns=sum(stages[index].forward_ns for index in range(start, saved[-1] + 1))
                    + int(rng.integers(0, 3)),
                    selective_ns=int(rng.integers(0, 3)),
                    operators=inside,
                    block=stop == start + 1,
                    never_within=tuple(b for b in range(stop, count + 1) if barred and rng.random() < barred),
                )
            )
    return Problem(
        stages=stages,
        tensors=tuple(tensors),
        candidates=tuple(candidates),
        operators=operators,
        fixed_bytes=int(rng.integers(0, 5)),
        floor_bytes=int(rng.integers(0, 30)),
        budget_bytes=0,
        step_ns=3 * sum(stage.forward_ns for stage in stages),
    )


def _plan(rng, problem, start, stop, parent) -> tuple[Segment, ...]:
    last = None
    if parent is not None:
        last = max(i for i in range(start, stop) if any(i in tensor.holders for tensor in problem.tensors))
    chosen = []
    position = start
    while position < stop:
        options = [
            c
            for c in problem.candidates
            if c.start == position
            and c.stop <= stop
            and (c.start, c.stop) != parent
            and (last is None or not c.start <= last < c.stop)
            and (parent is None or stop not in c.never_within)
        ]
        if not options or rng.random() < 0.4:
            position += 1
            continue
        candidate = options[rng.integers(len(options))]
        keep = ()
        if parent is None and rng.random() < 0.5:
            keep = tuple(o for o in candidate.operators if rng.random() < 0.4)
        children = (
            () if keep else _plan(rng, problem, candidate.start, candidate.stop, (candidate.start, candidate.stop))
        )
        chosen.append(Segment(start=candidate.start, stop=candidate.stop, keep=keep, children=children))
        position = candidate.stop
    return tuple(chosen)
