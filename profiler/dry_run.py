"""Execute a whole step on fake tensors: the exact memory of a step without the memory."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from .absent import is_absent, stand_in
from .cards import Card
from .devices import device_of
from .internals import FakeTensorMode, tensor_registries
from .leftovers import take_out
from .ranks import Ranks, sharded
from .recorded_as import recorded_as
from .recorder import SMALL_NUMEL, Recorder
from .scratch import ScratchMeter
from .shortened import NotAlikeError, Run, left_out
from .snapshot import DisturbedError
from .splicing import lengthened
from .step import BatchError, Step, carried_loss
from .step_pieces import Shortened
from .step_record import StepRecord

Result = TypeVar("Result")


class DryRunError(RuntimeError):
    """Raised when a model's forward or backward cannot run on fake tensors."""


def on_fakes(
    step: Step, run: Callable[[Step], Result], *, ranks: Ranks | None = None, unused: frozenset[int] = frozenset()
) -> Result:
    """Run something on fake tensors in place of parameters, buffers and batch; put everything back afterwards.

    Replaced are the parameters and buffers of all modules that the step reaches, those of the loss among them, what
    else is trained, and the batch. Small integer and boolean tensors stay real (copies), since forwards look at their
    values to choose a path. Hooks on gradients do not run; what they were seen to do is done (`Guard.released`). What
    has no values, on meta or fake, gets a fake tensor on the CPU in its place, wherever it is reached.

    Args:
        step: The step.
        run: What to run, with the step on fake tensors.
        ranks: How the model is divided over processes meanwhile; None leaves it whole.
        unused: Identities of modules that are not run: their parameters and buffers stay what they are.

    Raises:
        DisturbedError: A fake tensor is kept where it cannot be taken out again.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    guard = step.guard
    try:
        with guard.preserved():
            result = _replaced(step, mode, run, ranks, unused)
    except Exception as error:
        # The frames that an error went through would keep their tensors alive.
        _forget_frames(error)
        failure = error
    else:
        guard.changes += take_out(mode)
        return result
    guard.changes += take_out(mode)
    raise failure


def _replaced(
    step: Step, mode: FakeTensorMode, run: Callable[[Step], Result], ranks: Ranks | None, unused: frozenset[int]
) -> Result:
    now, released = step.guard.now, step.guard.released
    beside = step.guard.beside(step.model)
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            small = not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= SMALL_NUMEL
            if is_absent(tensor):
                made = stand_in(tensor, mode)
            else:
                made = tensor.clone() if small else mode.from_tensor(tensor, static_shapes=True)
            fakes[id(tensor)] = tensor, made
            if id(tensor) in released:
                made.register_post_accumulate_grad_hook(_drop_gradient)
        return fakes[id(tensor)][1]

    fake_step = step.map_tensors(fake)
    used = (module for module in now.reach.modules if id(module) not in unused)
    registries = [registry for module in used for registry in tensor_registries(module)]
    absent = [*now.reach.fakes, *filter(is_absent, now.reach.tensors)]
    for tensor in (*(t for r in registries for t in r.values() if t is not None), *(t for _, t in beside), *absent):
        fake(tensor)
    reals = {id(made): tensor for tensor, made in fakes.values()}
    fake_beside = tuple((name, fake(tensor)) for name, tensor in beside)
    now.exchange({number: made for number, (_, made) in fakes.items()})
    try:
        with nullcontext(step.model) if ranks is None else sharded(step.model, ranks, mode) as entrance, mode:
            return run(replace(fake_step, beside=fake_beside, entrance=entrance))
    finally:
        now.exchange(reals)
        # Inside a caller's autocast the casts of fake weights are still there.
        torch.clear_autocast_cache()


def _drop_gradient(tensor: torch.Tensor) -> None:
    tensor.grad = None


def _forget_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        inner = error.__cause__ or error.__context__
        error.__context__ = None
        error = inner


def dry_run(
    step: Step,
    *,
    accumulation: bool = False,
    round_to: int = 1,
    scratch: ScratchMeter | None = None,
    forward_only: bool = False,
    planned: bool = False,
    ranks: Ranks | None = None,
    card: Card | None = None,
    runs: tuple[Run, ...] = (),
) -> StepRecord:
    """Record one step (forward, loss, backward) on fake tensors.

    Whatever is applied to the model is executed as it is, so an applied plan is priced exactly. The model is left as
    it was.

    Args:
        step: The step. Its model and batch are real; they are not read beyond small integers.
        accumulation: Let gradients exist from the beginning, as when accumulating over several batches.
        round_to: Allocation granularity in bytes.
        scratch: Measures what operators allocate inside themselves.
        forward_only: As for `record_step`.
        planned: Whether a plan is applied to the model.
        ranks: How the model is divided over processes: the step is then that of one of them.
        card: The card whose operators are recorded, though tensors are fake ones of the CPU; None is the CPU itself.
        runs: Runs of identical blocks, of which most are not run but written into the record.

    Raises:
        NotAlikeError: These blocks' part of the record cannot be known without running them.
        DryRunError: The model does something that fake tensors cannot follow, such as `.item()` on an activation.
    """

    def record(fake_step: Step) -> StepRecord:
        return record_step(
            fake_step,
            accumulation=accumulation,
            round_to=round_to,
            scratch=scratch,
            forward_only=forward_only,
            planned=planned,
            is_sharded=ranks is not None,
            runs=runs,
        )

    # Gradients that exist from the beginning are fake ones, of fake parameters.
    unused = frozenset[int]() if accumulation else _inside(step.model, runs)
    with _no_collection(), _quiet():
        try:
            with nullcontext() if card is None else recorded_as(card):
                return on_fakes(step, record, ranks=ranks, unused=unused)
        except (BatchError, DisturbedError, NotAlikeError):
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DryRunError(f"{type(step.model).__name__} cannot run on fake tensors: {reason}") from error


def _inside(model: nn.Module, runs: tuple[Run, ...]) -> frozenset[int]:
    """Return the identities of blocks that are left out, and of the modules inside of them."""
    blocks = (model.get_submodule(name) for run in runs for name in run.left_out)
    return frozenset(id(module) for block in blocks for module in block.modules())


def record_step(
    step: Step,
    *,
    accumulation: bool = False,
    round_to: int = 1,
    scratch: ScratchMeter | None = None,
    forward_only: bool = False,
    planned: bool = False,
    is_sharded: bool = False,
    runs: tuple[Run, ...] = (),
) -> StepRecord:
    """Record one step on whatever tensors the model and the batch are made of.

    Args:
        step: The step.
        accumulation: Let gradients exist from the beginning.
        round_to: Allocation granularity in bytes.
        scratch: Measures what operators allocate inside themselves.
        forward_only: Run forward and loss alone and let autograd save nothing; storages then die when Python and the
            operators let go of them.
        planned: Leave saving to the segments applied to the model; who saves what is then not noted.
        is_sharded: Hooks gather the model's parameters, and belong to the calls they are around.
        runs: As for `dry_run`.
    """
    model = step.model
    device = next(model.parameters()).device
    recorder = Recorder(round_to=round_to, device=device, stream=device_of(device).current_stream, scratch=scratch)
    for name, parameter in model.named_parameters():
        recorder.identify(parameter, "parameter", name)
    for name, parameter in step.trained() if accumulation else ():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            recorder.identify(parameter.grad, "gradient", name)
    for name, buffer in model.named_buffers():
        recorder.identify(buffer, "buffer", name)
    for tensor in step.tensors():
        recorder.identify(tensor, "batch")
    fixed = len(recorder.lives)
    with recorder, recorder.watch(model, step.repeatable_hooks, around_hooks=is_sharded), left_out(model, runs):
        saving = nullcontext() if planned else recorder.saving(drop=forward_only)
        with saving, torch.enable_grad():
            output = step.forward()
            recorder.forward_stop = recorder.count
            recorder.loss_is_assumed = step.loss is None and carried_loss(output) is None
            loss = step.loss_of(output)
        recorder.loss_stop = recorder.count
        if not step.holds_output:
            del output
        if not forward_only:
            loss.backward()
        for name, parameter in step.trained():
            if parameter.grad is not None:
                recorder.became_gradient(parameter.grad, name)
    record = recorder.finish()
    if runs:
        record = lengthened(Shortened(record=record, met=tuple(recorder.met), fixed=fixed), runs)
    return record if scratch is None else scratch.fill_in(record)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging an operator's failure on fake tensors: it is reported as a `DryRunError`."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's cycle collector out, so that storages die when their last reference goes and not at random."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
