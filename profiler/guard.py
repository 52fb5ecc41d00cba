"""The guard of a step: one snapshot around each public call, from which each run inside is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch import nn

from .contexts import own_context
from .internals import storage_key, tensor_hooks
from .snapshot import DisturbedError, Snapshot, is_parameter

_ONE_AT_A_TIME = RLock()
"""What is kept undisturbed is the process's in part, such as random states: other threads wait."""


@dataclass(slots=True)
class Guard:
    """Keep undisturbed what a step reaches.

    Attributes:
        roots: By name, what the step is made of.
        changes: What the last run changed beside tensors' values, in words.
        left: What it left there, as plain data, by how it is reached.
        released: Identities of parameters whose gradient a hook takes away in backward, once that was seen.
        steps_inside: Whether parameters are stepped in backward, once that was seen.
    """

    roots: dict[str, object]
    changes: list[str] = field(default_factory=list)
    left: dict[str, object] = field(default_factory=dict)
    released: frozenset[int] = frozenset()
    steps_inside: bool = False
    _first: Snapshot | None = None
    _now: Snapshot | None = None
    _written: frozenset[int] = frozenset()
    _first_use: Callable[[], object] | None = None

    def also_keep(self, optimizer: object) -> None:
        """Keep an optimizer undisturbed too; None and a name are none."""
        if optimizer is not None and not isinstance(optimizer, str):
            self.roots["optimizer"] = optimizer

    @property
    def now(self) -> Snapshot:
        """Return the snapshot that runs start from; there is one inside `undisturbed`."""
        assert self._now is not None
        return self._now

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Put everything back on leaving the outermost of these, and look whether it is.

        Raises:
            DisturbedError: Something could not be put back.
        """
        if self._first is not None:
            yield
            return
        with _ONE_AT_A_TIME:
            first = self._first = self._now = Snapshot(self.roots, self._written)
            try:
                with own_context():
                    if self._first_use is not None:
                        self.advance(self._first_use)
                    yield
            except BaseException as error:
                changed = self._leave(first)
                if changed:
                    error.add_note(_words(changed))
                raise
            changed = self._leave(first)
            if changed:
                raise DisturbedError(_words(changed))

    def _leave(self, first: Snapshot) -> list[str]:
        self._first = self._now = None
        first.restore(first.changes(first.contents))
        first.clear_caches()
        return first.still_changed()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Run something inside, and put back what it changed; meanwhile no tensor has a gradient from before.

        Raises:
            DisturbedError: Values were changed that could not be put back.
        """
        with self.undisturbed():
            snapshot = self.now
            contents = snapshot.read()
            snapshot.take_gradients()
            with own_context():
                try:
                    with snapshot.iterators_lent():
                        yield
                finally:
                    changes = snapshot.changes(contents)
                    self.left = snapshot.left(changes)
                    self.changes = snapshot.restore(changes, every_value=False)
            lost = snapshot.lost(hashes=False)
            if lost:
                raise DisturbedError(_words(lost))

    def advance(self, run: Callable[[], object]) -> None:
        """Run something whose traces stay until the outermost `undisturbed` is left, and in every later one.

        What is made at first use (masks, tables, an optimizer's state) is then there, as it is in training. Values of
        tensors that were there before, gradients and random states are put back at once.
        """
        assert self._first is not None
        before = self._first
        before.take_gradients()
        try:
            run()
        finally:
            before.restore_values()
        self._first_use = run
        self._now = Snapshot(self.roots, self._written)

    def observe_backward(self, step: Callable[[], object]) -> None:
        """Run a step and see whether hooks step parameters in its backward, and whose gradients they take away."""
        trained = [tensor for tensor in self.now.reach.tensors if is_parameter(tensor)]
        with self.preserved():
            step()
            hooked = [tensor for tensor in trained if tensor_hooks(tensor)]
            self.released = frozenset(id(tensor) for tensor in hooked if tensor.grad is None)
            self.steps_inside = any(map(self.was_written, trained))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether a run has written a tensor so far."""
        return self.now.was_written(tensor)

    def expect_writes(self, tensors: list[torch.Tensor]) -> None:
        """Copy, from now on, tensors that the step is known to write."""
        new = frozenset(map(id, tensors)) - self._written
        self._written |= new
        for snapshot in {id(s): s for s in (self._first, self._now) if s is not None}.values():
            snapshot.copy_more(new)

    def beside(self, model: nn.Module) -> tuple[tuple[str, torch.Tensor], ...]:
        """Return, with how they are reached, the tensors that are trained besides a model's parameters."""
        reach = self.now.reach
        known = {id(parameter) for parameter in model.parameters()}
        found = [t for t in reach.tensors if t.is_leaf and t.requires_grad and id(t) not in known]
        named = [(reach.path(tensor), tensor) for tensor in found]
        return tuple((name, tensor) for name, tensor in named if not name.startswith("batch"))

    def buffers_beside(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return, with how they are reached, the tensors besides a model's that are not trained: those of a loss."""
        reach = self.now.reach
        known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        named = [(reach.path(t), t) for t in reach.tensors if not t.requires_grad and id(t) not in known]
        return [(name, tensor) for name, tensor in named if not name.startswith(("model", "batch", "optimizer"))]

    def optimizer_bytes(self, left_out: object) -> int:
        """Return the bytes of the state of the optimizers in reach, but for one that is counted otherwise."""
        states = [optimizer.state for optimizer in self.now.reach.optimizers if optimizer is not left_out]
        tensors = [v for state in states for one in state.values() for v in one.values() if isinstance(v, torch.Tensor)]
        return sum({storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


def _words(changed: list[str]) -> str:
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (
        f"the step changed what could not be put back: {'; '.join(changed[:3])}{more}. Keep it out of the step that is "
        "planned, or make it anew before training"
    )
