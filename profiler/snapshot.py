"""One snapshot of whatever a step reaches: what it was, what is different now, and how it is put back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch import nn

from .absent import is_absent
from .allocator import fits
from .contents import changed_in, flat, holds_the_same, is_equal_data, left_in, picture, refill, replace_items
from .devices import all_random_states
from .internals import backward_hooks, is_plain_tensor, set_version, storage_key, tensor_hooks
from .places import Name, Place
from .raw import data_of, digest_of, nbytes_of, put_data
from .reach import Reach
from .settings import SETTINGS, set_state_of, state_of

SMALL_BYTES = 64 << 20
"""What is neither a parameter nor of a module's tensors, such as a loss's targets, is copied so far, else hashed."""
SPARE = 4
"""Parameters are copied where the host's memory has room for so many copies, else hashed."""
_CPU = torch.device("cpu")


class DisturbedError(ValueError):
    """Raised when a step changed something that could not be put back; the message names it."""


class Contents(NamedTuple):
    """What containers hold and names stand for at a moment, in the order of `Reach`; of small raw data its digest."""

    containers: list[list[Any]]
    places: list[Any]
    raws: list[bytes]


class Changes(NamedTuple):
    """What holds something else than it did: each with what it held, and what it holds (of raw data the digest)."""

    containers: list[tuple[Any, list[Any], list[Any]]]
    places: list[tuple[Place, Any, Any]]
    raws: list[tuple[Any, Any, bytes]]


class Snapshot:
    """Remember everything reachable from some roots.

    Containers, attributes, variables and globals are told by the identity of what they hold. Tensors by identity,
    storage, version, gradient and value: by a copy, or by a hash where a copy would take too much memory. Besides,
    random states and torch's global settings.

    Args:
        roots: By name, where the walk begins.
        written: Identities of tensors that the step is known to write; these are always copied.

    Raises:
        DisturbedError: Hooks may write the parameters in backward, and there is no memory for a copy of them.
    """

    def __init__(self, roots: Mapping[str, object], written: frozenset[int] = frozenset()) -> None:
        self.reach = Reach(roots)
        large = [raw for raw in self.reach.raws if nbytes_of(raw) > SMALL_BYTES]
        self._large = [(raw, digest_of(raw)) for raw in large]
        self._raws = [(raw, data_of(raw)) for raw in self.reach.raws if not any(raw is other for other in large)]
        self.contents = self.read()
        self.stepping_hooks = _has_gradient_hooks(self.reach)
        parameters = [tensor for tensor in self.reach.tensors if is_parameter(tensor) and not is_absent(tensor)]
        needed = sum(tensor.nbytes for tensor in parameters)
        if self.stepping_hooks and not fits(needed, _CPU):
            raise DisturbedError(
                f"hooks run in backward and may step the {needed} bytes of parameters, which planning would have to "
                "put back, and there is no memory for a copy of them: plan without these hooks, or free some memory"
            )
        keep_parameters = self.stepping_hooks or fits(SPARE * needed, _CPU)
        of_modules = {id(v) for module in self.reach.modules for v in _tensors_of(module)}
        self._held = [
            _Held(
                tensor,
                copied=id(tensor) in written
                or (keep_parameters if is_parameter(tensor) else id(tensor) in of_modules)
                or (not is_parameter(tensor) and tensor.nbytes <= SMALL_BYTES),
            )
            for tensor in self.reach.tensors
        ]
        self._versions = {id(held.tensor): held.version for held in self._held}
        self._generators = [(generator, state_of(generator)) for generator in self.reach.generators]
        self._iterators = [(iterator, _position_of(iterator)) for iterator in self.reach.iterators]
        self._empty_caches = [cache for cache in self.reach.caches if cache.cache_info().currsize == 0]
        self._restore_random_states = all_random_states()
        self._settings = [(setting, setting.read()) for setting in SETTINGS]

    def read(self) -> Contents:
        """Return what every container and name holds now."""
        return Contents(
            [flat(container) for container in self.reach.containers],
            [place.read() for place in self.reach.places],
            [digest_of(raw) for raw, _ in self._raws],
        )

    def changes(self, contents: Contents) -> Changes:
        """Return what holds something else now than it did."""
        read = ((container, before, flat(container)) for container, before in self._containers_of(contents))
        named = (
            (place, before, place.read()) for place, before in zip(self.reach.places, contents.places, strict=True)
        )
        raws = (
            (raw, data, before, digest_of(raw)) for (raw, data), before in zip(self._raws, contents.raws, strict=True)
        )
        return Changes(
            [(container, before, now) for container, before, now in read if not holds_the_same(now, before)],
            [(place, before, now) for place, before, now in named if now is not before],
            [(raw, data, now) for raw, data, before, now in raws if now != before],
        )

    def _containers_of(self, contents: Contents) -> Iterator[tuple[Any, list[Any]]]:
        return zip(self.reach.containers, contents.containers, strict=True)

    def left(self, changes: Changes) -> dict[str, object]:
        """Return what containers and names hold otherwise than they did, as plain data, by how it is reached."""
        found: dict[str, object] = {}
        for container, before, now in changes.containers:
            path = self.reach.path(container)
            found |= {f"{path}{key}": value for key, value in left_in(container, before, now).items()}
        for place, before, now in changes.places:
            if not is_equal_data(now, before):
                found[self._words_of(place)] = picture(now)
        found |= {self.reach.path(raw): picture(now) for raw, _, now in changes.raws}
        return found

    def exchange(self, others: Mapping[int, object]) -> None:
        """Put other objects in place of those with the given identities, wherever something can be put."""
        for container in self.reach.containers:
            replace_items(container, others)
        for place in self.reach.places:
            value = place.read()
            if id(value) in others:
                place.write(others[id(value)])

    @contextmanager
    def iterators_lent(self) -> Iterator[None]:
        """Let copies of iterators stand in place of those that the runs inside would use up."""
        twins = [(iterator, twin) for iterator, _ in self._iterators if (twin := _copied(iterator)) is not None]
        if twins:
            self.exchange({id(iterator): twin for iterator, twin in twins})
        try:
            yield
        finally:
            if twins:
                self.exchange({id(twin): iterator for iterator, twin in twins})

    def take_gradients(self) -> None:
        """Let no tensor have a gradient; `restore` gives them back."""
        for held in self._held:
            if held.grad is not None:
                held.tensor.grad = None

    def restore(self, changes: Changes, *, every_value: bool = True) -> list[str]:
        """Put everything back; return what had changed, in words.

        Args:
            changes: What containers and names hold otherwise than they shall.
            every_value: Compare all values that were copied; else parameters only where their version moved.
        """
        changed = self._restore_contents(changes)
        self.restore_values(every_value=every_value)
        return changed

    def _restore_contents(self, changes: Changes) -> list[str]:
        changed: list[str] = []
        for container, before, now in changes.containers:
            words = changed_in(container, before, now)
            if words is not None:
                changed.append(f"{self.reach.path(container)}{words}")
            refill(container, before)
        for place, before, now in changes.places:
            if not is_equal_data(now, before):
                changed.append(self._words_of(place))
            place.write(before)
        for raw, data, _ in changes.raws:
            changed.append(f"{self.reach.path(raw)}, what it holds")
            put_data(raw, data)
        return changed

    def _words_of(self, place: Place) -> str:
        if isinstance(place, Name):
            return f"the global {place.owner.get('__name__', '?')}.{place.key}"
        return f"{place.key} of {self.reach.path(place.owner)}"

    def restore_values(self, *, every_value: bool = True) -> None:
        """Put back tensors, random states and settings."""
        with torch.no_grad():
            for held in self._held:
                held.restore(always=every_value or self.stepping_hooks)
        for generator, state in self._generators:
            set_state_of(generator, state)
        self._restore_random_states()
        for setting, value in self._settings:
            if setting.read() != value:
                setting.write(value)

    def clear_caches(self) -> None:
        """Empty the functions' caches that were empty."""
        for cache in self._empty_caches:
            if cache.cache_info().currsize:
                cache.cache_clear()

    def lost(self, *, hashes: bool = True) -> list[str]:
        """Name what is not as it was and cannot be put back."""
        lost = [f"the values of {self.reach.path(h.tensor)}" for h in self._held if h.is_lost(hashes=hashes)]
        lost += [f"the position of {self.reach.path(it)}" for it, at in self._iterators if _position_of(it) != at]
        if hashes:
            lost += [self.reach.path(raw) for raw, digest in self._large if digest_of(raw) != digest]
        return lost

    def still_changed(self) -> list[str]:
        """Name what putting back did not put back."""
        return [*self._restore_contents(self.changes(self.contents)), *self.lost()]

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's version is another now."""
        return _version_of(tensor) != self._versions.get(id(tensor))

    def copy_more(self, tensors: frozenset[int]) -> None:
        """Copy the values of tensors, given by identity, that were only hashed."""
        for held in self._held:
            if id(held.tensor) in tensors and held.copy is None and held.hash is not None:
                held.copy_now()


class _Held:
    """A tensor as it was."""

    __slots__ = ("copy", "data", "grad", "hash", "hooks", "key", "requires_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        self.tensor = tensor
        self.data = tensor.data
        self.key = _storage_of(tensor)
        self.version = _version_of(tensor)
        self.hooks = {id(hooks) for hooks in tensor_hooks(tensor)}
        self.requires_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None
        simple = self.key is not None and tensor.grad_fn is None and not tensor.is_inference()
        simple = simple and not is_absent(tensor)
        # The host keeps the copies of parameters: a device may have no room for them.
        home = _CPU if is_parameter(tensor) else tensor.device
        self.copy = self.data.to(home, copy=True) if simple and copied else None
        self.hash = _hash(self.data) if simple and not copied else None

    def restore(self, *, always: bool) -> None:
        tensor = self.tensor
        if _storage_of(tensor) != self.key or tensor.shape != self.data.shape:
            tensor.data = self.data
        if tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
        for hooks in tensor_hooks(tensor):
            if id(hooks) not in self.hooks:
                hooks.clear()
        # A version does not tell everything: batch normalisation updates its statistics without counting.
        if self.copy is not None and (always or not is_parameter(tensor) or _version_of(tensor) != self.version):
            if not torch.equal(self.data.to(self.copy.device), self.copy):
                self.data.copy_(self.copy)
            if _version_of(tensor) != self.version:
                set_version(tensor, self.version)

    def copy_now(self) -> None:
        self.copy, self.hash = self.data.to(_CPU, copy=True), None

    def is_lost(self, *, hashes: bool) -> bool:
        if self.copy is not None or self.key is None:
            return False
        if self.hash is None or not hashes:
            return _version_of(self.tensor) != self.version
        return _hash(self.data) != self.hash


def _storage_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what a plain tensor lies in and where; None of one that is not plain (sparse, sharded, a wrapper)."""
    if not is_plain_tensor(tensor):
        return None
    return storage_key(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _hash(data: torch.Tensor) -> int | None:
    real = torch.view_as_real(data) if data.is_complex() else data
    return int(torch.hash_tensor(real).item()) if real.numel() else None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one that is trained, or may be."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    own = [*vars(module).values(), *module.buffers(recurse=False)]
    return [value for value in own if isinstance(value, torch.Tensor)]


def _has_gradient_hooks(reach: Reach) -> bool:
    """Return whether hooks run in backward, or an optimizer is in reach of what runs: either may step parameters."""
    return any(tensor_hooks(tensor) for tensor in reach.tensors) or any(map(backward_hooks, reach.modules))


def _copied(iterator: Any) -> Any:
    """Return an iterator that goes on from the same position; None of one that cannot be copied, like a generator."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return copy.copy(iterator)
    except TypeError:
        return None


def _position_of(iterator: Any) -> object:
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        return frame.f_lasti
    try:
        return length_hint(iterator, -1), repr(iterator) if type(iterator).__module__ == "itertools" else ""
    except TypeError:
        return None
