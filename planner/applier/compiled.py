"""Which parts of a planned model were compiled by themselves (`module.compile()`), and what that means for segments.

To the plan such a part is one call. Segments around it run eagerly; those inside it, or of it, act while it is traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn

from ..errors import ApplyError
from .internals import is_compiled_in_place
from .thread_state import BoundSegment, Level


class CompiledParts:
    """The parts as they were at the latest forward.

    Args:
        root: The model.
        modules: The modules that segments' calls are calls of; a module's key is its position.
        top: The plan's segments.

    Attributes:
        keys: Keys of the modules inside compiled parts, whose calls are not counted.
    """

    def __init__(self, root: nn.Module, modules: list[nn.Module], top: Level) -> None:
        self._paths = {module: name for name, module in root.named_modules()}
        self._modules = modules
        self._top = top
        self._known = [False] * len(self._paths)
        self._told = False
        self.keys: frozenset[int] = frozenset()

    def look(self) -> None:
        """Look whether a part was compiled since the latest forward, and what segments become of it.

        Raises:
            ApplyError: A segment has calls inside such parts and calls outside of them.
        """
        now = list(map(is_compiled_in_place, self._paths))
        if now == self._known:
            return
        parts = {module for module, compiled in zip(self._paths, now, strict=True) if compiled}
        inside = {module for part in parts for module in part.modules()}
        warning = next(self._differences(self._top, parts, inside, nested=False), None)
        if warning is not None and not self._told:
            self._told = True
            warnings.warn(warning, stacklevel=2)
        self.keys = frozenset(key for key, module in enumerate(self._modules) if module in inside)
        self._known = now

    def _differences(
        self, level: Level, parts: set[nn.Module], inside: set[nn.Module], *, nested: bool
    ) -> Iterator[str]:
        """Yield what of the segments will not be as planned."""
        for segment in (*level.singles.values(), *level.runs.values()):
            members = [self._modules[key] for key, _ in segment.calls]
            compiled = [module for module in members if module in inside]
            if len(compiled) not in (0, len(members)):
                self._refuse(segment, members, inside)
            if compiled:
                if nested:
                    yield (
                        f"segment {segment.where} is inside another segment and inside a part that is compiled by "
                        f"itself, where it has no effect: {_ABOVE}; compile the members of the outer one whole, or "
                        "plan with solver='dp' or 'ilp', which put no segment inside another"
                    )
                continue
            part = next((module for module in segment.modules if module in parts), None)
            if part is not None and segment.save is not None:
                yield (
                    f"segment {segment.where} keeps outputs of operators, and does not see those of "
                    f"{self._paths[part]!r}, which is compiled by itself: {_ABOVE}; compile the segment's members "
                    "whole, or plan with save_sets=False"
                )
            yield from self._differences(segment.inside, parts, inside, nested=True)

    def _refuse(self, segment: BoundSegment, members: list[nn.Module], inside: set[nn.Module]) -> None:
        eager = next(self._paths[module] for module in members if module not in inside)
        compiled = next(self._paths[module] for module in members if module in inside)
        raise ApplyError(
            f"segment {segment.where}: {compiled!r} is compiled by itself and {eager!r} is not, and the compiler "
            "cannot take a part of a segment: compile all of the segment's members or none, or the module around them"
        )


_ABOVE = "it is exact, but its peak may be above the promised one (this is said once)"
