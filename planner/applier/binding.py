"""Resolve the names of a plan to the objects of a model, and find fault before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from ...profiler.repeatable_hooks import remade_by
from ..errors import ApplyError
from ..plan import Call, PlannedSegment
from .internals import buffers_of, forward_hook_registries, has_forward
from .reads import Reads, what_decides
from .save_set import SaveSet
from .state import Watched
from .thread_state import NO_SCOPE, BoundSegment, CallKey, Level
from .traced import Traced, TracedCall, TracedFirst, TracedLater, Untraceable


class Binding:
    """Bind segments level by level; what is bound so far is in the attributes.

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
        self._nested = ""
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
        around: frozenset[int] = frozenset()
        if len(calls) > 1:
            around = self._admit_run(planned, members, calls, where)
        else:
            self.singles.update(key for key, _ in calls)
        inside = {module: self._paths[id(module)] for member in members for module in member.modules()}
        # The member of a segment of one call is not called again, only its forward.
        called = [module for module in inside if len(members) > 1 or module is not members[0]]
        buffers, remade = self._put_back(planned, members, called, where)
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
            around=around,
        )
        if parent is None:
            self._trace(planned, segment, members)
            self.replayed.update((module, inside[module]) for module in called)
        return segment

    def _put_back(
        self, planned: PlannedSegment, members: list[nn.Module], called: list[nn.Module], where: str
    ) -> tuple[list[tuple[nn.Module, str]], list[tuple[nn.Module, str]]]:
        """Return the buffers that a replay is given as they were, and the attributes that hooks make anew in it."""
        hooked = [
            (module, made) for module in called for made in remade_by(forward_hook_registries(module)[1].values())
        ]
        restored = [self._buffer(name, where) for name in planned.restored_buffers]
        advanced = [(module, name) for module, made in hooked for name in made.advances]
        buffers = list(dict.fromkeys([*restored, *_statistics(members), *advanced]))
        return buffers, [(module, made.attribute) for module, made in hooked]

    def _reads_of(self, modules: Iterable[nn.Module]) -> Reads:
        """Return what a replay of modules can read; alike blocks of one model share the answer."""
        modules = list(modules)
        key = what_decides(modules)
        if key not in self._reads:
            self._reads[key] = Reads.of(modules)
        return self._reads[key]

    def _trace(self, planned: PlannedSegment, segment: BoundSegment, members: list[nn.Module]) -> None:
        keys = [key for key, _ in segment.calls]
        if planned.children and not self._nested:
            self._nested = segment.where
        nested = self._nested if planned.children else ""
        if planned.crosses_operators and len(keys) > 1:
            refusal = Untraceable(
                f"segment {segment.where} holds operators of the parent between its members, which torch.compile "
                "cannot trace; plan with cross_operators=False, or compile neither the members nor the parent"
            )
            self.traced.update(dict.fromkeys(keys, refusal))
        elif len(keys) == 1:
            self.traced.setdefault(keys[0], TracedCall(segment, nested))
        elif len(set(keys)) < len(keys) or any(key in self.traced for key in keys):
            refusal = Untraceable(
                f"segment {segment.where} holds calls of a module that is called several times, which torch.compile "
                "cannot tell apart; plan each call as a segment of its own"
            )
            self.traced.update(dict.fromkeys(keys, refusal))
        else:
            first = TracedFirst(segment, nested, members[1:])
            self.traced.update(dict.fromkeys(keys[1:], TracedLater(first)))
            self.traced[keys[0]] = first

    def _admit_run(
        self, planned: PlannedSegment, members: list[nn.Module], calls: tuple[CallKey, ...], where: str
    ) -> frozenset[int]:
        """Note a run's members, and return the keys of the modules around them that have a forward."""
        for call, member in zip(planned.members, members, strict=True):
            if any(other is not member and member in set(other.modules()) for other in members):
                raise ApplyError(f"segment {where}: {call} is inside another member; members are calls of one parent")
        self.members.update(key for key, _ in calls)
        # Which ancestor's loop makes the calls cannot be told from names; all of them are watched.
        found: set[int] = set()
        for call in planned.members:
            parts = call.module.split(".")
            around = [self._root.get_submodule(".".join(parts[:length])) for length in range(len(parts))]
            found.update(self._key(module) for module in around if has_forward(module))
        self.scopes.update(found)
        return frozenset(found)

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


def _statistics(members: list[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the buffers that normalisation layers write in training, even if frozen at planning."""
    for member in members:
        for module in member.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                yield from ((module, name) for name, value in buffers_of(module).items() if value is not None)
