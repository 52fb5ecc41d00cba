"""What memory belongs to which module, and what a plan does to each stage: the numbers behind the bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import pandas as pd

from ...profiler.records import Profile
from ..plan import Plan
from .palette import treatment_of

MODULE_COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "activations kept for backward",
}
"""Columns of `memory_by_module`, by their names in `palette.MEMORY`."""


def memory_by_module(profile: Profile, rows: int = 20) -> pd.DataFrame:
    """Return bytes by module: parameters, gradients, optimizer state and what is saved, in order of execution.

    Modules are grouped at the greatest depth that needs no more than `rows` rows. A saved storage counts for the
    module that made it. Optimizer state is shared out by the bytes of gradients, which is exact where the state is as
    large as the parameters or a multiple of them (Adam, momentum).

    Args:
        profile: The recorded step.
        rows: Most rows.
    """
    empty: dict[str, int] = dict.fromkeys(("parameters", "gradients", "saved"), 0)
    amounts: dict[str, dict[str, int]] = {}
    for column, path, nbytes in _owners(profile):
        amounts.setdefault(path, dict(empty))[column] += nbytes
    order = {call.module: index for index, call in reversed(list(enumerate(profile.calls)))}
    paths = sorted(amounts, key=lambda path: (order.get(path, len(order)), path))
    table: dict[str, dict[str, int]] = {}
    for path, group in zip(paths, group_paths(paths, rows), strict=True):
        entry = table.setdefault(group, dict(empty))
        for column, nbytes in amounts[path].items():
            entry[column] += nbytes
    # A bar of a module whose parts have bars of their own holds what is none of theirs.
    names = [
        f"{group} (its own)" if any(other.startswith(f"{group}.") for other in table) else group for group in table
    ]
    entries = zip(names, table.values(), strict=True)
    frame = pd.DataFrame([{"module": name, **entry} for name, entry in entries], columns=["module", *empty])
    frame.insert(3, "optimizer", _shares(profile.parts.optimizer, frame["gradients"].tolist()))
    return frame


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a total in proportion to weights, in whole numbers that add up to it."""
    whole = max(1, sum(weights))
    ends = [total * end // whole for end in accumulate(weights, initial=0)]
    return [end - start for start, end in pairwise(ends)]


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
    `treatment` (a name in `palette.TREATMENTS`) and `segment` (the top-level segment's number, -1 outside).

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
        for segment in top.walk():
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


def _treatment(marks: Sequence[_Mark]) -> str:
    return treatment_of(
        replays=max((mark.replays for mark in marks), default=0), keeps=any(mark.kept for mark in marks)
    )
