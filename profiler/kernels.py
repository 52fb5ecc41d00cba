"""Whose work is it: attribute what torch.profiler saw, kernels above all, to the operators that were marked.

A kernel carries the number of the operator that launched it (`linked_correlation_id`). Operators are numbered by
torch, launches and kernels by the driver; both count from 1, so a driver's number looked up among the operators finds a
stranger. torch's own parser (torch/autograd/profiler.py, `_parse_kineto_results`) keeps them apart in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from .internals import is_annotation, is_operator, ran_on_cpu


def marked_durations(events: Sequence[Any], mark: str, *, on_device: bool) -> list[int]:
    """Return the nanoseconds of work inside each marked operator, in the order of the marks.

    Args:
        events: The raw events of a torch.profiler session.
        mark: Name of the annotation around each operator.
        on_device: Sum the device's kernels, copies and fills that the operator launched; else take the operator's own
            time on the CPU, the longest of the events inside its mark.
    """
    marks = _Marks([event for event in events if event.name() == mark and ran_on_cpu(event)])
    durations = [0] * len(marks.spans)
    if not on_device:
        for event in events:
            position = marks.around(event) if ran_on_cpu(event) and event.name() not in (mark, "[memory]") else None
            if position is not None:
                durations[position] = max(durations[position], event.duration_ns())
        return durations
    operators: dict[int, int | None] = {}
    launches: dict[int, int | None] = {}
    for event in events:
        if not ran_on_cpu(event):
            continue
        if is_operator(event):
            operators[event.correlation_id()] = marks.around(event)
        elif not is_annotation(event):
            launches[event.correlation_id()] = marks.around(event)
    for event in events:
        # An annotation is shown on the device as well, spanning the kernels inside it.
        if ran_on_cpu(event) or is_annotation(event):
            continue
        linked = event.linked_correlation_id()
        # What no operator launched (a library's own call) is known by its launch, which has the driver's number too.
        position = operators.get(linked) if linked in operators else launches.get(event.correlation_id())
        if position is not None:
            durations[position] += event.duration_ns()
    return durations


class _Marks:
    """Find the mark that an event of the CPU lies in."""

    def __init__(self, marks: Sequence[Any]) -> None:
        self.spans = sorted((mark.start_ns(), mark.start_ns() + mark.duration_ns()) for mark in marks)
        self._starts = [start for start, _ in self.spans]

    def around(self, event: Any) -> int | None:
        position = bisect_right(self._starts, event.start_ns()) - 1
        inside = position >= 0 and event.start_ns() + event.duration_ns() <= self.spans[position][1]
        return position if inside else None


def device_ns(events: Sequence[Any]) -> int:
    """Return the nanoseconds of all the device's work: kernels, copies and fills, annotations left out."""
    return sum(event.duration_ns() for event in events if not ran_on_cpu(event) and not is_annotation(event))


def with_host(kernels_ns: Sequence[int], whole_ns: int) -> list[int]:
    """Return what each operator costs where kernels run behind the host that launches them.

    The host spends about the same on every operator; where its kernels take less, the device waits for the next. So an
    operator costs its kernels or the host's share, whichever is more, and that share is the one with which all of them
    together cost what the whole run was measured to take. 0 where kernels alone take that long.

    Args:
        kernels_ns: Each operator's kernels.
        whole_ns: Time of the whole run, the device's work included.
    """
    waiting = whole_ns - sum(kernels_ns)
    if waiting <= 0:
        return list(kernels_ns)
    ordered = sorted(kernels_ns)
    level = 0
    for count, kernel_ns in enumerate(ordered, start=1):
        # Raise the `count` shortest to the next one's time, as far as the waiting time reaches.
        following = ordered[count] if count < len(ordered) else None
        needed = None if following is None else (following - kernel_ns) * count
        if needed is None or needed >= waiting:
            level = kernel_ns + waiting // count
            break
        waiting -= needed
    return [max(kernel_ns, level) for kernel_ns in kernels_ns]
