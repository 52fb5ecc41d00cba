"""`profile`: record a step's bytes, measure its times, and cut it into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from .allocator import collected, fits
from .devices import is_out_of_memory
from .dry_run import DryRunError
from .optimizer import OptimizerCost, optimizer_cost, unwrapped
from .record_times import RecordTimes, predicted_times, time_record, times_of_whole
from .records import Parts, Profile
from .results import run_steps
from .session import Session, open_session, silent
from .stages import cut
from .step import BatchError, Loss
from .step_record import Operator, StepRecord, Storage
from .timing import TimedRuns, Watched, forward_without_saving, train_once


@collected()
def profile(
    model: nn.Module,
    batch: object,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | str | None = None,
    accumulation: bool = False,
    holds_output: bool = True,
    repeats: int = 3,
    device: str | None = None,
    session: Session | None = None,
    whole: Profile | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Record one training step: bytes by a dry run, operator times by torch.profiler, and its stages.

    The model is left as it was: gradients, buffers, random states, modes and attributes.

    Args:
        model: The model, on the device it is trained on.
        batch: A mapping is passed as keyword arguments, a tuple or list as positional ones, a tensor alone as one.
        loss: Takes the model's output to a scalar; default `output.loss`, else the mean of floating-point outputs.
        optimizer: An instance, or a name such as "adamw"; its state and step then count in the peak.
        accumulation: Count gradients as alive throughout.
        holds_output: Count the model's output as alive until the step's end, as `out = model(x)` keeps it; False where
            it goes once there is a loss.
        repeats: Most timed repeats after a warm-up (seconds of them are enough); 0 estimates times by bytes moved and
            says so.
        device: Name of a card, "h100-80gb": the step is recorded for it and nothing is run, so that the model may be on
            meta; every time is a prediction (`roofline`), and says so.
        session: What `open_session` returned, to share its measurements with later dry runs.
        whole: The same step of the whole model where `session` has ranks: its times are taken, and nothing is run.
        progress: Called with a few words before each phase.

    Raises:
        BatchError: The batch cannot be passed to the model, or there is no loss.
    """
    session = session or open_session(
        model, batch, loss, accumulation=accumulation, holds_output=holds_output, device=device
    )
    session.step.guard.also_keep(optimizer)
    with session.step.guard.undisturbed():
        return _profile(session, optimizer, repeats, whole, progress or silent)


def _profile(
    session: Session,
    optimizer: Optimizer | str | None,
    repeats: int,
    whole: Profile | None,
    say: Callable[[str], None],
) -> Profile:
    step = session.step
    is_run = session.card is None and whole is None
    notes: list[str] = []
    say("recording the step on fake tensors")
    method, recording = _first_recorded(session, notes, is_run=is_run)
    changes = step.guard.changes
    unsaved = session.record(method, forward_only=True)
    if is_run and _used_once(session, recording, changes, notes):
        say("recording the step again, with what it makes at first use")
        recording, unsaved = session.record(method), session.record(method, forward_only=True)
    written = {recording.storages[index].name for operator in recording.operators for index in operator.writes}
    step.guard.expect_writes([tensor for name, tensor in step.model.named_parameters() if name in written])
    again = [call.module for call in recording.calls if call.start >= recording.loss_stop]
    if again:
        raise BatchError(
            f"module {again[0]!r} is called again in backward: the model checkpoints itself "
            "(torch.utils.checkpoint in its forward), and the two do not stack. Switch that off first: for a model of "
            "transformers by model.gradient_checkpointing_disable(); for a trainer, leave out "
            "gradient_checkpointing=True and activation_checkpointing=True; else take the call out of forward"
        )
    if recording.loss_is_assumed:
        notes.append("no loss was given and the output carries none: the mean of the outputs was taken; pass loss=")
    needed = recording.peak_bytes() - recording.entry_bytes()
    runs_whole = is_run and fits(needed, session.device)
    say("measuring operators' workspace")
    allocated, kept, unseen = 0, 0, 0
    if runs_whole and repeats > 0:
        try:
            kept = _learn(session)
            allocated = 0 if session.reference is None else session.reference.peak_bytes
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            runs_whole = False
            session.reference = session.watched = None
            notes.append(f"memory ran out in a real step, of which nothing was measured: {_first_line(error)}")
    if session.is_shortened:
        recording, unsaved = _as_it_runs(session, recording, unsaved)
    if session.card is None:
        session.place.release_cached()
        session.scratch.measure_alone()
    if session.scratch.unmeasured:
        count = len(session.scratch.unmeasured)
        notes.append(f"the workspace of {count} operators is not counted: memory ran out when they were run alone")
    recording = session.scratch.fill_in(recording)
    recorded = recording.peak_bytes() - recording.entry_bytes()
    if whole is not None:
        kept, unseen = whole.library_bytes, whole.unseen_bytes
    elif not session.accumulation:
        unseen = max(0, allocated - recorded)
    if kept:
        notes.append(f"libraries keep {kept} bytes of workspace on the device; every peak holds them")
    if unseen > 0.01 * recorded:
        notes.append(f"the allocator gave out {unseen} bytes more than was recorded; every peak is raised by them")
    say("timing the step and its operators")
    times = _times(session, recording, repeats, whole, notes, lacking=0 if runs_whole else needed)
    if session.ranks is not None:
        notes.append(f"bytes are those of each of {session.ranks.count} ranks {session.ranks.words}")
    say("recording the optimizer")
    cost = None
    if optimizer is not None:
        cost = optimizer_cost(step, optimizer, round_to=session.round_to, ranks=session.ranks, card=session.card)
    parts = _parts(session, recording, optimizer, cost, kept)
    storages = _storages(recording, unsaved)
    untimed = len(recording.operators) - len(times.operators_ns)
    return Profile(
        model=type(step.model).__name__,
        device=session.device_words,
        operators=tuple(map(_timed, recording.operators, [*times.operators_ns, *([0] * untimed)])),
        calls=recording.calls,
        storages=storages,
        stages=cut(recording.calls, storages, recording.loss_stop),
        forward_stop=recording.forward_stop,
        loss_stop=recording.loss_stop,
        parts=parts,
        forward=times.forward,
        step=times.step,
        bytes_from=method,
        times_from=times.times_from,
        step_time_from=times.step_time_from,
        optimizer_ns=None if cost is None or session.accumulation else cost.step_ns,
        accumulation=session.accumulation,
        unseen_bytes=unseen,
        library_bytes=kept,
        notes=tuple(dict.fromkeys((*notes, *times.notes))),
    )


def _first_recorded(
    session: Session, notes: list[str], *, is_run: bool
) -> tuple[Literal["dry run", "real step"], StepRecord]:
    if not is_run and session.step.guard.now.stepping_hooks:
        notes.append("hooks run in backward, and nothing is run to see what they do: gradients count as alive")
    try:
        return "dry run", session.record("dry run")
    except DryRunError as error:
        if not is_run:
            raise BatchError(f"{error}; and nothing can be run instead, with a card named or several ranks") from error
        notes.append(f"bytes were recorded in a real step, because {error}")
    return "real step", session.record("real step")


def _used_once(session: Session, recording: StepRecord, changes: Sequence[str], notes: list[str]) -> bool:
    """Use for real, once, what the step makes or changes at its first use, and see what hooks do in backward.

    Training goes on with masks, tables, settings and an optimizer's state that a first step made; so does the profile
    from then on, and every later run of the step. Returns whether anything is different now.
    """
    step, guard = session.step, session.step.guard
    if guard.now.stepping_hooks:
        if fits(recording.peak_bytes() - recording.entry_bytes(), session.device):
            guard.advance(lambda: step.train())
            guard.observe_backward(step.train)
            if guard.steps_inside:
                notes.append(
                    "hooks step parameters in backward: the state that they keep is counted as the optimizer's, what "
                    "their steps take besides is not"
                )
            return True
        notes.append("hooks run in backward, and the step does not fit to see what they do: gradients count as alive")
    if not changes:
        return False
    try:
        guard.advance(lambda: forward_without_saving(step))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        notes.append(f"memory ran out in a first forward; what it makes is counted in every step: {_first_line(error)}")
        return False
    return True


def _as_it_runs(session: Session, recording: StepRecord, unsaved: StepRecord) -> tuple[StepRecord, StepRecord]:
    """Compare a record of which blocks were written, not run, with a step that ran them; where it differs, run them.

    A block may do something else than those before it although it looks the same, by its number in the stack. That is
    seen in a real step, operator by operator, or else in a forward on fake tensors.
    """
    if session.scratch.ran:
        same = recording.scratch_keys == session.scratch.ran
    else:
        session.shortens = False
        unsaved = session.record("dry run", forward_only=True)
        same = list(map(_work, recording.operators[: recording.loss_stop])) == list(map(_work, unsaved.operators))
        session.shortens = same
    if same:
        return recording, unsaved
    session.shortens = False
    return session.record("dry run"), session.record("dry run", forward_only=True)


def _work(operator: Operator) -> tuple[object, ...]:
    return operator.operator, operator.call, operator.reads, operator.produces, operator.output_bytes, operator.flops


def _learn(session: Session) -> int:
    """Run the unmodified step for real, and learn results, peak, operators' workspace and, where it is long, times.

    Returns:
        The bytes that libraries keep from its first run on.
    """
    step, place = session.step, session.place
    timed = TimedRuns(step, place)
    with step.guard.preserved():
        kept = place.warm_up(lambda: train_once(step))
    # Without a dispatch mode, under which autograd sums gradients out of place.
    session.reference = run_steps(step, nullcontext, train=timed.train)
    with step.guard.preserved():
        operators = session.scratch.learn(timed.train, session.device, None if place.runs_behind else place.clock_ns)
    session.watched = None if place.runs_behind else Watched(timed=timed, operators=operators)
    return kept


def _times(
    session: Session, recording: StepRecord, repeats: int, whole: Profile | None, notes: list[str], *, lacking: int
) -> RecordTimes:
    """Take the times of a recorded step from its card's rates, from the whole model's profile, or by running it."""
    if session.card is not None:
        return predicted_times(recording, session.card)
    if whole is not None:
        return times_of_whole(recording, whole)
    notes += _device_notes(session, [operator.operator for operator in recording.operators[: recording.loss_stop]])
    with session.step.guard.preserved():
        if session.reference is None and repeats > 0:
            forward_without_saving(session.step)
        return time_record(recording, session.step, session.place, repeats, lacking=lacking, watched=session.watched)


def _device_notes(session: Session, names: Sequence[str]) -> list[str]:
    """Name what is not counted on a device that runs behind the host."""
    notes: list[str] = []
    if "aten.record_stream.default" in names:
        notes.append(
            "tensors are handed to other streams (record_stream): their memory is free for others only when those "
            "streams are done, which is not counted; keep some headroom"
        )
    convolutions = any("convolution" in name for name in names)
    if session.place.runs_behind and convolutions and torch.backends.cudnn.benchmark:
        notes.append(
            "cudnn.benchmark is on: for every new shape algorithms are tried with as much workspace as they ask for, "
            "which is not counted beyond the shapes of this batch"
        )
    return notes


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parts(
    session: Session,
    recording: StepRecord,
    optimizer: Optimizer | str | None,
    cost: OptimizerCost | None,
    library_bytes: int,
) -> Parts:
    total = recording.total_bytes
    parameters, buffers, batch, gradients = total("parameter"), total("buffer"), total("batch"), total("gradient")
    state = step_peak = 0
    if cost is not None:
        state = cost.state_bytes
        outliving = sum(s.nbytes for s in recording.storages if s.kind == "activation" and s.last is None)
        step_peak = parameters + buffers + batch + gradients + state + outliving + cost.temporary_bytes
        step_peak += library_bytes
    if session.step.guard.steps_inside:
        counted = None if optimizer is None or isinstance(optimizer, str) else unwrapped(optimizer)
        state += session.step.guard.optimizer_bytes(left_out=counted)
    return Parts(
        parameters=parameters,
        buffers=buffers,
        batch=batch,
        optimizer=state,
        gradients=gradients,
        optimizer_step_peak=step_peak,
    )


def _timed(operator: Operator, forward_ns: int) -> Operator:
    return replace(operator, forward_ns=forward_ns)


def _storages(recording: StepRecord, unsaved: StepRecord) -> tuple[Storage, ...]:
    """Join the lives of storages in the real step with their lives when nothing is saved."""
    stop = recording.loss_stop
    same = [o.operator for o in recording.operators[:stop]] == [o.operator for o in unsaved.operators]
    joined: list[Storage] = []
    for index, storage in enumerate(recording.storages):
        readers = tuple(reader for reader in storage.read_by if reader < stop)
        last_unsaved: int | None = max([storage.born, *readers])
        twin = unsaved.storages[index] if same and index < len(unsaved.storages) else None
        if twin is not None and (twin.nbytes, twin.born) == (storage.nbytes, storage.born):
            last_unsaved = twin.last
        writers = tuple(writer for writer in storage.written_by if writer < stop)
        joined.append(replace(storage, last_unsaved=last_unsaved, read_by=readers, written_by=writers))
    return tuple(joined)
