"""Put a plan onto a model in place, and take it off again.

Nothing about the model changes but instance attributes `forward` and, on members of segments of several calls,
`_call_impl`, which a module's `__call__` runs: class, parameter names, state_dict and hooks stay. `remove` takes all of
it back.

A plan is about the root's forward. Calls are counted from the outermost planned call on the thread, which is the root
or, where a user calls a part directly, that part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import ApplyError
from ..plan import Plan, PlannedSegment
from .binding import Binding
from .expected import Expected
from .intercept import MemberCall, PlannedForward, Replication, StandIn, stand_in_at
from .planned import Planned


def apply(model: nn.Module, plan: Plan) -> Applied:
    """Apply a plan to its model, in place.

    Args:
        model: The model the plan was made for, not a wrapper of it.
        plan: The plan.

    Returns:
        The handle that takes the plan off again, also a context manager.

    Raises:
        PlanMismatchError: The model differs from the one planned for.
        ApplyError: A segment cannot be applied; nothing is changed then.
    """
    check_subject(model, plan)
    plan.check(model)
    if not plan.training:
        warnings.warn(
            "the plan was made with the model in eval mode and acts in eval mode only: for training, call "
            "model.train() and make the plan again",
            stacklevel=2,
        )
    applied = apply_segments(model, plan.segments, training=plan.training)
    applied.expect(plan)
    return applied


def check_subject(model: object, plan: object) -> None:
    """Check that a model and a plan are what they should be.

    Raises:
        ApplyError: They are not.
    """
    if not isinstance(model, nn.Module):
        raise ApplyError(f"model must be a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    if not isinstance(plan, Plan):
        raise ApplyError(
            f"plan must be a Plan, got {type(plan).__name__}: pass what plan() or Plan.load(path) returned"
        )


def apply_segments(model: nn.Module, segments: Iterable[PlannedSegment], *, training: bool = True) -> Applied:
    """Apply segments to a model, in place, without comparing a fingerprint.

    Args:
        model: The model.
        segments: Disjoint top-level segments.
        training: The root's training flag with which they are in force.

    Raises:
        ApplyError: A segment cannot be applied; nothing is changed then.
    """
    _refuse_second(model)
    _refuse_own_checkpointing(model)
    binding = Binding(model)
    top = binding.level(tuple(segments), None)
    return Applied(Planned(model, training, top, binding.modules, binding.replayed), binding)


class Applied:
    """A plan in force on a model."""

    def __init__(self, planned: Planned, binding: Binding) -> None:
        self._planned = planned
        self._binding = binding
        self._attached: list[StandIn] = []
        self._attach_all()

    def _attach_all(self) -> None:
        planned, binding = self._planned, self._binding
        planned.threads.top.mark(removed=False)
        for key, module in enumerate(binding.modules):
            member, scope = key in binding.members, key in binding.scopes
            single, traced = key in binding.singles, binding.traced.get(key)
            self._attached.append(
                PlannedForward(planned, key, module, counted=not member, scope=scope, single=single, traced=traced)
            )
            if member:
                self._attached.append(MemberCall(planned, key, module))
        self._attached.append(Replication(planned, -1, planned.root))
        planned.applied = self

    def expect(self, plan: Plan) -> None:
        """Tell the user, once, of a step that is not the one planned for."""
        self._planned.expected = Expected(plan, self._planned.threads.top.calls(), self.model)

    @property
    def model(self) -> nn.Module:
        """The model, the same object that was given."""
        return self._planned.root

    def remove(self) -> None:
        """Take the plan off; the model is as before it was applied. A second call does nothing.

        Graphs built under the plan can still run backward, if no segment has others inside; else backward says so.
        """
        self._planned.threads.top.mark(removed=True)
        for stand_in in self._attached:
            stand_in.take_off()
        self._attached = []
        self._planned.applied = None

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        count = len(self._planned.threads.top.begins)
        state = "" if self._attached else ", taken off"
        return f"<Applied: {count} segment{'' if count == 1 else 's'} on {type(self.model).__name__}{state}>"


def applied_to(model: nn.Module) -> Applied | None:
    """Return the plan in force on a model, as `apply` returned it; a copy of a planned model has one of its own."""
    for module in model.modules():
        found = stand_in_at(module)
        if found is not None and found.planned is not None and found.planned.root is model:
            return found.planned.applied
    return None


@contextmanager
def unplanned(model: nn.Module) -> Iterator[Applied | None]:
    """Take the plan in force on a model off while inside, and put the same one back on leaving.

    Yields what `apply` returned, or None where no plan is in force.

    Raises:
        ApplyError: A plan is in force on a part of the model.
    """
    applied = applied_to(model)
    if applied is None:
        _refuse_second(model)
        yield None
        return
    applied.remove()
    try:
        yield applied
    finally:
        applied._attach_all()  # pyright: ignore[reportPrivateUsage]


def _refuse_second(model: nn.Module) -> None:
    for name, module in model.named_modules():
        placed = stand_in_at(module)
        # What a copy of a part of a planned model carries only passes on.
        if placed is not None and placed.planned is not None:
            raise ApplyError(
                f"a plan is already applied (module {name or '(root)'!r}); call remove() on what apply returned, first"
            )


def _refuse_own_checkpointing(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ApplyError(
                f"module {name or '(root)'!r} has its own gradient checkpointing switched on; the two do not stack: "
                "call model.gradient_checkpointing_disable() before apply"
            )
