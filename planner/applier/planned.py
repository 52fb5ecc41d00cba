"""What the objects at a planned model's modules share: whether the plan is in force, and the model as it was."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ...profiler.repeatable_hooks import may_run_again
from ..errors import ApplyError
from .compiled import CompiledParts
from .expected import Expected
from .internals import children_of, forward_hook_registries, global_hook_registries
from .thread_state import Level, ThreadStates


class Planned:
    """The planned model; one for all objects at its modules.

    Attributes:
        root: The model.
        training: The root's training flag with which the plan is in force.
        threads: The state of each thread.
        applied: What apply returned: found here, so that a copy of the model has its own.
        expected: What the plan's figures rest on; None where segments were applied without a plan.
        begins: The first calls of all segments, of whatever level.
        compiled: The parts of the model that were compiled by themselves.
    """

    def __init__(
        self, root: nn.Module, training: bool, top: Level, modules: list[nn.Module], replayed: dict[nn.Module, str]
    ) -> None:
        self.root = root
        self.training = training
        self.threads = ThreadStates(top)
        self.applied: Any = None
        self.expected: Expected | None = None
        self.begins = top.all_begins()
        self.compiled = CompiledParts(root, modules, top)
        # Dictionaries of modules and copies of them: compared as a whole, many times faster than by a walk.
        self._children = [children_of(module) for module in root.modules()]
        self._expected = [children.copy() for children in self._children]
        self._checkpointing = [module for module in root.modules() if hasattr(module, "gradient_checkpointing")]
        # Each path twice, once for the hooks and once for the pre-hooks; "" for those of all modules.
        self._replayed = [path for path in (*replayed.values(), "") for _ in range(2)]
        self._hooks = [hooks for module in replayed for hooks in forward_hook_registries(module)]
        self._hooks += global_hook_registries()
        self._known_hooks = [hooks.copy() for hooks in self._hooks]

    def in_force(self) -> bool:
        """Return whether a forward that begins now is to be checkpointed.

        A replay needs no answer: where segments are inside, calls are counted already; where none are, none can begin.
        """
        return torch.is_grad_enabled() and self.root.training is self.training and not torch.is_inference_mode_enabled()

    def check_model(self) -> None:
        """Refuse a model that is not as it was when the plan was applied; runs once a forward.

        Raises:
            ApplyError: A module was added, taken away or replaced, or does its own checkpointing now; or a segment is
                compiled in part.
        """
        if self._children != self._expected:
            raise ApplyError(
                "a module was added, removed or replaced after the plan was applied, and replays would run the old "
                "ones: call remove() before such a change and apply the plan, or a new one, afterwards (to compile "
                "a part, call part.compile(), which replaces nothing; where forward makes modules at its first use, "
                "run it once before planning)"
            )
        if any(module.gradient_checkpointing is True for module in self._checkpointing):
            raise ApplyError(
                "the model's own gradient checkpointing was switched on after the plan was applied, and the two do not "
                "stack: call model.gradient_checkpointing_disable(), or remove() the plan"
            )
        if self._hooks != self._known_hooks:
            self._warn_of_hooks()
        self.compiled.look()

    def _warn_of_hooks(self) -> None:
        """Warn, once for each, of hooks that came after the plan and that a replay runs a second time."""
        for path, known, now in zip(self._replayed, self._known_hooks, self._hooks, strict=True):
            if any(not may_run_again(hook) for key, hook in now.items() if key not in known):
                got = f"module {path!r} got a forward hook" if path else "all modules got a forward hook"
                inside = "is" if path else "some are"
                warnings.warn(
                    f"{got} after the plan was applied and {inside} inside a segment: a replay runs the hook a second "
                    "time. Register hooks before planning, and the plan leaves such modules out, or holds them with "
                    "repeatable_hooks=",
                    stacklevel=2,
                )
        self._known_hooks = [hooks.copy() for hooks in self._hooks]

    def traced_in_force(self) -> bool:
        """Return whether a call traced now is to be checkpointed."""
        return torch.is_grad_enabled() and self.root.training is self.training
