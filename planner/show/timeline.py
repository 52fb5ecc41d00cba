"""The numbers behind the pictures: memory over a step, memory by module, and what a plan does to each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pandas as pd

from ...profiler.records import Parts, Profile
from ..applier.apply import apply_segments, unplanned
from ..finding.explain import explain_peak
from ..finding.planning import Planner
from ..plan import Plan, PlannedSegment

TREATMENTS: tuple[str, ...] = ("kept", "recomputed", "recomputed, some outputs kept", "recomputed more than once")
"""What a plan can do with a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Hold the memory of one step over its operators.

    Attributes:
        live: Bytes alive by category at each operator, in order of execution; the optimizer's step, where one is
            counted, is appended as the last moments. They add up to everything alive.
        loss_stop: Operators of forward and loss.
        backward_stop: Operators of the step; moments after it are the optimizer's.
        peak_bytes: Most bytes alive at any moment.
        peak_words: Where the peak is and what is alive there.
    """

    live: Mapping[str, np.ndarray]
    loss_stop: int
    backward_stop: int
    peak_bytes: int
    peak_words: str

    def total(self) -> np.ndarray:
        """Return everything alive at each moment, in bytes."""
        return np.sum(list(self.live.values()), axis=0)

    def peak_at(self) -> int:
        """Return the moment of the peak."""
        return int(self.total().argmax())


def step_timeline(planner: Planner, plan: Plan | None = None) -> Timeline:
    """Record a step, planned or not, as the planner's dry runs do, and return its memory over time.

    Args:
        planner: What the plan was made with.
        plan: The plan to apply meanwhile; None records the unplanned step.
    """
    model, session, profile = planner.session.step.model, planner.session, planner.profile
    with unplanned(model):
        if plan is None:
            recording = planner.search.on_rank(session.record(profile.bytes_from))
        else:
            with apply_segments(model, plan.segments, training=plan.training):
                recording = planner.search.on_rank(session.record(profile.bytes_from, planned=True))
    live = recording.live_bytes_by_kind()
    scratch = np.array([operator.scratch_bytes for operator in recording.operators], dtype=np.int64)
    unseen = planner.search.unseen_bytes(plan.segments if plan is not None else ())
    live["temporary"] += scratch + profile.library_bytes + unseen
    count, parts = len(recording.operators), profile.parts
    live["optimizer"] = np.full(count, parts.optimizer, dtype=np.int64)
    if parts.optimizer_step_peak:
        live = _with_optimizer_step(live, parts)
    peak_bytes = int(np.sum(list(live.values()), axis=0).max(initial=0))
    return Timeline(
        live=live,
        loss_stop=recording.loss_stop,
        backward_stop=count,
        peak_bytes=peak_bytes,
        peak_words=explain_peak(recording, profile, max(1, peak_bytes)),
    )


def _with_optimizer_step(live: Mapping[str, np.ndarray], parts: Parts) -> dict[str, np.ndarray]:
    """Append the optimizer's step: what stays from the last moment, and its temporaries up to its peak."""
    count = len(live["parameter"])
    width = max(1, count // 40)
    after = {kind: int(values[-1]) if count else 0 for kind, values in live.items()}
    after["gradient"] = parts.gradients
    for kind in ("activation", "recomputed", "temporary", "unsharded", "communication"):
        after[kind] = 0
    after["temporary"] = max(0, parts.optimizer_step_peak - sum(after.values()))
    return {kind: np.concatenate([values, np.full(width, after[kind])]) for kind, values in live.items()}


def memory_parts(profile: Profile) -> list[tuple[str, int, float]]:
    """Return the parts of the unplanned step's memory: name, bytes, and share of the peak.

    Shares need not add up to one: not all parts are alive at the peak, and temporaries are not listed.
    """
    parts, peak = profile.parts, max(1, profile.peak_bytes())
    saved = sum(storage.nbytes for storage in profile.storages if storage.kind == "activation" and storage.saved_by)
    amounts = (
        ("parameters", parts.parameters),
        ("gradients", parts.gradients),
        ("optimizer state", parts.optimizer),
        ("buffers and batch", parts.buffers + parts.batch),
        ("activations saved for backward", saved),
    )
    return [(name, nbytes, nbytes / peak) for name, nbytes in amounts]


def memory_by_module(profile: Profile, rows: int = 20) -> pd.DataFrame:
    """Return bytes by module: parameters, gradients and what its operators save for backward, in execution order.

    Modules are grouped at the greatest depth that needs no more than `rows` rows. A saved storage counts for the
    module that made it. Optimizer state is not counted.

    Args:
        profile: The recorded step.
        rows: Most rows.
    """
    amounts: dict[str, dict[str, int]] = {}
    for column, path, nbytes in _owners(profile):
        entry = amounts.setdefault(path, {"parameters": 0, "gradients": 0, "saved": 0})
        entry[column] += nbytes
    order = {call.module: index for index, call in reversed(list(enumerate(profile.calls)))}
    paths = sorted(amounts, key=lambda path: (order.get(path, len(order)), path))
    groups = group_paths(paths, rows)
    table: dict[str, dict[str, int]] = {}
    for path, group in zip(paths, groups, strict=True):
        entry = table.setdefault(group, {"parameters": 0, "gradients": 0, "saved": 0})
        for column, nbytes in amounts[path].items():
            entry[column] += nbytes
    records = [{"module": group, **entry} for group, entry in table.items()]
    return pd.DataFrame(records, columns=["module", "parameters", "gradients", "saved"])


def _owners(profile: Profile) -> Iterator[tuple[str, str, int]]:
    for storage in profile.storages:
        if storage.kind in ("parameter", "gradient") and storage.last is None:
            yield f"{storage.kind}s", storage.name.rpartition(".")[0], storage.nbytes
        elif storage.kind == "activation" and storage.saved_by and 0 <= storage.born < profile.loss_stop:
            yield "saved", profile.module_of(storage.born), storage.nbytes


def group_paths(paths: Sequence[str], limit: int, *, runs: bool = False) -> list[str]:
    """Cut dotted paths to the greatest depth that leaves no more than `limit` different ones.

    Args:
        paths: Module paths.
        limit: Most groups.
        runs: Count runs of equal neighbours instead of different paths.
    """
    cut = list(paths)
    deepest = max((path.count(".") + 1 for path in paths), default=1)
    for depth in range(deepest, 0, -1):
        cut = [".".join(path.split(".")[:depth]) for path in paths]
        count = sum(1 for _ in groupby(cut)) if runs else len(set(cut))
        if count <= limit:
            break
    return [path or "(the model's own)" for path in cut]


def plan_by_stage(profile: Profile, plan: Plan) -> pd.DataFrame:
    """Return what a plan does to each stage of a profiled step.

    One row a stage: `stage`, `module`, `saved_bytes` (what its operators make and backward needs), `forward_ns`,
    `treatment` (one of `TREATMENTS`) and `segment` (the top-level segment's number, -1 outside).

    Args:
        profile: The recorded step.
        plan: A plan for it.
    """
    saved: dict[int, int] = defaultdict(int)
    for storage in profile.storages:
        if storage.kind == "activation" and storage.saved_by and storage.born >= 0:
            saved[storage.born] += storage.nbytes
    marks = _marks(profile, plan)
    rows = [
        {
            "stage": span.name,
            "module": profile.calls[span.call].module if span.call >= 0 else "(loss)",
            "saved_bytes": sum(saved.get(k, 0) for k in range(span.start, span.stop)),
            "forward_ns": sum(profile.operators[k].forward_ns for k in range(span.start, span.stop)),
            "treatment": _treatment([marks[k] for k in range(span.start, span.stop)]),
            "segment": max((marks[k].segment for k in range(span.start, span.stop)), default=-1),
        }
        for span in profile.stages
    ]
    return pd.DataFrame(rows)


@dataclass(slots=True)
class _Mark:
    """What a plan does to one operator."""

    segment: int = -1
    replays: int = 0
    kept: bool = False


def _marks(profile: Profile, plan: Plan) -> list[_Mark]:
    marks = [_Mark() for _ in profile.operators]
    spans = {(call.module, call.index): (call.start, call.stop) for call in profile.calls}
    for number, top in enumerate(plan.segments):
        for segment in _walk((top,)):
            first, last = segment.members[0], segment.members[-1]
            start, stop = spans[first.module, first.index][0], spans[last.module, last.index][1]
            counts: dict[str, int] = defaultdict(int)
            named = {(item.operator, item.index) for item in segment.save}
            for k in range(start, stop):
                name = profile.operators[k].operator
                mark, position = marks[k], counts[name]
                counts[name] += 1
                mark.segment, mark.replays = number, mark.replays + 1
                mark.kept = mark.kept or (name, position) in named
    return marks


def _walk(segments: Iterable[PlannedSegment]) -> Iterator[PlannedSegment]:
    for segment in segments:
        yield segment
        yield from _walk(segment.children)


def _treatment(marks: Sequence[_Mark]) -> str:
    replays = max((mark.replays for mark in marks), default=0)
    if replays > 1:
        return "recomputed more than once"
    if replays == 0:
        return "kept"
    return "recomputed, some outputs kept" if any(mark.kept for mark in marks) else "recomputed"
