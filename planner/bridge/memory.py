"""What is alive in a step, split into tensors that plans can keep or free and the extras of each stage.

Together they give the recorded bytes back at every moment of the unplanned step, whatever is left to which.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from ...profiler.records import Profile
from ...profiler.step_record import alive
from ...solvers.problem import Stage, Tensor

NEGLIGIBLE = 1e-5
"""Tensors below this share of the unplanned peak are left to the extras of their stage."""


class StageTimes:
    """Say where stages begin and end, and what they take.

    Attributes:
        bounds: The first operator of each stage, and one past the last of all.
        of: The stage of each operator of the forward.
        before_ns: The time of the forward before each operator, and of all of it, in nanoseconds.
    """

    def __init__(self, profile: Profile) -> None:
        self.bounds = [span.start for span in profile.stages] + [profile.loss_stop]
        self.of = np.repeat(np.arange(len(profile.stages)), np.diff(self.bounds))
        self.before_ns = np.concatenate(
            [[0], np.cumsum([operator.forward_ns for operator in profile.operators[: profile.loss_stop]])]
        )


def tensors_of(profile: Profile, stages: StageTimes, savable: list[int]) -> tuple[tuple[Tensor, ...], dict[int, int]]:
    """List the storages some plan could keep or free; those of one fate are merged into one tensor.

    Returns:
        The tensors, and the tensor of each storage that has one.
    """
    n = len(profile.stages)
    kept = {s for k in savable for s in profile.operators[k].produces}
    least = NEGLIGIBLE * profile.peak_bytes()
    merged: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, storage in enumerate(profile.storages):
        if storage.kind != "activation" or not 0 <= storage.born < profile.loss_stop:
            continue
        if storage.nbytes < least and index not in kept:
            continue
        producer = int(stages.of[storage.born])
        holders = tuple(sorted({int(stages.of[k]) for k in storage.saved_by}))
        readers = {int(stages.of[k]) for k in storage.read_by} | set(holders)
        consumers = tuple(sorted(stage for stage in readers if stage > producer))
        last = storage.last_unsaved
        last_alive = n if last is None else int(stages.of[max(last, storage.born)])
        if not (holders or consumers or last_alive > producer or index in kept):
            continue
        own = index if index in kept else -1
        merged[producer, holders, consumers, last_alive, own].append(index)
    tensors: list[Tensor] = []
    tensor_of: dict[int, int] = {}
    for (producer, holders, consumers, last_alive, _), members in merged.items():
        for index in members:
            tensor_of[index] = len(tensors)
        tensors.append(
            Tensor(
                nbytes=sum(profile.storages[index].nbytes for index in members),
                producer=producer,  # pyright: ignore[reportArgumentType]
                holders=holders,  # pyright: ignore[reportArgumentType]
                consumers=consumers,  # pyright: ignore[reportArgumentType]
                last_alive=last_alive,  # pyright: ignore[reportArgumentType]
            )
        )
    return tuple(tensors), tensor_of


def stages_of(profile: Profile, stages: StageTimes, tensors: tuple[Tensor, ...]) -> tuple[Stage, ...]:
    """Split what was alive at every moment into the tensors and each stage's extras."""
    n = len(profile.stages)
    live = profile.live_bytes() - profile.fixed_bytes()
    forward_model = np.zeros(n + 1, dtype=np.int64)
    backward_model = np.zeros(n + 1, dtype=np.int64)
    for tensor in tensors:
        until = n if tensor.holders else tensor.last_alive + 1
        forward_model[tensor.producer] += tensor.nbytes
        if until < n:
            forward_model[until] -= tensor.nbytes
        if tensor.last_alive >= n:
            backward_model[0] += tensor.nbytes
        elif tensor.holders:
            backward_model[tensor.holders[0]] += tensor.nbytes
    forward_model, backward_model = np.cumsum(forward_model), np.cumsum(backward_model)
    forward = np.array([int(live[a:b].max()) for a, b in pairwise(stages.bounds)])
    backward, entry = _backward_moments(profile, stages, live)
    return tuple(
        Stage(
            name=profile.stages[i].name,
            forward_ns=int(stages.before_ns[stages.bounds[i + 1]] - stages.before_ns[stages.bounds[i]]),
            forward_extra_bytes=int(forward[i] - forward_model[i]),
            backward_extra_bytes=int(backward[i] - backward_model[i]),
            entry_extra_bytes=int(entry[i] - backward_model[i]),
        )
        for i in range(n)
    )


def _backward_moments(profile: Profile, stages: StageTimes, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, per stage, the most bytes alive in its backward and the bytes alive just before it."""
    n = len(profile.stages)
    always = profile.parts.optimizer + profile.unseen_bytes + profile.library_bytes - profile.fixed_bytes()
    # What comes after the last operator (gradients reduced at the end of backward) is no stage's.
    before = alive(profile.storages, len(profile.operators), before=True)[:-1] + always
    worst = np.full(n, -1, dtype=np.int64)
    first: dict[int, int] = {}
    for k in range(profile.loss_stop, len(profile.operators)):
        stage = int(stages.of[profile.operators[k].forward_of])
        worst[stage] = max(worst[stage], live[k])
        first.setdefault(stage, k)
    entry = np.zeros(n, dtype=np.int64)
    following = int(before[profile.loss_stop]) if profile.loss_stop < len(before) else 0
    for stage in reversed(range(n)):
        if stage in first:
            following = int(before[first[stage]])
        entry[stage] = following
        if worst[stage] < 0:
            worst[stage] = following
    return worst, entry
