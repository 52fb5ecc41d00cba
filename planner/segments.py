"""The segments of a plan: which calls are checkpointed together, and what is kept inside. Names only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from .circumstances import Count

STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Name one call of a module within one forward of the root model.

    `module` is the dotted path of the module, "" for the root; `index` counts its calls from 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    module: str
    index: Count = 0

    def __str__(self) -> str:
        name = self.module or "(root)"
        return name if self.index == 0 else f"{name}#{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOperator:
    """Name one operator call whose outputs a segment keeps.

    `operator` is str() of the OpOverload, like 'aten.addmm.default'. `index` counts the calls of that operator over
    one run of the segment from 0, as torch's selective checkpointing counts: every dispatched call of it, also inside
    child segments, except the operators it ignores (`SAC_IGNORED_OPS`: detach and metadata reads) and casts of weights,
    of which autocast keeps the results.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    operator: str
    index: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """Describe one checkpointed segment: sibling calls of one parent, replayed together in backward.

    The segment runs from the beginning of the first member's call to the end of the last member's.

    Attributes:
        members: Calls made by the same parent module, in execution order.
        save: The save set: operators whose outputs are kept instead of replayed.
        children: Segments nested inside, each within one member or a shorter run of the members.
        early_stop: Whether a replay ends at its last saved tensor.
        restored_buffers: Dotted names of buffers the segment writes; a replay leaves them as they are.
        crosses_operators: Whether the parent runs operators of its own between the members.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    members: Annotated[tuple[Call, ...], Field(min_length=1)]
    save: tuple[SavedOperator, ...] = ()
    children: tuple[PlannedSegment, ...] = ()
    early_stop: bool = True
    restored_buffers: tuple[str, ...] = ()
    crosses_operators: bool = False

    def walk(self) -> Iterator[PlannedSegment]:
        """Yield this segment, then everything nested in it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def __str__(self) -> str:
        first, last = self.members[0], self.members[-1]
        return str(first) if len(self.members) == 1 else f"{first} .. {last} ({len(self.members)} calls)"
