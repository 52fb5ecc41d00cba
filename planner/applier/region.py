"""One execution of a segment: torch's checkpoint around it, and what a replay must find as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from operator import attrgetter
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from ...profiler.contexts import own_context
from ..errors import ApplyError, ReplayStateError
from .internals import (
    ambient_settings,
    buffers_of,
    checkpoint_debug_is_on,
    differentiated_by_function,
    in_ddp_forward,
    parametrizations_are_cached,
    set_ambient,
    versions_of,
)
from .keeping import Take
from .packing import Inputs, rebuild_call, refuse_iterators
from .state import State
from .thread_state import BoundSegment, ThreadState, ThreadStates
from .told import by_attributes

_NO_COUNTS: dict[int, int] = {}
_training = attrgetter("training")


class Region:
    """What surrounds a segment's body in torch's non-reentrant checkpoint, in forward and in a replay.

    `prepare` comes before the checkpoint begins and `begun` right after; `end` comes behind it, or `drop` where there
    was an exception. A region lives as long as the graph that saved into it. It keeps no tensor but through torch's
    own saved inputs.
    """

    __slots__ = (
        *("_ambient", "_broadcast", "_context", "_counts", "_flags", "_held", "_inputs", "_objects"),
        *("_state", "_take", "_watched", "_versions", "outer", "segment", "thread", "threads"),
    )

    def __init__(self, threads: ThreadStates, thread: ThreadState, segment: BoundSegment, inputs: Inputs) -> None:
        self.threads = threads
        # The state of the thread that runs forward; a replay may come in another one.
        self.thread = thread
        self.segment = segment
        self.outer = thread.level
        self._inputs: Inputs | None = inputs
        self._state: State | None = None
        self._held: list[torch.Tensor] = []
        self._take: Take | None = None

    def again(self, *tensors: torch.Tensor) -> None:
        """Run the segment once more from its inputs' tensors."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Refuse what cannot be replayed, and note what a replay must find as it is now."""
        thread, segment, inputs = self.thread, self.segment, self._inputs
        assert inputs is not None
        if checkpoint_debug_is_on() or parametrizations_are_cached() or differentiated_by_function():
            _refuse_modes(segment)
        if inputs.objects:
            refuse_iterators(inputs.objects, segment.where)
        self._objects = by_attributes(inputs.objects) if inputs.objects else None
        self._versions = versions_of(inputs.tensors)
        self._flags = list(map(_training, segment.modules))
        self._ambient = ambient_settings()
        self._context = copy_context()
        self._counts = _NO_COUNTS if thread.counts is None or not segment.inside.begins else thread.counts.copy()

    def begun(self) -> None:
        """Let the segments inside begin, and hold the buffers that a replay is given."""
        segment = self.segment
        self.thread.level = segment.inside
        if segment.buffers:
            self._held = self._clone([buffers_of(module)[name] for module, name in segment.buffers])

    def end(self) -> None:
        """Note what forward saw.

        Raises:
            ApplyError: The segment changed what it was given, so a replay would not see what forward saw.
        """
        inputs = self._inputs
        assert inputs is not None
        self.drop()
        self._check_inputs(inputs)
        self._state, self._watched = self.segment.watched.now()
        self._broadcast = in_ddp_forward()

    def drop(self) -> None:
        """Let go of the inputs, and let what may begin around the region begin again."""
        self._inputs = None
        self.thread.level = self.outer

    def contexts(self) -> tuple[Any, Any]:
        """Make the forward and the replay context of the segment's save set."""
        assert self.segment.save is not None
        keep, self._take = self.segment.save.contexts(self.threads)
        return keep, self._take

    def _check_inputs(self, inputs: Inputs) -> None:
        where = self.segment.where
        versions = versions_of(inputs.tensors)
        if versions != self._versions:
            changed = list(map(int.__eq__, versions, self._versions)).index(False)
            raise ApplyError(
                f"segment {where}: an input of shape {list(inputs.tensors[changed].shape)} was changed in place inside "
                "the segment, so a replay would start from the changed values; plan with the segment's start moved "
                "past that operator, or make it out of place (inplace=False)"
            )
        if self._objects is not None and by_attributes(inputs.objects) != self._objects:
            kinds = ", ".join(sorted({type(value).__name__ for value in inputs.objects}))
            raise ApplyError(
                f"segment {where}: an argument object ({kinds}) was changed inside the segment, and a replay would "
                "change it again; for a key-value cache put use_cache=False into the batch (or set "
                "model.config.use_cache = False), else plan without this segment"
            )

    def replay(self, *tensors: torch.Tensor) -> None:
        """Run the body once more as forward ran it, and leave everything as it is.

        Raises:
            ReplayStateError: It would not compute what forward computed.
        """
        if self.segment.removed and self.segment.inside.begins:
            raise ReplayStateError(
                f"segment {self.segment.where}: the plan was removed between forward and backward, and the segments "
                "inside this one are gone; run backward before remove()"
            )
        if self._state is None:
            raise ReplayStateError(
                f"segment {self.segment.where}: backward came while its forward was still running (autograd.grad in "
                "the loop around it?); plan again with the loss as it is now, or without this segment"
            )
        state, _ = self.segment.watched.now()
        if state != self._state:
            self.segment.watched.refuse_change(self._state, state, broadcast=self._broadcast)
        flags = list(map(_training, self.segment.modules))
        ambient = ambient_settings()
        buffers = self.segment.buffers
        originals = [(m, name, buffers_of(m)[name]) for m, name in buffers] if buffers else ()
        remade = [(m, name, vars(m)[name]) for m, name in self.segment.remade if name in vars(m)]
        try:
            if flags != self._flags:
                _set_flags(self.segment, self._flags)
            if ambient != self._ambient:
                set_ambient(self._ambient)
            if originals:
                for (module, name), value in zip(buffers, self._clone(self._held), strict=True):
                    buffers_of(module)[name] = value
            with own_context(self._context):
                if self._take is None:
                    self._run_again(*tensors)
                else:
                    self._take.run(self._run_again, tensors)
        finally:
            for module, name, value in originals:
                buffers_of(module)[name] = value
            for module, name, value in remade:
                vars(module)[name] = value
            if ambient != self._ambient:
                set_ambient(ambient)
            if flags != self._flags:
                _set_flags(self.segment, flags)

    def _run_again(self, *tensors: torch.Tensor) -> None:
        self.threads.here.replay(self.segment.inside, self._counts, self.again, tensors)

    def _clone(self, values: list[Any]) -> list[torch.Tensor]:
        if any(value is None for value in values):
            names = ", ".join(name for _, name in self.segment.buffers)
            raise ApplyError(
                f"segment {self.segment.where}: one of its buffers {names} is None since the plan was applied; call "
                "remove() before such a change and make the plan again"
            )
        thread = self.threads.here
        outer, thread.uncounted = thread.uncounted, True
        try:
            return [value.detach().clone() for value in values]
        finally:
            thread.uncounted = outer


class OneCall(Region):
    """A region around one call of a module's forward, in torch's public checkpoint; the module's hooks stay outside."""

    __slots__ = ("_call", "_forward", "_template")

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward inside the region and return its output."""
        inputs = self._inputs
        assert inputs is not None
        self._template = inputs.template
        self._forward = forward
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        options: dict[str, Any] = {"early_stop": self.segment.early_stop}
        if self.segment.save is not None:
            options["context_fn"] = self.contexts
        thread = self.thread
        loop, thread.loop = thread.loop, None
        try:
            self.prepare()
            output = checkpoint(self._body, *inputs.tensors, use_reentrant=False, **options)
        except BaseException as error:
            self.drop()
            if isinstance(error, _StoppedError):
                raise error.stop from None
            raise
        finally:
            thread.loop = loop
        self.end()
        return output

    def _body(self, *tensors: torch.Tensor) -> Any:
        """Call the forward with what it was given; every time after that, replay it."""
        call, self._call = self._call, None
        if call is None:
            return self.replay(*tensors)
        self.begun()
        open_runs = self.thread.open
        opened = len(open_runs)
        try:
            output = self._forward(*call[0], **call[1])
            while len(open_runs) > opened:
                open_runs[-1].leave()
        except BaseException as error:
            while len(open_runs) > opened:
                open_runs[-1].abandon()
            if isinstance(error, StopIteration):
                raise _StoppedError(error) from None
            raise
        return output

    def again(self, *tensors: torch.Tensor) -> None:
        """Call the forward again."""
        args, kwargs = rebuild_call(self._template, tensors)
        self._forward(*args, **kwargs)


class _StoppedError(Exception):
    """Carry a forward's StopIteration through torch's checkpoint, a generator of which would make another of it."""

    def __init__(self, stop: StopIteration) -> None:
        super().__init__()
        self.stop = stop


def _refuse_modes(segment: BoundSegment) -> None:
    """Refuse what torch would refuse without a name, or only in backward."""
    if differentiated_by_function():
        raise ApplyError(
            f"segment {segment.where}: transforms of torch.func (grad, vmap, jvp and so on) and forward-mode "
            "derivatives do not reach into a replay: remove() the plan before them, or call backward() instead"
        )
    if segment.save is not None and checkpoint_debug_is_on():
        raise ApplyError(
            f"segment {segment.where}: torch's debug mode for checkpoints (set_checkpoint_debug_enabled) does not work "
            "with a save set: leave it, or plan with save_sets=False"
        )
    if parametrizations_are_cached() and any(map(parametrize.is_parametrized, segment.modules)):
        raise ApplyError(
            f"segment {segment.where}: it has parametrized weights, and inside parametrize.cached() a replay would not "
            "compute them as forward does: leave the context, or remove() the plan"
        )


def _set_flags(segment: BoundSegment, flags: list[bool]) -> None:
    for module, flag in zip(segment.modules, flags, strict=True):
        module.training = flag
