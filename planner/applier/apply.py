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
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from ...profiler.repeatable import remade_by
from ..errors import ApplyError
from ..plan import Call, Plan, PlannedSegment
from .expected import Expected
from .intercept import MemberCall, Planned, PlannedForward, Replication, StandIn
from .internals import buffers_of, forward_hook_registries, has_forward
from .reads import Reads, what_decides
from .save_set import SaveSet
from .state import Watched
from .thread_state import NO_SCOPE, BoundSegment, CallKey, Level
from .traced import Traced, TracedCall, TracedFirst, TracedLater, Untraceable


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
    binding = _Binding(model)
    top = binding.level(tuple(segments), None)
    return Applied(Planned(model, training, top, binding.replayed), binding)


class Applied:
    """A plan in force on a model."""

    def __init__(self, planned: Planned, binding: _Binding) -> None:
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
        self._planned.expected = Expected(plan, self._planned.threads.top.calls())

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


def applied_to(model: nn.Module) -> Applied | None:
    """Return the plan in force on a model, as `apply` returned it; a copy of a planned model has one of its own."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PlannedForward) and forward.planned is not None and forward.planned.root is model:
            return forward.planned.applied
    return None


@contextmanager
def unplanned(model: nn.Module) -> Iterator[Applied | None]:
    """Take the plan in force on a model off while inside, and put the same one back on leaving.

    Yields what `apply` returned, or None where no plan is in force.
    """
    applied = applied_to(model)
    if applied is None:
        yield None
        return
    applied.remove()
    try:
        yield applied
    finally:
        applied._attach_all()  # pyright: ignore[reportPrivateUsage]


def _refuse_second(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), PlannedForward):
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


def _statistics(members: list[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the buffers that normalisation layers write in training, even if frozen at planning."""
    for member in members:
        for module in member.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                yield from ((module, name) for name, value in buffers_of(module).items() if value is not None)


class _Binding:
    """Resolve the names of a plan to the objects of a model, and find fault before anything is changed.

    Attributes:
        modules: Every module that needs something attached; a module's key is its position.
        members: Keys of members of runs.
        singles: Keys of modules that segments of one call are calls of.
        scopes: Keys of modules whose loops may hold runs, and of the root.
        traced: What modules with top-level segments do while the compiler traces them, by key.
        replayed: Modules that a replay calls, hooks and all, with their paths: all inside a segment, but not the member
            of a segment of one call.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._paths = {id(module): name for name, module in root.named_modules()}
        self._keys: dict[int, int] = {}
        self._reads: dict[frozenset[object], Reads] = {}
        self.modules: list[nn.Module] = []
        self.members: set[int] = set()
        self.singles: set[int] = set()
        self.scopes: set[int] = {self._key(root)}
        self.traced: dict[int, Traced] = {}
        self.replayed: dict[nn.Module, str] = {}

    def level(self, segments: tuple[PlannedSegment, ...], parent: PlannedSegment | None) -> Level:
        """Resolve segments that may begin beside one another."""
        level, taken = Level(), set[CallKey]()
        for planned in segments:
            segment = self._segment(planned, parent)
            twice = taken.intersection(segment.calls)
            if twice or len(set(segment.calls)) < len(segment.calls):
                raise ApplyError(
                    f"segment {segment.where}: a call is in two segments; segments must be disjoint or nested"
                )
            taken.update(segment.calls)
            level.add(segment)
        return level

    def _segment(self, planned: PlannedSegment, parent: PlannedSegment | None) -> BoundSegment:
        where = str(planned) if planned.members else "(empty)"
        if not planned.members:
            raise ApplyError(f"segment {where}: it has no members; name at least one call")
        members = [self._module(call, where) for call in planned.members]
        if parent is not None:
            self._check_inside(planned, parent, members, where)
        calls = tuple((self._key(m), call.index) for m, call in zip(members, planned.members, strict=True))
        if len(calls) > 1:
            self._admit_run(planned, members, calls, where)
        else:
            self.singles.update(key for key, _ in calls)
        inside = {module: self._paths[id(module)] for member in members for module in member.modules()}
        # The member of a segment of one call is not called again, only its forward.
        called = [module for module in inside if len(members) > 1 or module is not members[0]]
        hooked = [
            (module, made) for module in called for made in remade_by(forward_hook_registries(module)[1].values())
        ]
        restored = [self._buffer(name, where) for name in planned.restored_buffers]
        advanced = [(module, name) for module, made in hooked for name in made.advances]
        buffers = list(dict.fromkeys([*restored, *_statistics(members), *advanced]))
        remade = [(module, made.attribute) for module, made in hooked]
        watched = Watched(
            self._root, where, inside, restored=[*buffers, *remade], called=called, reads=self._reads_of(inside)
        )
        segment = BoundSegment(
            where=where,
            calls=calls,
            modules=list(inside),
            watched=watched,
            inside=self.level(planned.children, planned),
            save=SaveSet(planned.save, where) if planned.save else None,
            early_stop=planned.early_stop,
            buffers=buffers,
            remade=remade,
            scope=self._loop_of(planned) if len(calls) > 1 else NO_SCOPE,
        )
        if parent is None:
            self._trace(planned, segment, members)
            self.replayed.update((module, inside[module]) for module in called)
        return segment

    def _reads_of(self, modules: Iterable[nn.Module]) -> Reads:
        """Return what a replay of modules can read; alike blocks of one model share the answer."""
        modules = list(modules)
        key = what_decides(modules)
        if key not in self._reads:
            self._reads[key] = Reads.of(modules)
        return self._reads[key]

    def _trace(self, planned: PlannedSegment, segment: BoundSegment, members: list[nn.Module]) -> None:
        keys = [key for key, _ in segment.calls]
        if planned.crosses_operators and len(keys) > 1:
            refusal = Untraceable(
                f"segment {segment.where} holds operators of the parent between its members, which torch.compile "
                "cannot trace; plan without crossing operators, or do not compile the parent"
            )
            self.traced.update(dict.fromkeys(keys, refusal))
        elif len(keys) == 1:
            self.traced.setdefault(keys[0], TracedCall(segment))
        elif len(set(keys)) < len(keys) or any(key in self.traced for key in keys):
            refusal = Untraceable(
                f"segment {segment.where} holds calls of a module that is called several times, which torch.compile "
                "cannot tell apart; plan each call as a segment of its own"
            )
            self.traced.update(dict.fromkeys(keys, refusal))
        else:
            first = TracedFirst(segment, members[1:])
            self.traced.update(dict.fromkeys(keys[1:], TracedLater(first)))
            self.traced[keys[0]] = first

    def _admit_run(
        self, planned: PlannedSegment, members: list[nn.Module], calls: tuple[CallKey, ...], where: str
    ) -> None:
        for call, member in zip(planned.members, members, strict=True):
            if any(other is not member and member in set(other.modules()) for other in members):
                raise ApplyError(f"segment {where}: {call} is inside another member; members are calls of one parent")
        self.members.update(key for key, _ in calls)
        # Which ancestor's loop makes the calls cannot be told from names; all of them are watched.
        for call in planned.members:
            parts = call.module.split(".")
            around = [self._root.get_submodule(".".join(parts[:length])) for length in range(len(parts))]
            self.scopes.update(self._key(module) for module in around if has_forward(module))

    def _loop_of(self, planned: PlannedSegment) -> int:
        """Return the key of the nearest module around all members that has a forward, and so a loop, of its own."""
        path = planned.members[0].module.split(".")[:-1]
        around = [call.module.split(".")[:-1] for call in planned.members]
        while path and not (
            all(other[: len(path)] == path for other in around)
            and has_forward(self._root.get_submodule(".".join(path)))
        ):
            path.pop()
        return self._key(self._root.get_submodule(".".join(path)))

    def _check_inside(
        self, planned: PlannedSegment, parent: PlannedSegment, members: list[nn.Module], where: str
    ) -> None:
        if planned.members == parent.members:
            raise ApplyError(
                f"segment {where}: it has the same members as the segment around it; leave one of them out"
            )
        around = {id(m) for call in parent.members for m in self._module(call, where).modules()}
        for call, member in zip(planned.members, members, strict=True):
            if id(member) not in around:
                raise ApplyError(f"segment {where}: {call} is not inside the segment around it, {parent}")

    def _module(self, call: Call, where: str) -> nn.Module:
        try:
            return self._root.get_submodule(call.module)
        except AttributeError:
            raise ApplyError(
                f"segment {where}: the model {type(self._root).__name__} has no module {call.module!r}; "
                "check the name, or plan again"
            ) from None

    def _buffer(self, name: str, where: str) -> tuple[nn.Module, str]:
        path, _, last = name.rpartition(".")
        try:
            module = self._root.get_submodule(path)
            if buffers_of(module).get(last) is not None:
                return module, last
        except AttributeError:
            pass
        raise ApplyError(f"segment {where}: the model has no buffer {name!r} to restore; check the name, or plan again")

    def _key(self, module: nn.Module) -> int:
        key = self._keys.setdefault(id(module), len(self.modules))
        if key == len(self.modules):
            self.modules.append(module)
        return key
