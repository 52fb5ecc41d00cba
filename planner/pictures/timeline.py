"""The memory of a step over time, by what it is used for, and its parts at the peak; of planned steps as well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from ...profiler.records import Parts, Profile
from ...profiler.step_record import IntArray, StepRecord
from ..budget import format_bytes
from .palette import BESIDE, MEMORY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SOURCES = {
    "parameters": ("parameter",),
    "optimizer state": ("optimizer",),
    "buffers and batch": ("buffer", "batch"),
    "gradients": ("gradient",),
    "activations kept for backward": ("activation",),
    "recomputed activations": ("recomputed",),
    "temporaries": ("temporary",),
    "gathered parameters and collectives": ("unsharded", "communication"),
}
"""The categories of a record by the names that people read."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Timeline:
    """Hold the memory of one step over its operators.

    Attributes:
        live: Bytes alive at each operator's worst moment, in order of execution, by the names of `palette.MEMORY`; the
            optimizer's step, where one is counted, is appended as the last moments. They add up to everything alive.
        ends_ns: When each moment ends, nanoseconds from the step's begin. Forward's operators and the whole step were
            timed; backward's operators share its time by the forward operators whose gradients they compute. The
            optimizer's step was not timed, and has a fortieth of the axis.
        modules: By moment, the path of the module it belongs to.
        loss_stop: Operators of forward and loss.
        backward_stop: Operators of the step; moments after it are the optimizer's.
        peak_words: Where the peak is and what is alive there.
        name: What to call the step in a picture.
    """

    live: Mapping[str, IntArray]
    ends_ns: npt.NDArray[np.float64]
    modules: tuple[str, ...]
    loss_stop: int
    backward_stop: int
    peak_words: str
    name: str = "without checkpoints"

    @staticmethod
    def of(
        record: StepRecord, profile: Profile, *, alive_bytes: int, step_ns: float, beside_bytes: int = 0
    ) -> Timeline:
        """Sum a recorded step up.

        Args:
            record: What was recorded, planned or not.
            profile: The unplanned step, which operators were timed in.
            alive_bytes: The most that is alive in it, by the account of whoever recorded it; what the record does not
                show is counted as alive throughout.
            step_ns: Time of forward, loss and backward, replays included.
            beside_bytes: What is reserved beside what is alive, throughout, the optimizer's step included.
        """
        parts, count = profile.parts, len(record.operators)
        by_kind = {**record.live_bytes_by_kind(), "optimizer": np.full(count, parts.optimizer, dtype=np.int64)}
        live = {name: np.sum([by_kind[kind] for kind in kinds], axis=0) for name, kinds in _SOURCES.items()}
        live["temporaries"] = live["temporaries"] + record.scratch_bytes()
        recorded = int(np.sum(list(live.values()), axis=0).max(initial=0))
        unseen = max(0, alive_bytes - recorded)
        live[BESIDE] = np.full(count, unseen + beside_bytes, dtype=np.int64)
        timeline = Timeline(
            live={name: live[name] for name in MEMORY},
            ends_ns=np.cumsum(_times_ns(record, profile, step_ns)),
            modules=tuple(_module_of(record, k) for k in range(count)),
            loss_stop=record.loss_stop,
            backward_stop=count,
            peak_words="",
        )
        return timeline._with_optimizer_step(parts, beside_bytes) if parts.optimizer_step_peak and count else timeline

    def _with_optimizer_step(self, parts: Parts, beside_bytes: int) -> Timeline:
        """Append the optimizer's step: what stays from the last moment, and its temporaries up to its peak."""
        count = self.backward_stop
        width = max(1, count // 40)
        after = {name: int(values[-1]) for name, values in self.live.items()}
        after["gradients"] = parts.gradients
        for name in list(_SOURCES)[4:]:
            after[name] = 0
        after[BESIDE] = 0
        after["temporaries"] = max(0, parts.optimizer_step_peak - sum(after.values()))
        after[BESIDE] = beside_bytes
        end = float(self.ends_ns[-1])
        return replace(
            self,
            live={name: np.append(values, np.full(width, after[name])) for name, values in self.live.items()},
            ends_ns=np.append(self.ends_ns, end + end / 40 * np.arange(1, width + 1) / width),
            modules=(*self.modules, *("optimizer's step",) * width),
        )

    def total(self) -> IntArray:
        """Return everything alive at each moment, in bytes."""
        return np.sum(list(self.live.values()), axis=0)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes alive at any moment."""
        return int(self.total().max(initial=0))

    def peak_at(self) -> int:
        """Return the moment of the peak."""
        return int(self.total().argmax())

    def at_peak(self) -> dict[str, int]:
        """Return what the memory is used for at the peak, in bytes; it adds up to the peak."""
        at = self.peak_at()
        return {name: int(values[at]) for name, values in self.live.items() if values[at]}

    def parts(self) -> list[tuple[str, int, float]]:
        """Return what the memory is used for at the peak: name, bytes, and share of the peak; they add up to it.

        What is alive at other moments only, such as gradients not yet made, is not in it.
        """
        parts, total = self.at_peak(), max(1, self.peak_bytes)
        return [(name, nbytes, nbytes / total) for name, nbytes in parts.items()]

    def phases(self) -> Iterator[tuple[str, int]]:
        """Yield the phases of the step with the first moment of each."""
        yield "forward", 0
        yield "backward", self.loss_stop
        if len(self.modules) > self.backward_stop:
            yield "optimizer's step", self.backward_stop

    def moments(self, by: str = "time") -> npt.NDArray[np.float64]:
        """Return where each moment begins on an axis, and at last where the step ends.

        Args:
            by: "time", in milliseconds, or "operators", counted.
        """
        if by == "operators":
            return np.arange(len(self.modules) + 1, dtype=np.float64)
        return np.insert(self.ends_ns, 0, 0.0) / 1e6

    def to_frame(self) -> pd.DataFrame:
        """Return one row a moment: `phase`, `module`, `end_ns`, and the bytes of each use, named as in the legend."""
        starts = {start: name for name, start in self.phases()}
        phase = pd.Series([starts.get(k) for k in range(len(self.modules))]).ffill()
        return pd.DataFrame({"phase": phase, "module": self.modules, "end_ns": self.ends_ns, **self.live})

    def plot(self, *, by: str = "time", title: str = "") -> Figure:
        """Draw it; see `memory_over_time`."""
        from .memory import memory_over_time

        return memory_over_time(self, by=by, title=title)

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.modules)} moments, peak {format_bytes(self.peak_bytes)}>"


def profile_timeline(profile: Profile) -> Timeline:
    """Return the memory over time of the unplanned step that a profile recorded."""
    alive_bytes = int(profile.live_bytes().max(initial=0))
    return Timeline.of(profile, profile, alive_bytes=alive_bytes, step_ns=profile.step_ns)


def memory_parts(profile: Profile) -> list[tuple[str, int, float]]:
    """Return `Timeline.parts` of the unplanned step, what a card reserves beside tensors left out."""
    return profile_timeline(profile).parts()


def _times_ns(record: StepRecord, profile: Profile, step_ns: float) -> npt.NDArray[np.float64]:
    """Return the time of each operator: forward's as profiled, the others' sharing the rest of the step."""
    known: dict[tuple[str, str], list[int]] = defaultdict(list)
    for operator in profile.operators[: profile.loss_stop]:
        known[_key(profile, operator.call, operator.operator)].append(operator.forward_ns)
    mean = {key: sum(times) / len(times) for key, times in known.items()}
    operators, stop = record.operators, record.loss_stop
    own = np.array([mean.get(_key(record, o.call, o.operator), 0.0) for o in operators])
    # Backward's operators are as long as the forward operator they belong to; replayed ones take their own time.
    weights = np.array(
        [own[o.forward_of] if o.forward_of >= 0 and not o.replayed else own[k] for k, o in enumerate(operators)]
    )
    weights += 1.0
    forward, rest = weights[:stop], weights[stop:]
    forward_ns = min(float(profile.forward_ns), step_ns)
    times = np.concatenate([forward * (forward_ns / max(1.0, forward.sum())), rest])
    # The first operator of backward makes the loss's own gradient, outside every replay.
    replayed = np.array([o.replayed and k > stop for k, o in enumerate(operators)][stop:], dtype=np.bool_)
    added = max(0.0, step_ns - profile.step_ns) if replayed.any() else 0.0
    for chosen, share in ((replayed, added), (~replayed, step_ns - forward_ns - added)):
        total = rest[chosen].sum()
        times[stop:][chosen] *= share / total if total else 0.0
    return times


def _key(record: StepRecord, call: int, operator: str) -> tuple[str, str]:
    return record.calls[call].module if call >= 0 else "", operator


def _module_of(record: StepRecord, position: int) -> str:
    operator = record.operators[position]
    if operator.call < 0 and operator.forward_of >= 0:
        operator = record.operators[operator.forward_of]
    return (record.calls[operator.call].module or "the model's own operators") if operator.call >= 0 else "the loss"
