"""Say in words what holds a peak where it is."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from ...profiler.records import Profile
from ...profiler.step_record import StepRecord, alive
from ..budget import format_bytes
from ..pictures.palette import BESIDE

NOTABLE = 0.01
"""An output is mentioned where the peak is lower without it by this share or more."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_WORDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "batch": "the batch",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "communication": "buffers of collectives",
}
_OF_MODULES = {
    "activation": "activations kept for backward of",
    "recomputed": "recomputed activations of",
    "temporary": "temporaries of",
    "unsharded": "gathered parameters of",
}
"""What is told by module. Both count as the pictures of memory do, whose words begin the same."""


def explain_peak(recording: StepRecord, profile: Profile, peak_bytes: int, *, limit: int = 4) -> str:
    """Say where the peak of a recorded step is and what is alive there, largest first, as shares that add up to it.

    Activations go by the module that made them; modules whose paths differ in numbers only count as one: `h.*.mlp`.

    Args:
        recording: A recorded step, planned or not.
        profile: The profile it belongs to.
        peak_bytes: The step's peak, the optimizer and what is reserved beside tensors included.
        limit: How many holders to name; the others are summed up.
    """
    live, parts = recording.live_bytes(), profile.parts
    if parts.optimizer_step_peak >= int(live.max(initial=0)) + parts.optimizer:
        place = "optimizer's step"
        held = {
            "parameters": parts.parameters,
            "gradients": parts.gradients,
            "optimizer state": parts.optimizer,
            "buffers and the batch": parts.buffers + parts.batch,
        }
        held["temporaries"] = max(0, parts.optimizer_step_peak - sum(held.values()))
    else:
        at = int(live.argmax())
        place = f"{'forward' if at < recording.loss_stop else 'backward'} of {_place(recording, at)}"
        held = _held_at(recording, at)
        held["optimizer state"] += parts.optimizer
    held[BESIDE] = max(0, peak_bytes - sum(held.values()))
    named, rest = _largest(held, limit)
    if rest > max(held.values()):
        # Spread over many modules: by what it is alone.
        summed: dict[str, int] = defaultdict(int)
        for name, nbytes in held.items():
            summed[next((words[:-3] for words in _OF_MODULES.values() if name.startswith(words)), name)] += nbytes
        named, rest = _largest(summed, limit)
    named += [("other", rest)] if round(100 * rest / max(1, peak_bytes)) else []
    return f"{place}: {', '.join(f'{nbytes / max(1, peak_bytes):.0%} {name}' for name, nbytes in named)}"


def _largest(held: dict[str, int], limit: int) -> tuple[list[tuple[str, int]], int]:
    """Return the largest holders, and the bytes of all others."""
    named = [entry for entry in sorted(held.items(), key=lambda entry: -entry[1])[:limit] if entry[1]]
    return named, sum(held.values()) - sum(nbytes for _, nbytes in named)


def _held_at(recording: StepRecord, at: int) -> dict[str, int]:
    """Return the bytes alive at an operator, by what they are and whose."""
    held: dict[str, int] = defaultdict(int)
    for storage in recording.storages:
        if max(storage.born, 0) <= at and (storage.last is None or storage.last >= at):
            category = recording.category_of(storage)
            if category in _WORDS:
                held[_WORDS[category]] += storage.nbytes
            else:
                of = storage.name.rpartition(".")[0] if category == "unsharded" else _place(recording, storage.born)
                held[f"{_OF_MODULES[category]} {_kind(of)}"] += storage.nbytes
    held["temporaries inside the operator"] += recording.operators[at].scratch_bytes
    return held


def held_output(record: StepRecord, peak_bytes: int, floor_bytes: int) -> str:
    """Say what the output costs that a loop may not hold; "" where a peak without it is next to as high.

    Args:
        record: A recorded step, planned or not.
        peak_bytes: Its peak, with everything counted.
        floor_bytes: What the peak is at least, whatever is dropped: that of the optimizer's step.
    """
    held = [
        storage
        for storage in record.storages
        if storage.kind == "activation" and storage.born < record.loss_stop and storage.last is None
    ]
    # What autograd saved of it stays until the operator of backward that reads it last.
    dropped = [replace(s, last=max(record.loss_stop - 1, *s.read_by, *s.written_by, s.born)) for s in held]
    live, count = record.live_bytes(), len(record.operators)
    lower = int(live.max(initial=0) - (live - alive(held, count) + alive(dropped, count)).max(initial=0))
    lower = min(lower, peak_bytes - floor_bytes)
    if lower < NOTABLE * peak_bytes:
        return ""
    return (
        f"the output ({format_bytes(sum(storage.nbytes for storage in held))}) is counted as held: if your loop drops "
        f"it before backward, the peak is {format_bytes(lower)} lower: holds_output=False (--drops-output)"
    )


def _kind(module: str) -> str:
    """Leave numbers out of a path that has names as well."""
    starred = _NUMBER.sub("*", module)
    return starred if any(letter.isalpha() for letter in starred) else module


def _place(recording: StepRecord, operator: int) -> str:
    record = recording.operators[operator]
    if record.call < 0 and record.forward_of >= 0:
        record = recording.operators[record.forward_of]
    if record.call < 0:
        return "the loss"
    return recording.calls[record.call].module or "the model's own operators"
