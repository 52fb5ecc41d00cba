"""Which modules segments may hold calls of, as a user says it by patterns; what a replay can do is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import PlanError
from ..patterns import matching

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Hold the patterns; each names a module and all that is in it.

    Attributes:
        exclude: No segment holds a call of these.
        only: Segments are made of calls of these; empty for all.
    """

    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Refuse patterns that match no module.

        Raises:
            PlanError: One does not; the message names it.
        """
        paths = [name for name, _ in model.named_modules() if name]
        for option, patterns in (("exclude", self.exclude), ("only", self.only)):
            for pattern in patterns:
                if not any(matching(pattern, path) for path in paths):
                    raise PlanError(
                        f"{option} {pattern!r}: no module of the model has such a path; it has {_few(paths)}"
                    )

    def excludes(self, path: str) -> bool:
        """Say whether no segment holds a call of a module."""
        return any(matching(pattern, path) for pattern in self.exclude)

    def admits(self, path: str) -> bool:
        """Say whether calls of a module may be what a segment is made of."""
        return not self.only or any(matching(pattern, path) for pattern in self.only)

    def notes(self) -> list[str]:
        """Say it in words, for a plan."""
        found = [f"segments hold no calls of {', '.join(self.exclude)}, as asked by exclude"] if self.exclude else []
        return found + ([f"segments are made of {', '.join(self.only)} only, as asked by only"] if self.only else [])


EVERYWHERE = Scope()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") if names else "none"
