"""Execute a whole step on fake tensors: the exact memory of a step without the memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .devices import device_of
from .internals import FakeTensorMode, tensor_registries
from .preserve import preserved
from .recorder import SMALL_NUMEL, Recorder
from .scratch import ScratchMeter
from .step import BatchError, Step, carried_loss
from .step_record import StepRecord


class DryRunError(RuntimeError):
    """Raised when a model's forward or backward cannot run on fake tensors."""


@contextmanager
def faked(step: Step) -> Iterator[tuple[Step, FakeTensorMode]]:
    """Replace parameters, buffers and batch by fake tensors while inside; put everything back on leaving.

    Small integer and boolean tensors stay real (copies), since forwards look at their values to choose a path.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            small = not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= SMALL_NUMEL
            fakes[id(tensor)] = tensor.clone() if small else mode.from_tensor(tensor, static_shapes=True)
        return fakes[id(tensor)]

    with preserved(step.model):
        try:
            for module in step.model.modules():
                for registry in tensor_registries(module):
                    for name, tensor in list(registry.items()):
                        if tensor is not None:
                            replaced.append((registry, name, tensor))
                            registry[name] = fake(tensor)
                for value in vars(module).values():
                    # Recurrent layers keep a list of their weights beside the registry; `preserved` puts it back.
                    if isinstance(value, list):
                        value[:] = [fakes.get(id(item), item) for item in value]
            yield step.map_tensors(fake), mode
        finally:
            for registry, name, tensor in replaced:
                registry[name] = tensor


def dry_run(
    step: Step,
    *,
    accumulation: bool = False,
    round_to: int = 1,
    scratch: ScratchMeter | None = None,
    planned: bool = False,
) -> StepRecord:
    """Record one step (forward, loss, backward) on fake tensors.

    Whatever is applied to the model is executed as it is, so an applied plan is priced exactly. The model is left as
    it was.

    Args:
        step: The step. Its model and batch are real; they are not read beyond small integers.
        accumulation: Let gradients exist from the beginning, as when accumulating over several batches.
        round_to: Allocation granularity in bytes.
        scratch: Measures what operators allocate inside themselves.
        planned: Whether a plan is applied to the model.

    Raises:
        DryRunError: The model does something that fake tensors cannot follow, such as `.item()` on an activation.
    """
    with faked(step) as (fake_step, mode), _no_collection(), _quiet():
        try:
            with mode:
                return record_step(
                    fake_step, accumulation=accumulation, round_to=round_to, scratch=scratch, planned=planned
                )
        except (BatchError, DryRunError):
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DryRunError(f"{type(step.model).__name__} cannot run on fake tensors: {reason}") from error


def record_step(
    step: Step,
    *,
    accumulation: bool = False,
    round_to: int = 1,
    scratch: ScratchMeter | None = None,
    forward_only: bool = False,
    planned: bool = False,
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
    """
    model = step.model
    device = next(model.parameters()).device
    recorder = Recorder(round_to=round_to, device=device, stream=device_of(device).current_stream, scratch=scratch)
    for name, parameter in model.named_parameters():
        recorder.identify(parameter, "parameter", name)
        if accumulation and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            recorder.identify(parameter.grad, "gradient", name)
    for name, buffer in model.named_buffers():
        recorder.identify(buffer, "buffer", name)
    for tensor in step.tensors():
        recorder.identify(tensor, "batch")
    with recorder, recorder.watch(model):
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
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                recorder.became_gradient(parameter.grad, name)
    record = recorder.finish()
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
