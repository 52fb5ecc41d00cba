"""Problems of any size for the solver benchmark: seeded, with sizes and times like those of real training steps."""

import numpy as np
from remat.solvers import Candidate, Operator, Problem, Stage, Tensor

MIB = 2**20
FIXED_BYTES = 1000 * MIB


def unequal_chain(count: int, longest: int, *, seed: int = 0) -> Problem:
    """Make a chain of unequal stages, six saved tensors each; every interval up to `longest` stages is a candidate."""
    rng = np.random.default_rng(seed)
    forward = rng.integers(100_000, 5_000_000, count)
    stages = tuple(
        Stage(
            name=f"stage {index}",
            forward_ns=int(forward[index]),
            forward_extra_bytes=int(rng.integers(0, 30 * MIB)),
            backward_extra_bytes=int(rng.integers(0, 80 * MIB)),
            entry_extra_bytes=int(rng.integers(0, 20 * MIB)),
        )
        for index in range(count)
    )
    tensors = [_boundary(index, count, int(rng.integers(MIB, 40 * MIB))) for index in range(-1, count)]
    tensors += [_inside(index, int(rng.integers(MIB // 8, 40 * MIB))) for index in range(count) for _ in range(5)]
    time_before = np.concatenate([[0], np.cumsum(forward)])
    candidates = tuple(
        Candidate(start=start, stop=stop, replay_ns=int(time_before[stop] - time_before[start]) + 20_000)
        for start in range(count)
        for stop in range(start + 1, min(count, start + longest) + 1)
    )
    return Problem(
        stages=stages,
        tensors=tuple(tensors),
        candidates=candidates,
        fixed_bytes=FIXED_BYTES,
        budget_bytes=0,
        step_ns=3 * int(forward.sum()),
    )


def blocks_with_operators(count: int, operators: int, *, seed: int = 0) -> Problem:
    """Make blocks of unequal operators; three in five outputs are saved, and any may be kept by a save set."""
    rng = np.random.default_rng(seed)
    stages: list[Stage] = []
    tensors = [_boundary(-1, count, 64 * MIB)]
    made: list[Operator] = []
    candidates: list[Candidate] = []
    for block in range(count):
        times = rng.integers(20_000, 2_000_000, operators)
        own = tuple(range(len(made), len(made) + operators))
        for time_ns in times:
            made.append(Operator(stage=block, forward_ns=int(time_ns), outputs=(len(tensors),)))
            tensors.append(_inside(block, int(rng.integers(1, 64)) * MIB, saved=bool(rng.random() < 0.6)))
        tensors.append(_boundary(block, count, 64 * MIB))
        total = int(times.sum())
        stages.append(
            Stage(
                name=f"block {block}",
                forward_ns=total,
                forward_extra_bytes=200 * MIB,
                backward_extra_bytes=400 * MIB,
                entry_extra_bytes=64 * MIB,
            )
        )
        candidates.append(
            Candidate(
                start=block,
                stop=block + 1,
                replay_ns=total + 100_000,
                selective_ns=300_000,
                operators=own,
                block=True,
            )
        )
    return Problem(
        stages=tuple(stages),
        tensors=tuple(tensors),
        candidates=tuple(candidates),
        operators=tuple(made),
        fixed_bytes=FIXED_BYTES,
        budget_bytes=0,
        step_ns=3 * sum(stage.forward_ns for stage in stages),
    )


def _boundary(producer: int, count: int, nbytes: int) -> Tensor:
    reader = (producer + 1,) if producer + 1 < count else ()
    return Tensor(nbytes=nbytes, producer=producer, holders=reader, consumers=reader, last_alive=producer + 1)


def _inside(stage: int, nbytes: int, *, saved: bool = True) -> Tensor:
    holders = (stage,) if saved else ()
    return Tensor(nbytes=nbytes, producer=stage, holders=holders, consumers=(), last_alive=stage)
