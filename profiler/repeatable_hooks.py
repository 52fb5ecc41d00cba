"""Which forward hooks may run again in a replay: the one answer, for recording a step and for applying a plan.

The recorder asks it of every module, and modules with other hooks are left out of segments; the applier asks it of
hooks that come after the plan, and what a known hook touches on its module. The applier knows nothing else of the
profiler: this file imports neither torch nor the profiler's other files, and the import rules name it as the one
exception. The profiler cannot import the applier's files, and a copy in each would differ again, as it did.

torch's own hooks that make a weight anew before each call (weight_norm, spectral_norm, pruning) may run again: what
they set, they set from parameters and buffers that a replay sees as forward did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

Repeatable = bool | tuple[object, ...]
"""What a user says of hooks of their own: that all may run again (True), or these, and those of these modules."""

_KNOWN = (
    # fully_shard's gather parameters; transformers' own collect outputs while they are asked to.
    *("torch.distributed.", "transformers."),
    *("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm", "torch.nn.utils.prune"),
    # The recorder's, and torch's for counting operations, see a replay as what it is: calls made again.
    *("remat.profiler.", "torch.utils.module_tracker"),
)


@dataclass(frozen=True, slots=True)
class Remade:
    """Say what a hook that makes a weight anew touches on its module.

    Attributes:
        attribute: What it sets before each call.
        reads: The parameters and buffers it makes that from.
        advances: The buffers among them that it changes at each call in training.
    """

    attribute: str
    reads: tuple[str, ...]
    advances: tuple[str, ...] = ()


def may_run_again(hook: object, module: object = None, allowed: Repeatable = False) -> bool:
    """Return whether a replay may run a hook of a module once more.

    Args:
        hook: The hook.
        module: The module that carries it; None for a hook on all modules.
        allowed: What the user says.
    """
    if allowed is True or (allowed and any(given is hook or given is module for given in allowed)):
        return True
    return _home(hook).startswith(_KNOWN)


def remade_by(hooks: Iterable[object]) -> list[Remade]:
    """Return what those of some pre-hooks that make a weight anew touch."""
    found: list[Remade] = []
    for hook in hooks:
        held: Any = hook
        home = _home(hook)
        if home == "torch.nn.utils.weight_norm":
            found.append(Remade(held.name, (f"{held.name}_g", f"{held.name}_v")))
        elif home == "torch.nn.utils.spectral_norm":
            state = (f"{held.name}_u", f"{held.name}_v")
            found.append(Remade(held.name, (f"{held.name}_orig", *state), state))
        elif home == "torch.nn.utils.prune":
            name = held._tensor_name
            found.append(Remade(name, (f"{name}_orig", f"{name}_mask")))
    return found


def _home(hook: object) -> str:
    """Return the name of the file whose code a hook runs: that of its __call__ for an object."""
    while isinstance(hook, partial):
        hook = hook.func
    # A user's pruning method is a class of the user's, called by torch's code.
    called: Any = type(hook).__call__ if callable(hook) else None
    return getattr(called, "__module__", None) or getattr(hook, "__module__", None) or ""
