"""The times of a recorded step: measured where it runs, measured again where they cannot be right, else estimated.

Where its device is not there they are predicted from a named card's rates; one rank's operators take the times that the
same operators of the whole model took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .blocks import kinds_of
from .cards import Card
from .devices import Device, is_out_of_memory
from .kernels import with_host
from .records import Profile
from .roofline import predicted_ns
from .step import Step
from .step_record import Operator, StepRecord
from .times import Origin, Spread, estimated, measured
from .timing import StepTimes, Watched, step_times

BACKWARD = 2
"""Backward is taken to cost this many times the forward where it was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTimes:
    """Hold the times of a recorded step.

    Attributes:
        operators_ns: Nanoseconds of each operator of forward and loss, the host's share included.
        forward: Forward and loss.
        step: Forward, loss and backward.
        times_from: Where operators' and forward's times come from.
        step_time_from: Where the step's comes from.
        notes: What a reader of them must know.
    """

    operators_ns: tuple[int, ...]
    forward: Spread
    step: Spread
    times_from: Origin
    step_time_from: Origin
    notes: tuple[str, ...] = ()


def time_record(
    record: StepRecord, step: Step, place: Device, repeats: int, *, lacking: int, watched: Watched | None = None
) -> RecordTimes:
    """Time a recorded step.

    Args:
        record: What was recorded of the step.
        step: The step, warmed up; its model's state must be preserved by the caller.
        place: Where the model is.
        repeats: Most repeats; 0 runs nothing and estimates.
        lacking: Bytes that the device is short of for a whole step; then forwards alone are run.
        watched: Steps that were run already for something else. Where they tell the times as well, none is run again.
    """
    if repeats <= 0:
        return _estimates(record, "not measured", ())
    names = [operator.operator for operator in record.operators[: record.loss_stop]]
    alike = [[range(record.calls[k].start, record.calls[k].stop) for k in blocks] for blocks in kinds_of(record)]
    if watched is not None and watched.tells_times():
        return _measured(watched.times(names, alike), place, lacking, (), alike=bool(alike))
    notes: list[str] = []
    for trains in (True, False) if not lacking else (False,):
        try:
            found = _believable(
                lambda trains=trains: step_times(step, names, place.device, repeats, trains=trains, alike=alike)
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            notes.append(f"memory ran out while {'steps' if trains else 'operators'} were timed: {lines[0]}")
            continue
        return _measured(found, place, lacking, notes, alike=bool(alike))
    return _estimates(record, "memory ran out while measuring", notes)


def predicted_times(record: StepRecord, card: Card) -> RecordTimes:
    """Predict times from a card's peak rates, backward's operators included; see `roofline`."""
    times = [predicted_ns(operator, card) for operator in record.operators]
    origin = estimated(f"roofline of {card.name}, nothing was run")
    return RecordTimes(
        operators_ns=tuple(times[: record.loss_stop]),
        forward=Spread.of([sum(times[: record.loss_stop])]),
        step=Spread.of([sum(times)]),
        times_from=origin,
        step_time_from=origin,
        notes=(
            f"nothing was run: times are predicted from {card.rates_words}; "
            "launching kernels, collectives and what hides behind other work are not modelled",
        ),
    )


def times_of_whole(record: StepRecord, whole: Profile) -> RecordTimes:
    """Give one rank's operators the times of the whole model's, by module call, name and turn.

    What the sharded forward runs besides (gathering, casts) takes no time here.
    """
    known = {place: o.forward_ns for place, o in zip(_places(whole), whole.operators, strict=False)}
    return RecordTimes(
        operators_ns=tuple(known.get(place, 0) for place in _places(record)),
        forward=whole.forward,
        step=whole.step,
        times_from=whole.times_from,
        step_time_from=whole.step_time_from,
        notes=whole.notes,
    )


def _places(record: StepRecord) -> list[tuple[str, int, str, int]]:
    turns: Counter[tuple[str, int, str]] = Counter()
    found: list[tuple[str, int, str, int]] = []
    for operator in record.operators[: record.loss_stop]:
        call = record.calls[operator.call] if operator.call >= 0 else None
        module, index = ("", -1) if call is None else (call.module, call.index)
        place = (module, index, operator.operator)
        found.append((module, index, operator.operator, turns[place]))
        turns[place] += 1
    return found


def _believable(measure: Callable[[], StepTimes]) -> StepTimes:
    """Measure, and once more where the first figures cannot be right."""
    first = measure()
    return measure() if first.doubts() else first


def _measured(found: StepTimes, place: Device, lacking: int, notes: Sequence[str], *, alike: bool) -> RecordTimes:
    operators_ns, forward_ns = list(found.operators_ns), found.forward.median_ns
    if place.runs_behind:
        operators_ns = with_host(operators_ns, forward_ns)
    else:
        host_ns = max(0, forward_ns - sum(operators_ns)) // max(1, len(operators_ns))
        operators_ns = [taken + host_ns for taken in operators_ns]
    told = [*notes, *found.notes()]
    if not found.same:
        told.append(
            "the real forward runs other operators than the dry run (it depends on data): figures are approximate"
        )
    where = "training steps" if found.step is not None else "forwards that save nothing"
    step, step_from = found.step, measured(place.clock_words)
    if step is None:
        step = _scaled(found.forward, 1 + BACKWARD)
        short = f"the step needs {lacking} bytes more" if lacking else "memory ran out in whole steps"
        step_from = estimated(f"backward taken as twice the forward, {short}")
    return RecordTimes(
        operators_ns=tuple(operators_ns),
        forward=found.forward,
        step=step,
        times_from=measured(f"{place.clock_words}, in {where}{', of blocks built alike together' if alike else ''}"),
        step_time_from=step_from,
        notes=tuple(told),
    )


def _estimates(record: StepRecord, why: str, notes: Sequence[str]) -> RecordTimes:
    times = tuple(_moved_bytes(operator, record) for operator in record.operators[: record.loss_stop])
    forward = Spread.of([sum(times)])
    return RecordTimes(
        operators_ns=times,
        forward=forward,
        step=_scaled(forward, 1 + BACKWARD),
        times_from=estimated(f"bytes moved at 1 GB/s, {why}"),
        step_time_from=estimated("backward taken as twice the forward"),
        notes=tuple(notes),
    )


def _moved_bytes(operator: Operator, record: StepRecord) -> int:
    if not operator.produces and not operator.writes:
        return 0
    return sum(record.storages[index].nbytes for index in (*operator.reads, *operator.produces))


def _scaled(spread: Spread, factor: int) -> Spread:
    return Spread(low_ns=factor * spread.low_ns, median_ns=factor * spread.median_ns, high_ns=factor * spread.high_ns)
