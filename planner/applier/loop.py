"""Segments of several calls: open while the parent's own loop runs, recorded as it goes, replayed from the record.

A parent's loop calls the members, and may run operators of its own in between. Between two members a torch function
mode records those operators. During a member it is off: the member's call is one step, whatever happens inside.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import ApplyError, ReplayStateError
from .internals import (
    checkpoint_generator,
    function_mode_count,
    insert_function_mode,
    remove_function_mode,
    save_beneath,
    top_hooks,
    versions_of,
)
from .packing import Inputs, tensors_in
from .region import Region
from .tape import Tape
from .thread_state import BoundSegment, CallKey, ThreadStates

_STOPPED = object()


class Run(Region):
    """A region over several calls that one loop makes.

    It begins in one call and ends in another, which torch's public checkpoint cannot, but its generator can.
    """

    __slots__ = ("_generator", "_hooks", "loop", "tape")

    def begin(self, loop: Loop) -> None:
        """Begin the region, with the first member about to be called."""
        inputs = self._inputs
        assert inputs is not None
        self.loop = loop
        self.tape = Tape(self.segment.where, inputs, self._capture)
        self._generator: Generator[None, None, None] | None = None
        segment = self.segment
        try:
            self.prepare()
            self._generator = checkpoint_generator(
                self.replay, self.contexts if segment.save else None, segment.early_stop, inputs.tensors
            )
            next(self._generator)
            self.begun()
            hooks = top_hooks()
            if hooks is None:
                raise ApplyError(
                    f"segment {segment.where}: saved-tensor hooks have no effect here, so it cannot be "
                    "checkpointed (aot_function or another tracer around the model?); remove() the plan while tracing"
                )
        except BaseException:
            self.abandon()
            raise
        if segment.inside.begins:
            # The first member is called again in a replay, and then counted again.
            key, index = segment.calls[0]
            self._counts[key] = index
        self._hooks = hooks
        loop.runs.append(self)
        self.thread.open.append(self)

    def leave(self) -> None:
        """End the region with what was recorded so far; a longer loop than planned stays exact."""
        if self.loop.in_member:
            raise ApplyError(
                f"segment {self.segment.where}: a member raised an exception that its parent caught; "
                "a replay cannot repeat that, so plan without this segment"
            )
        try:
            self._take_out()
        except BaseException:
            # It is in no list of open runs any more: nobody else would close it.
            self.loop.drop()
            self._close()
            raise
        generator = self._generator
        assert generator is not None
        self.thread.level = self.outer
        try:
            stopped = next(generator, _STOPPED) is _STOPPED
        finally:
            generator.close()
            self._generator = None
        assert stopped
        self.end()

    def abandon(self) -> None:
        """Drop the region after an exception."""
        try:
            if self in self.thread.open:
                self.thread.open.remove(self)
                self.loop.runs.remove(self)
                self.tape.forget()
                del self._hooks
                self.loop.drop()
        finally:
            self._close()

    def _close(self) -> None:
        """Leave nothing of the region behind in torch's state."""
        generator, self._generator = self._generator, None
        self.drop()
        if generator is not None:
            generator.close()

    def _take_out(self) -> None:
        assert self.thread.open.pop() is self
        assert self.loop.runs.pop() is self
        self.tape.close()
        # They lead back here through the frame: a cycle would keep the region's inputs until the collector comes.
        del self._hooks
        self.loop.pause()

    def again(self, *tensors: torch.Tensor) -> None:
        """Run the recorded steps again."""
        self.tape.replay(tensors)

    def _capture(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Hold a tensor from outside as torch holds a region's inputs: in the surrounding frame, with its version.

        That frame counts what is saved in it, and a replay must save as many. So what has no gradient is held here: a
        table that is made at its first use comes from inside in that forward, and from outside in its replay.
        """
        if isinstance(tensor, nn.Parameter):
            return lambda: tensor
        if tensor.requires_grad:
            return save_beneath(self._hooks, tensor)
        return partial(_unchanged, tensor, versions_of([tensor]), self.segment.where)


def _unchanged(tensor: torch.Tensor, versions: list[int], where: str) -> torch.Tensor:
    if versions_of([tensor]) != versions:
        raise ReplayStateError(
            f"segment {where}: a tensor of shape {list(tensor.shape)} that it takes from outside was changed in place "
            "between forward and backward, so a replay would compute something else; change it out of place, or after "
            "backward"
        )
    return tensor


class Loop:
    """The loop of one parent while runs of its calls are open; outer runs come first.

    Attributes:
        runs: The open runs that record this loop's steps.
        call: The member call in progress or last made.
        in_member: Whether a member call is in progress.
    """

    __slots__ = ("_height", "_mode", "_recording", "call", "in_member", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.call: CallKey = (-1, 0)
        self.in_member = False
        self._mode = _Between(self)
        self._height = -1
        self._recording = False

    def resume(self) -> None:
        """Record the operators that the parent runs from here on."""
        if self._height < 0:
            self._height = function_mode_count()
        # Modes that the loop enters and leaves itself stay on top.
        self._recording = True
        insert_function_mode(self._mode, self._height)

    def pause(self) -> None:
        """Stop recording operators."""
        if not self._recording:
            return
        removed = remove_function_mode(self._mode)
        self._recording = False
        if not removed:
            raise ApplyError(
                f"segment {self.runs[0].segment.where if self.runs else ''}: a torch function mode (torch.device as a "
                "context?) was left between two of its members; plan each member as a segment of its own"
            )

    def drop(self) -> None:
        """Stop recording operators after an exception, wherever it came from."""
        self._recording = False
        remove_function_mode(self._mode)

    def begin_call(
        self,
        call: CallKey,
        member: Callable[..., Any],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Record that a member is about to run.

        Args:
            call: The member's call.
            member: What a replay calls where segments may begin in it.
            original: What it calls where none can.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
        """
        for run in self.runs:
            run.tape.record(member if run.segment.inside.begins else original, args, kwargs)
        self.call = call
        self.in_member = True

    def end_call(self, output: Any) -> None:
        """Record what the member returned, and end the runs it was the last member of."""
        self.in_member = False
        for run in self.runs:
            run.tape.finish(output)
        for position, run in enumerate(self.runs):
            if run.segment.calls[-1] == self.call:
                self.leave_from(position)
                break

    def leave_from(self, position: int) -> None:
        """End the runs from a position on, the innermost first."""
        for run in reversed(self.runs[position:]):
            run.leave()

    def leave_before(self, call: CallKey) -> bool:
        """End the runs beside which, and not inside which, a segment beginning with this call is planned.

        Returns:
            Whether any was ended.
        """
        for position in reversed(range(len(self.runs))):
            run = self.runs[position]
            if call in run.outer.begins:
                run.thread.cut += [other.segment.where for other in self.runs[position:]]
                self.leave_from(position)
                return True
            if call in run.segment.inside.begins:
                return False
        return False

    def leads_inside(self, call: CallKey) -> bool:
        """Return whether what a call makes are the open runs' members, and not the call itself.

        Elsewhere, in another pass through the same modules, the plan may name such a call whole.
        """
        return bool(self.runs) and all(
            call[0] in run.segment.around and call not in run.segment.calls for run in self.runs
        )

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, output: Any, changed: list[Any]) -> None:
        """Record an operator that the parent ran."""
        for run in self.runs:
            for tensor in changed:
                if run.tape.is_external(tensor):
                    name = getattr(function, "__name__", str(function))
                    raise ApplyError(
                        f"segment {run.segment.where}: {name} between its members changes in place a tensor of shape "
                        f"{list(tensor.shape)} from outside the segment, which a replay would do twice; "
                        "make it out of place, or plan each member as a segment of its own"
                    )
            run.tape.record(function, args, kwargs, gradients=torch.is_grad_enabled())
            run.tape.finish(output)


class _Between(TorchFunctionMode):
    """Hand every torch function that makes or changes a tensor to the loop's record."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        versions = versions_of(given)
        output = func(*args, **kwargs)
        changed = [t for t, before, after in zip(given, versions, versions_of(given), strict=True) if before != after]
        if getattr(func, "__name__", "") == "__set__":
            changed = given[:1]
        identities = {id(tensor) for tensor in given}
        # Tensors of inference mode have no versions that would tell of a change.
        untold = any(tensor.is_inference() for tensor in given)
        if changed or untold or any(id(tensor) not in identities for tensor in tensors_in(output)):
            self._loop.record(func, args, kwargs, output, changed)
        return output


def begin_runs(
    threads: ThreadStates, loop: Loop | None, call: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Loop | None:
    """Begin every run whose first member's call this is, outer ones first, and return the loop it belongs to.

    Args:
        threads: The planned model's state in each thread.
        loop: The loop that the call is made in, paused, or None outside of one.
        call: The call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    thread = threads.here
    if loop is not None:
        loop.leave_before(call)
        loop = loop if loop.runs else None
    segment: BoundSegment | None = thread.level.runs.get(call)
    while segment is not None:
        loop = loop or Loop()
        Run(threads, thread, segment, Inputs(args, kwargs)).begin(loop)
        segment = thread.level.runs.get(call)
    return loop
