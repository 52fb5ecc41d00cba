"""Say in words what holds a peak where it is."""

from __future__ import annotations

import re
from collections import defaultdict

from ...profiler.records import Profile
from ...profiler.step_record import StepRecord
from ..budget import format_bytes

NOTABLE = 0.01
"""An output is mentioned from this share of the peak on."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_WORDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "batch": "the batch",
    "gradient": "gradients",
    "communication": "buffers of collectives",
}


def explain_peak(recording: StepRecord, profile: Profile, peak_bytes: int, *, limit: int = 4) -> str:
    """Say where the peak of a recorded step is and what is alive there, largest first, as shares of the peak.

    Activations go by the module that made them; modules whose paths differ in numbers only count as one: `h.*.mlp`.

    Args:
        recording: A recorded step, planned or not.
        profile: The profile it belongs to.
        peak_bytes: The step's peak, optimizer included.
        limit: How many holders to name.
    """
    live = recording.live_bytes()
    parts = profile.parts
    if parts.optimizer_step_peak >= int(live.max(initial=0)) + parts.optimizer:
        return (
            f"optimizer's step: parameters {format_bytes(parts.parameters)}, gradients "
            f"{format_bytes(parts.gradients)}, optimizer state {format_bytes(parts.optimizer)}"
        )
    at = int(live.argmax())
    held: dict[str, int] = defaultdict(int)
    if parts.optimizer:
        held["optimizer state"] = parts.optimizer
    for storage in recording.storages:
        if max(storage.born, 0) <= at and (storage.last is None or storage.last >= at):
            if storage.kind in _WORDS:
                held[_WORDS[storage.kind]] += storage.nbytes
            elif storage.kind == "unsharded":
                held[f"gathered parameters of {_kind(storage.name.rpartition('.')[0])}"] += storage.nbytes
            else:
                held[f"activations of {_kind(_place(recording, storage.born))}"] += storage.nbytes
    scratch = recording.operators[at].scratch_bytes
    if scratch:
        held["workspace inside the operator"] = scratch
    largest = sorted(held.items(), key=lambda item: -item[1])[:limit]
    phase = "forward" if at < recording.loss_stop else "backward"
    named = ", ".join(f"{nbytes / peak_bytes:.0%} {name}" for name, nbytes in largest)
    return f"{phase} of {_place(recording, at)}: {named}"


def held_output(profile: Profile) -> str:
    """Say what the output costs that a loop may not hold; "" where it is next to nothing of the peak."""
    outliving = sum(
        storage.nbytes
        for storage in profile.storages
        if storage.kind == "activation" and storage.born < profile.loss_stop and storage.last is None
    )
    if outliving < NOTABLE * profile.peak_bytes():
        return ""
    return (
        f"{format_bytes(outliving)}, the model's output above all, are counted as held through backward: a loop that "
        "drops the output once there is a loss takes less, pass holds_output=False for it"
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
