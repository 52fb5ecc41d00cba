"""Watch one training step: every operator, every module call, every storage's birth and death.

The recorder does not know whether the tensors are fake or real, nor what a budget is.
"""

from __future__ import annotations

import random
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .counted import is_counted
from .internals import (
    FakeTensor,
    autograd_sequence,
    fake_mode_is_on,
    forward_hooks,
    global_forward_hooks,
    local_part,
    made_by_function,
    resizes_told,
    storage_key,
    unset_fake_temporarily,
)
from .repeatable_hooks import Repeatable, may_run_again, remade_by
from .roofline import cost
from .scratch import ScratchMeter
from .side_effects import observe
from .step import BatchError
from .step_record import BETWEEN_RANKS, Kind, ModuleCall, Operator, StepRecord, Storage

SMALL_NUMEL = 1 << 20
"""Integer and boolean tensors up to this size keep their real values in a dry run (masks, positions, token ids)."""


class _Life:
    """What is known so far of a storage; `Storage` says what each part means."""

    __slots__ = ("born", "kind", "last", "name", "nbytes", "read_by", "saved_by", "stream", "written_by")

    def __init__(self, nbytes: int, born: int, kind: Kind, name: str, stream: int) -> None:
        self.nbytes, self.born, self.name, self.stream = nbytes, born, name, stream
        self.kind: Kind = kind
        self.last: int | None = None
        self.saved_by: set[int] = set()
        self.read_by: set[int] = set()
        self.written_by: set[int] = set()

    def frozen(self) -> Storage:
        """Return it as data."""
        return Storage(
            nbytes=self.nbytes,
            kind=self.kind,
            name=self.name,
            born=self.born,
            last=self.last,
            last_unsaved=self.last,
            saved_by=tuple(sorted(self.saved_by)),
            read_by=tuple(sorted(self.read_by)),
            written_by=tuple(sorted(self.written_by)),
            stream=self.stream,
        )


class _Seen(NamedTuple):
    """What is remembered of an operator beside its record, until the step ends.

    Attributes:
        sequence: Autograd's number of the node that it makes, or that is now in backward.
        of_view: Its first argument is a view.
        grad_enabled: Gradients were on.
        scratch_key: See `StepRecord.scratch_keys`.
    """

    sequence: int
    of_view: bool
    grad_enabled: bool
    scratch_key: Hashable


class Recorder(TorchDispatchMode):
    """Record operators and storages; `watch` adds module calls and `saving` saved tensors.

    Args:
        round_to: Allocation granularity in bytes (512 on CUDA, 1 on CPU).
        device: Where memory is counted; a storage elsewhere counts no bytes. None counts all.
        stream: Tells the streams apart that work is launched on; the default one is 0.
        scratch: Measures what operators allocate and free inside themselves; None leaves it out.

    Attributes:
        lives: The storages met so far.
        met: By storage, how many operators there had been.
        forward_stop: Operators of the model's forward, once it has ended.
        loss_stop: Operators of forward and loss, once they have ended.
        loss_is_assumed: See `StepRecord`.
    """

    def __init__(
        self,
        *,
        round_to: int = 1,
        device: torch.device | None = None,
        stream: Callable[[], Hashable] = int,
        scratch: ScratchMeter | None = None,
    ) -> None:
        super().__init__()
        self.lives: list[_Life] = []
        self.met: list[int] = []
        self.forward_stop = self.loss_stop = 0
        self.loss_is_assumed = False
        self._operators: list[Operator] = []
        self._seen: list[_Seen] = []
        self._calls: list[ModuleCall] = []
        self._round_to = round_to
        self._device = device
        self._stream = stream
        self._streams: dict[Hashable, int] = {0: 0}
        self._scratch = scratch
        self._index_of: dict[int, int] = {}
        self._references: dict[int, object] = {}
        self._gathered_by: dict[int, str] = {}
        self._stack: list[int] = [-1]
        self._pending: list[int] = []
        # By storage, the last operator without gradients that returned it; and those that ended custom functions.
        self._detached: dict[int, int] = {}
        self._in_function: set[int] = set()
        self._counts: dict[str, int] = {}
        self._counts_without_gradients: dict[str, int] = {}
        self._hooked: dict[str, bool] = {}
        # Attributes that torch's hooks set anew at each call, by module.
        self._remade: dict[str, frozenset[str]] = {}
        self._stopped = False
        self._finish_attributes: list[Callable[[], list[str]]] = []

    @property
    def count(self) -> int:
        """Return how many operators were recorded so far."""
        return len(self._operators)

    def finish(self) -> StepRecord:
        """Take no more deaths, so that what is alive now outlives the step, and return the record."""
        self._stopped = True
        self._accumulate_in_place()
        sources = self._forward_of()
        operators = tuple(
            replace(operator, in_function=k in self._in_function)
            if k < self.loss_stop
            else replace(operator, forward_of=sources[k], replayed=self._seen[k].grad_enabled)
            for k, operator in enumerate(self._operators)
        )
        return StepRecord(
            operators=operators,
            calls=tuple(self._calls),
            storages=tuple(life.frozen() for life in self.lives),
            forward_stop=self.forward_stop,
            loss_stop=self.loss_stop,
            loss_is_assumed=self.loss_is_assumed,
            scratch_keys=tuple(seen.scratch_key for seen in self._seen),
        )

    def _forward_of(self) -> list[int]:
        """Link backward operators to the forward ones whose gradient they compute, by autograd's sequence numbers."""
        sequences = [seen.sequence for seen in self._seen[: self.loss_stop]]
        latest = self.loss_stop - 1
        found = [-1] * self.loss_stop
        for seen in self._seen[self.loss_stop :]:
            position = bisect_right(sequences, seen.sequence)
            if position < self.loss_stop:
                latest = position
            found.append(latest)
        return found

    def _accumulate_in_place(self) -> None:
        """Let a sum of gradients take the place of its first term, as it does when no dispatch mode watches.

        Autograd adds a second gradient to a waiting one in place if nothing else holds that, as a view's base would;
        under a dispatch mode it makes a new tensor. The waiting gradient is the first term; an earlier node made it,
        and it dies with the sum.
        """
        for k in range(self.loss_stop, self.count):
            added, seen = self._operators[k], self._seen[k]
            if added.operator != "aten.add.Tensor" or seen.grad_enabled or len(added.produces) != 1:
                continue
            waiting = self.lives[added.reads[0]]
            earlier = waiting.born >= 0 and self._seen[waiting.born].sequence != seen.sequence
            if earlier and waiting.last == k and waiting.nbytes == added.output_bytes and not seen.of_view:
                waiting.last = k - 1

    def became_gradient(self, tensor: torch.Tensor, name: str) -> None:
        """Note that a tensor ended as the gradient of a parameter."""
        life = self.lives[self.identify(tensor, "gradient", name)[0]]
        life.kind, life.name = "gradient", name

    def identify(self, tensor: torch.Tensor, kind: Kind = "activation", name: str = "") -> tuple[int, bool]:
        """Return the number of a tensor's storage, and whether it was not known before.

        A storage of any kind but "activation" is taken to exist from before the step.
        """
        storage = local_part(tensor).untyped_storage()
        key = storage_key(storage)
        index = self._index_of.get(key)
        if index is not None:
            return index, False
        elsewhere = self._device is not None and tensor.device != self._device
        born = -1 if kind != "activation" else self.count
        return self._begin(storage, 0 if elsewhere else storage.nbytes(), born, kind, name), True

    def _begin(self, storage: torch.UntypedStorage, nbytes: int, born: int, kind: Kind, name: str) -> int:
        key, index = storage_key(storage), len(self.lives)
        nbytes = -(-nbytes // self._round_to) * self._round_to
        stream = self._streams.setdefault(self._stream(), len(self._streams))
        self.lives.append(_Life(nbytes, born, kind, name, stream))
        self.met.append(self.count)
        self._index_of[key] = index

        def died(_: object) -> None:
            # A storage that was resized has had several lives; this ends the last.
            if self._index_of.get(key) == index:
                self._gathered_by.pop(key, None)
                self._end(key)

        self._references[index] = weakref.ref(storage, died)
        return index

    def _end(self, key: int) -> None:
        if not self._stopped:
            index = self._index_of.pop(key)
            self.lives[index].last = self.count - 1
            self._references.pop(index, None)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """End a storage's life and begin another of its new size: what is gathered is given back so, and made again."""
        key = storage_key(storage)
        before = self._index_of.get(key)
        call = self._stack[-1]
        if call < 0 and before is not None and self.lives[before].born >= 0:
            call = self._operators[self.lives[before].born].call
        if call >= 0:
            self._gathered_by.setdefault(key, f"{self._calls[call].module or 'the root'}.gathered")
        name = self._gathered_by.get(key, "")
        if before is not None:
            life = self.lives[before]
            life.name = life.name or name
            if life.kind in ("activation", "communication"):
                life.kind = "unsharded"
            self._end(key)
        if storage.nbytes():
            self._begin(storage, storage.nbytes(), self.count, "unsharded", name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if any(hasattr(kind, "_local_tensor") for kind in types):
            # A DTensor computes on its local part, and communicates; those are the operators to see.
            return NotImplemented
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.detach.default:
            return _run(func, args, kwargs, inputs)
        lives, here = self.lives, self.count
        # What is read and was never made here was there before: a tensor kept as an attribute. Literals are new.
        kind: Kind = "activation" if func is torch.ops.aten.lift_fresh.default else "buffer"
        reads = tuple(dict.fromkeys(self.identify(tensor, kind)[0] for tensor in inputs))
        self._note_functions(inputs)
        for saved in self._pending:
            lives[saved].saved_by.add(here if saved in reads else max(here - 1, 0))
        self._pending.clear()
        sequence = autograd_sequence()
        # torch numbers the works of its pretended collectives with Python's random numbers.
        drawn = random.getstate() if func.namespace == "c10d" else None
        out = _run(func, args, kwargs, inputs)
        if drawn is not None:
            random.setstate(drawn)
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        produced: list[int] = []
        for tensor in outputs:
            index, is_new = self.identify(tensor)
            if is_new:
                produced.append(index)
            if not torch.is_grad_enabled():
                self._detached[index] = here
        writes = _written(func, args, kwargs)
        written = tuple(dict.fromkeys(self.identify(tensor)[0] for tensor, _ in writes))
        returned = {id(tensor) for tensor in outputs}
        for index in reads:
            lives[index].read_by.add(here)
        for index in written:
            lives[index].written_by.add(here)
        if str(func).startswith(BETWEEN_RANKS):
            for index in (*produced, *written):
                if lives[index].kind == "activation":
                    lives[index].kind = "communication"
        is_view = bool(outputs) and not produced and not writes
        changed = [tensor for tensor, _ in writes]
        spent = cost(func, args, kwargs, inputs, out, moves=bool(produced or writes), written=changed)
        self._operators.append(
            Operator(
                operator=str(func),
                call=self._stack[-1],
                output_bytes=sum(lives[index].nbytes for index in produced),
                reads=reads,
                produces=tuple(produced),
                writes=written,
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
                is_view=is_view,
                private_generator=any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values())),
                fills_argument=func.overloadpacket not in _BATCH_NORMS
                and any(id(tensor) not in returned and not is_self for tensor, is_self in writes),
                counted=is_counted(func, args),
                flops=spent.flops,
                moved_bytes=spent.moved_bytes,
                dtype=spent.dtype,
            )
        )
        self._seen.append(
            _Seen(
                sequence=sequence,
                of_view=bool(inputs) and inputs[0]._is_view(),
                grad_enabled=torch.is_grad_enabled(),
                scratch_key=self._scratch.key(func, args, kwargs) if self._scratch is not None else None,
            )
        )
        return out

    def _note_functions(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note which operators custom autograd functions ran: without gradients, and now their outputs have some."""
        for tensor in tensors:
            if made_by_function(tensor):
                ended = self._detached.get(self.identify(tensor)[0])
                if ended is not None:
                    self._in_function.add(ended)

    @contextmanager
    def saving(self, *, drop: bool = False) -> Iterator[None]:
        """Note every tensor autograd saves; with `drop`, let it save nothing (backward is then impossible)."""

        def pack(tensor: torch.Tensor) -> Any:
            self._pending.append(self.identify(tensor)[0])
            return None if drop else tensor.detach()

        def unpack(packed: Any) -> Any:
            if packed is None:
                raise BatchError(
                    "the step differentiates before its own backward (torch.autograd.grad or backward() in forward or "
                    "in the loss) and cannot be profiled: plan without that part, and leave some headroom for it"
                )
            return packed

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        except RuntimeError as error:
            if "torch.func" not in str(error) or "saved tensor hooks" not in str(error):
                raise
            raise BatchError(
                "the model calls torch.func.grad (or vjp, jacrev, hessian) in its forward, which torch does not run "
                "under saved-tensor hooks; what a step keeps is seen by these, and checkpoints are made of them, so "
                "the model cannot be planned. Compute that part outside of the model, and pass it the result"
            ) from error
        self._settle()

    def _settle(self) -> None:
        """Give what was saved since the last operator to that operator: it is one of its outputs."""
        for saved in self._pending:
            self.lives[saved].saved_by.add(max(self.count - 1, 0))
        self._pending.clear()

    @contextmanager
    def watch(self, model: nn.Module, repeatable: Repeatable = False, *, around_hooks: bool = False) -> Iterator[None]:
        """Note the calls of every submodule's forward, what they ran and what they changed besides their output.

        Args:
            model: The model.
            repeatable: Which hooks of the user's may run again.
            around_hooks: Let a call hold what hooks before and after it run (gathering of sharded parameters).
        """
        everywhere = any(not may_run_again(hook, None, repeatable) for hook in global_forward_hooks())
        with ExitStack() as stack:
            stack.enter_context(resizes_told(self._resized))
            for name, module in model.named_modules():
                self._hooked[name] = everywhere or any(
                    not may_run_again(hook, module, repeatable) for hook in forward_hooks(module)
                )
                self._remade[name] = frozenset(made.attribute for made in remade_by(forward_hooks(module)))
                # What makes a weight anew belongs to the call: it runs again where the call does.
                first = around_hooks or bool(self._remade[name])
                handle = module.register_forward_pre_hook(_Enter(self, name), with_kwargs=True, prepend=first)
                stack.callback(handle.remove)
                handle = module.register_forward_hook(
                    _Leave(self, name), prepend=not around_hooks, with_kwargs=True, always_call=True
                )
                stack.callback(handle.remove)
            yield

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        """Begin a module call."""
        self._settle()
        # Passes without gradients (recycling, a teacher) do not shift the names of the calls that can be planned.
        counts, sign = (self._counts, 1) if torch.is_grad_enabled() else (self._counts_without_gradients, -1)
        counts[name] = counts.get(name, 0) + 1
        index = counts[name] - 1 if sign > 0 else -counts[name]
        call = ModuleCall(
            module=name,
            kind=type(module).__name__,
            index=index,
            parent=self._stack[-1],
            start=self.count,
            stop=-1,
            training=module.training,
            hooked=self._hooked[name],
            findings=(),
            differentiable=any(
                isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(inputs)
            ),
        )
        self._stack.append(len(self._calls))
        self._calls.append(call)
        self._finish_attributes.append(observe(module, inputs, self._remade[name]))

    def leave(self, name: str) -> None:
        """End the innermost module call, if it is one of this module.

        Where a replay stops in a hook before ours, torch still calls the hook after the call that never began.
        """
        index = self._stack[-1]
        if index < 0 or self._calls[index].module != name:
            return
        self._settle()
        self._stack.pop()
        findings = tuple(self._finish_attributes.pop()())
        self._calls[index] = replace(self._calls[index], stop=self.count, findings=findings)


class _Enter:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._recorder.enter(self._name, module, (args, kwargs))


class _Leave:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._recorder.leave(self._name)


_BATCH_NORMS = frozenset(
    {torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm, torch.ops.aten.miopen_batch_norm}
)
"""In training they change the running statistics (arguments 3 and 4), and their schemas do not say so."""


def _run(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    """Run an operator; in a dry run, on real values while they are small integers, so that Python can look at them.

    Models decide from masks and positions which path to take (`mask.all()`); on fake tensors they would take another.
    """
    if not fake_mode_is_on() or any(isinstance(tensor, FakeTensor) for tensor in inputs):
        return func(*args, **kwargs)
    if sum(tensor.numel() for tensor in inputs) > SMALL_NUMEL:
        return func(*args, **kwargs)
    if not inputs:
        probe = func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves(probe) if isinstance(leaf, torch.Tensor)]
        if not all(leaf.numel() <= SMALL_NUMEL and not leaf.is_floating_point() for leaf in leaves):
            return probe
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """List the tensors an operator's schema says it writes, each with whether it is the operator's `self`."""
    if func.overloadpacket in _BATCH_NORMS and args[5]:
        return [(statistic, False) for statistic in args[3:5] if statistic is not None]
    if not func._schema.is_mutable:
        return []
    written: list[tuple[torch.Tensor, bool]] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [(leaf, position == 0) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written
