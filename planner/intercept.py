"""What a planned module carries: objects that stand at its calls and begin and end segments there.

They are objects, not closures, and refer to their model: a deep copy or an unpickled copy of the model gets its own,
which run the copy's weights. A copy of a part of the model without its root runs as if it had no plan.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .loop import begin_runs
from .packing import Inputs
from .region import OneCall
from .session import Level, Session, Sessions


class Planned:
    """The planned model that the objects at its modules share.

    Attributes:
        root: The model.
        training: The root's training flag with which the plan is in force.
        sessions: The state of each thread.
    """

    def __init__(self, root: nn.Module, training: bool, top: Level) -> None:
        self.root = root
        self.training = training
        self.sessions = Sessions(top)

    def in_force(self, session: Session) -> bool:
        """Return whether a call made now is to be checkpointed."""
        return torch.is_grad_enabled() and (
            session.replaying or (self.root.training is self.training and not torch.is_inference_mode_enabled())
        )


class _Attached:
    """Something at a module that knows the planned model, and lets go of it in a copy of only a part."""

    def __init__(self, planned: Planned, key: int) -> None:
        self.planned: Planned | None = planned
        self.key = key

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        part = self.planned is None or id(self.planned.root) not in memo
        for name, value in vars(self).items():
            twin.__dict__[name] = None if name == "planned" and part else copy.deepcopy(value, memo)
        return twin


class PlannedForward(_Attached):
    """Stand in for a module's forward: count the call, and run it as a segment where the plan says so.

    Args:
        planned: The planned model.
        key: The module's number.
        module: The module.
        counted: Whether this counts the module's calls; a `BeforeMember` does where there is one.
        scope: Whether runs may be open in the module's own loop.
    """

    def __init__(self, planned: Planned, key: int, module: nn.Module, *, counted: bool, scope: bool) -> None:
        super().__init__(planned, key)
        self.module = module
        # Another tool may have put a forward of its own on the instance; it stays inside.
        self.previous: Callable[..., Any] | None = module.__dict__.get("forward")
        self.counted = counted
        self.scope = scope

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that would run without a plan."""
        if self.previous is not None:
            return self.previous
        # Looked up at each call: fully_shard exchanges a module's class after the plan is applied.
        return type(self.module).forward.__get__(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name in ("__func__", "__self__", "__name__", "__qualname__", "__wrapped__"):
            return getattr(self.original, name)
        raise AttributeError(name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, as a segment where one is planned for this call."""
        planned = self.planned
        if planned is None:
            return self.original(*args, **kwargs)
        session = planned.sessions.here
        if not planned.in_force(session):
            return self.original(*args, **kwargs)
        if session.counts is not None or not self.scope:
            return self._run(planned.sessions, session, args, kwargs)
        session.counts = {}
        try:
            return self._run(planned.sessions, session, args, kwargs)
        finally:
            session.counts = None

    def _run(self, sessions: Sessions, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts, index = session.counts, 0
        if counts is not None:
            if self.counted:
                index = counts.get(self.key, 0)
                counts[self.key] = index + 1
            else:
                index = counts.get(self.key, 1) - 1
        call = (self.key, index)
        loop = session.loop
        if loop is not None and loop.leave_before(call):
            session.loop = None
            if loop.runs:
                session.loop = loop
                loop.resume()
        segment = session.level.singles.get(call)
        body = self._in_scope if self.scope else self.original
        if segment is None:
            return body(*args, **kwargs)
        return OneCall(sessions, session, segment, Inputs(args, kwargs)).run(body, args, kwargs)

    def _in_scope(self, /, *args: Any, **kwargs: Any) -> Any:
        assert self.planned is not None
        return self.planned.sessions.here.scoped(self.original, args, kwargs)


class BeforeMember(_Attached):
    """A forward pre-hook of a run's member: count the call, begin runs, note the arguments before other hooks."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a member is about to run."""
        planned = self.planned
        if planned is None or torch.compiler.is_compiling():
            return
        session = planned.sessions.here
        if session.counts is None:
            return
        if not planned.in_force(session):
            session.suspended.append(None)
            return
        index = session.counts.get(self.key, 0)
        session.counts[self.key] = index + 1
        loop = begin_runs(planned.sessions, (self.key, index), args, kwargs)
        if loop is not None:
            loop.begin_call(module, args, kwargs)
        session.suspended.append(loop)
        session.loop = None


class AfterMember(_Attached):
    """A forward hook of a run's member: note the output after other hooks, and end runs."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note what a member returned."""
        planned = self.planned
        if planned is None or torch.compiler.is_compiling():
            return
        session = planned.sessions.here
        if session.counts is None:
            return
        loop = session.suspended.pop()
        session.loop = loop
        if loop is None:
            return
        loop.end_call(output)
        if loop.runs:
            loop.resume()
        else:
            session.loop = None
