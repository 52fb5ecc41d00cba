"""The peaks of all candidates as bare segments in one sweep: what `segment_peak` says of each, many times as fast."""

from __future__ import annotations

import numpy as np

from .problem import Segment
from .simulate import segment_peak
from .tables import Tables

_MOST_STAGES = 2000


def leaf_peaks(tables: Tables) -> dict[tuple[int, int], int]:
    """Return, for each candidate that saves something, its peak in bytes without save set and children.

    It is above what the candidate's backward starts on, as in `segment_peak`. Starts are swept from the last to the
    first; each stage's tensors are added once, to every stage and every stop that they matter to.
    """
    known = tables.graphs.get("leaf peaks")
    if known is None:
        places = [place for place in tables.candidates if tables.last_saver[place[1]] >= place[0]]
        if tables.stage_count > _MOST_STAGES:
            known = {(a, b): segment_peak(tables, Segment(start=a, stop=b)).nbytes for a, b in places}
        else:
            known = _sweep(tables, places)
        tables.graphs["leaf peaks"] = known
    assert isinstance(known, dict)
    return known


def _sweep(tables: Tables, places: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    count = tables.stage_count
    stops: dict[int, list[int]] = {}
    for start, stop in places:
        stops.setdefault(start, []).append(stop)
    reach = max((stop - start for start, stop in places), default=0)
    last_saver = np.array(tables.last_saver)
    in_use = tables.forward_extra.copy()  # By stage: temporaries, and tensors before their last use.
    lingering = np.zeros((count, count + 1), dtype=np.int64)  # By stage and stop: held by a stage before the stop.
    held = tables.backward_extra.copy()
    found: dict[tuple[int, int], int] = {}
    for start in range(count - 1, -1, -1):
        end = min(count, start + reach)
        for rank in range(tables.first_made[start + 1], tables.first_made[start + 2]):
            weight = int(tables.weight[rank])
            last = int(tables.last_alive[rank])
            in_use[start : min(last + 1, end)] += weight
            if tables.holders[rank]:
                first = tables.holders[rank][0]
                lingering[last + 1 : end, first + 1 : end + 1] += weight
                held[first:end] += weight
        if start not in stops:
            continue
        alive = lingering[start:end, start + 1 : end + 1] + in_use[start:end, None]
        most_alive = np.maximum.accumulate(alive, axis=0)
        most_held = np.maximum.accumulate(held[start:end])
        ends = np.array(stops[start])
        replay = most_alive[last_saver[ends] - start, ends - start - 1] + tables.entry_extra[ends - 1]
        peaks = np.maximum(replay, most_held[ends - start - 1])
        for stop, peak in zip(stops[start], peaks.tolist(), strict=True):
            found[start, stop] = peak
    return found
