"""What a planned module carries: objects that stand at its calls and begin and end segments there.

They are objects, not closures, and refer to their model: a deep copy or an unpickled copy of the model gets its own,
which run the copy's weights. A copy of a part of the model without its root runs as if it had no plan.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from ..errors import ApplyError
from .internals import CALL_METHOD, REPLICATE_METHOD, compiler_callback, uncompiled
from .loop import begin_runs
from .packing import Inputs
from .planned import Planned
from .region import OneCall
from .thread_state import ThreadState, ThreadStates
from .traced import Traced, TracedCall, TracedFirst


class _NotScriptableError(ApplyError, AttributeError):
    """What stands at a planned call has no source for torch.jit.script; others may ask whether it has."""


class StandIn:
    """Stand on a module instance in place of a method of its class, and let go of the plan in a copy of only a part.

    Args:
        planned: The planned model.
        key: The module's number.
        module: The module.
    """

    method: ClassVar[str]

    def __init__(self, planned: Planned, key: int, module: nn.Module) -> None:
        self.planned: Planned | None = planned
        self.key = key
        self.module = module
        # Another tool may have put one of its own on the instance; it stays inside.
        self.previous: Callable[..., Any] | None = module.__dict__.get(self.method)
        module.__dict__[self.method] = self.forward

    @property
    def forward(self) -> Any:
        """What stands on the instance."""
        return self

    def take_off(self) -> None:
        """Put back what was there; where another tool has wrapped this meanwhile it stays, and only passes on."""
        self.planned = None
        placed = self.module.__dict__.get(self.method)
        if placed is self or (isinstance(placed, MethodType) and placed.__self__ is self):
            del self.module.__dict__[self.method]
            if self.previous is not None:
                self.module.__dict__[self.method] = self.previous

    def original(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method that would run without a plan."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        # Looked up at each call: fully_shard exchanges a module's class after the plan is applied.
        # Not as a bound method: the compiler would look that up on the module again and find this object.
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

    @property
    def bound(self) -> Callable[..., Any]:
        """What `original` runs now, as an object."""
        return self.previous or MethodType(getattr(type(self.module), self.method), self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.bound)

    def __getattr__(self, name: str) -> Any:
        if name == "__globals__" and self.planned is not None:
            raise _NotScriptableError(
                "torch.jit.script reads a model's source, and cannot read a planned one's: remove() the plan before "
                "scripting, or trace, export or compile the model instead"
            )
        if name in ("__code__", "__func__", "__self__", "__name__", "__qualname__", "__wrapped__"):
            return getattr(self.bound, name)
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        part = self.planned is None or id(self.planned.root) not in memo
        for name, value in vars(self).items():
            twin.__dict__[name] = None if name == "planned" and part else copy.deepcopy(value, memo)
        return twin


def _method(stand_in: PlannedForward, owner: type[nn.Module]) -> MethodType:
    """Make a bound method of what stands in for the forward of a module of a class.

    Of a bound method on the instance the compiler compares the code, else the object: so alike blocks share what is
    compiled once.
    """

    def forward(bound: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(bound, nn.Module):
            # Another tool has taken the function and bound it to the module.
            return type(bound).forward(bound, *args, **kwargs)
        return bound(*args, **kwargs)

    forward.__dict__["__signature__"] = inspect.signature(owner.forward)
    return MethodType(forward, stand_in)


def _unpickled(kind: type[PlannedForward], owner: type[nn.Module] | None) -> PlannedForward:
    stand_in = object.__new__(kind)
    stand_in.owner = owner
    return stand_in


def stand_in_at(module: nn.Module) -> PlannedForward | None:
    """Return what stands for a plan, in force or not, in place of a module's forward."""
    placed = module.__dict__.get(PlannedForward.method)
    stand_in = getattr(placed, "__self__", None) if isinstance(placed, MethodType) else placed
    return stand_in if isinstance(stand_in, PlannedForward) else None


class PlannedForward(StandIn):
    """Stand in for a module's forward: count the call, and run it as a segment where the plan says so.

    Args:
        planned: The planned model.
        key: The module's number.
        module: The module.
        counted: Whether this counts the module's calls; a `MemberCall` does where there is one.
        scope: Whether runs may be open in the module's own loop.
        single: Whether segments of one call begin here.
        traced: What to do while the compiler traces the call.
    """

    method = "forward"

    def __init__(
        self,
        planned: Planned,
        key: int,
        module: nn.Module,
        *,
        counted: bool,
        scope: bool,
        single: bool,
        traced: Traced | None,
    ) -> None:
        self.owner = None if module is planned.root or self.method in module.__dict__ else type(module)
        super().__init__(planned, key, module)
        self.counted = counted
        self.scope = scope
        # A member's forward is then of interest to the compiler only.
        self.passive = not (counted or scope or single)
        self.traced = traced

    @property
    def forward(self) -> Any:
        """What stands on the instance: in a part whose class's own it was a bound method, pickled by this name."""
        return self if self.owner is None else _method(self, self.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        # The method may be asked for before the rest of this is there: they are in a cycle.
        return _unpickled, (type(self), self.owner), vars(self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, as a segment where one is planned for this call."""
        planned = self.planned
        if planned is None:
            return self.original(*args, **kwargs)
        if is_dynamo_compiling():
            # What is exported is the model's function; a checkpoint would only stand in the exporter's way.
            if self.traced is None or is_exporting() or not planned.traced_in_force():
                return self.original(*args, **kwargs)
            return self.traced(self.original, args, kwargs)
        if compiler_callback():
            if self.traced is None or not planned.traced_in_force():
                return self.original(*args, **kwargs)
            return _beside_compiler(self, planned.threads, args, kwargs)
        if self.passive:
            return self.original(*args, **kwargs)
        thread = planned.threads.here
        if thread.counts is not None:
            if torch.is_grad_enabled():
                return self._run(planned.threads, thread, args, kwargs)
            return self.original(*args, **kwargs)
        if not planned.in_force():
            return self.original(*args, **kwargs)
        if not self.scope:
            return self._run(planned.threads, thread, args, kwargs)
        planned.check_model()
        expected = planned.expected if self.module is planned.root else None
        if expected is not None:
            expected.begin_forward(self.module, args, kwargs)
        thread.counts, thread.cut = {}, []
        try:
            output = thread.scoped(None, self._run, (planned.threads, thread, args, kwargs), {})
            if expected is not None:
                expected.check_calls(thread.counts, thread.cut, planned.compiled.keys)
            return output
        finally:
            thread.counts = None

    def _run(self, threads: ThreadStates, thread: ThreadState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts, index = thread.counts, 0
        if counts is not None:
            if self.counted:
                index = counts.get(self.key, 0)
                counts[self.key] = index + 1
            else:
                index = counts.get(self.key, 1) - 1
        call = (self.key, index)
        loop = thread.loop
        if loop is not None and loop.leave_before(call):
            thread.loop = None
            if loop.runs:
                thread.loop = loop
                loop.resume()
        segment = thread.level.singles.get(call)
        body = self._in_scope if self.scope else self.original
        if segment is None:
            return body(*args, **kwargs)
        assert self.planned is not None
        if self.planned.expected is not None:
            self.planned.expected.check_precision()
        return OneCall(threads, thread, segment, Inputs(args, kwargs)).run(body, args, kwargs)

    def _in_scope(self, /, *args: Any, **kwargs: Any) -> Any:
        assert self.planned is not None
        return self.planned.threads.here.scoped(self.key, self.original, args, kwargs)


@uncompiled
def _beside_compiler(
    planned: PlannedForward, threads: ThreadStates, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what is traced elsewhere, where the compiler gave the frame up; neither it nor its replay is compiled."""
    traced = planned.traced
    assert traced is not None
    if not isinstance(traced, TracedCall):
        return traced(planned.original, args, kwargs)
    body = functools.partial(traced.body, planned.original)
    output = OneCall(threads, threads.here, traced.segment, Inputs(args, kwargs)).run(body, args, kwargs)
    if isinstance(traced, TracedFirst):
        traced.left = len(traced.later)
    return output


class MemberCall(StandIn):
    """Stand in for what a run's member does when called, hooks and all: count the call, note it, begin and end runs."""

    method = CALL_METHOD

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the member, as a step of the runs open around it."""
        planned = self.planned
        # The compiler has its own way with runs: see traced.py.
        if planned is None or is_dynamo_compiling() or compiler_callback():
            return self.original(*args, **kwargs)
        thread = planned.threads.here
        counts = thread.counts
        if counts is None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        call = (self.key, counts.get(self.key, 0))
        counts[self.key] = call[1] + 1
        loop = thread.loop
        if loop is not None:
            if loop.leads_inside(call):
                return self.original(*args, **kwargs)
            loop.pause()
        if call in planned.begins:
            if planned.expected is not None:
                planned.expected.check_precision()
            loop = begin_runs(planned.threads, loop, call, args, kwargs)
        thread.loop = None
        if loop is None:
            return self.original(*args, **kwargs)
        original = self.bound
        loop.begin_call(call, self, original, args, kwargs)
        output = original(*args, **kwargs)
        thread.loop = loop
        loop.end_call(output)
        if loop.runs:
            loop.resume()
        else:
            thread.loop = None
        return output


class Replication(StandIn):
    """Stand in for what DataParallel copies a model to another device by, and refuse."""

    method = REPLICATE_METHOD

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Copy the module, if no plan is in force.

        Raises:
            ApplyError: A plan is in force: the copies would run the original's weights.
        """
        if self.planned is None:
            return self.original(*args, **kwargs)
        raise ApplyError(
            "torch.nn.DataParallel copies a model at every step, and the copies would run the original's weights: "
            "use DistributedDataParallel, or remove() the plan"
        )
