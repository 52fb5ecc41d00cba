"""The options of a training step, in one frozen object: what counts in its peak, and how it may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypedDict

from remat.near_names import did_you_mean
from torch import nn
from torch.optim import Optimizer

from ..profiler import BatchError
from ..profiler.optimizer import optimizer_named, unwrapped
from ..profiler.ranks import Parallelize, Ranks, by_fully_shard
from ..profiler.repeatable_hooks import Repeatable
from ..profiler.step import Loss
from .by_name import policy_of, policy_words
from .errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class StepKeywords(TypedDict, total=False):
    """The fields of `StepOptions` as keywords of `plan`, `compare`, `largest_batch` and `Planner.of`."""

    loss: Loss | None
    optimizer: Optimizer | str | None
    accumulation: bool
    holds_output: bool
    save_sets: bool
    cross_operators: bool
    repeatable_hooks: bool | Iterable[object]
    exclude: Iterable[str]
    only: Iterable[str]
    alike: bool
    units: Iterable[nn.Module]
    ranks: int
    parallelize: Parallelize | None
    mp_policy: MixedPrecisionPolicy | None
    reshard_after_forward: bool | int | None
    device: str | None
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Say what a training step is besides its model and batch.

    Attributes:
        loss: Takes the model's output to a scalar; None takes `output.loss`, else the mean of floating-point outputs.
        optimizer: An instance or a name such as "adamw"; its state and step count in the peak. None counts neither.
        accumulation: Count gradients as alive throughout.
        holds_output: Count the model's output (the logits, say) as alive until backward is over, as a loop does that
            wrote `out = model(x)`. False for loops in which nothing but the loss is left then: `model(**batch).loss`,
            a function that returns the loss, transformers' Trainer, Lightning, torchtitan. The default is the safe one:
            a plan made for a held output fits either loop; one made for a dropped output does not fit a loop that
            holds it. `loss` cannot tell, for it does not see what its caller still refers to.
        save_sets: Let segments keep some operators' outputs (selective checkpointing).
        cross_operators: Let segments run across a container's own operators; not possible under torch.compile.
        repeatable_hooks: True, or the forward hooks (or the modules that carry them) that a replay may run once more,
            as it does those of modules inside a segment: hooks that only compute, from what they are given and from
            weights, and keep nothing. A module with another hook is left inside no segment. torch's own that make a
            weight anew (weight_norm, spectral_norm, pruning) are known and need not be named.
        exclude: Paths of modules that no segment holds a call of, or patterns: in "h.*.attn" `*` stands for anything
            but a dot, in "h.0-3,7" there are numbers. A pattern names a module and all that is in it.
        only: The same of modules that segments are made of, and no others: what their container computes between them
            may be in a segment as well.
        alike: Treat blocks that are built alike in the same way: one pattern of segments and save sets for each kind of
            block, or two and the block where they change. Such a plan is found fast and reads well; it says what it
            costs. For the solvers auto, dp, ilp, all and none.
        units: Modules that will be sharded on their own (`fully_shard`), the root around them: their parameters are
            there only during their own calls, so a segment holds such a call whole or lies within it.
        ranks: Processes that `fully_shard` will divide the model over. With more than one, the budget and all peaks are
            those of one rank: `fully_shard` itself runs in every dry run, on fake tensors over a process group that
            communicates nothing. 1 counts the whole model, as under DDP, whose gradient buckets are not counted.
        parallelize: Takes the model and a DeviceMesh over `ranks` processes and shards the model in place, instead of
            `fully_shard` on `units` and the root: for several mesh dimensions, tensor parallel, other policies.
        mp_policy: FSDP2's `MixedPrecisionPolicy`, for `units` and the root.
        reshard_after_forward: As in `fully_shard`, for `units`; None is its default.
        device: Name of a card ("h100-80gb"): the step is recorded for it, nothing is run, and the model may be on meta;
            every time is then predicted, and the budget is on what the card reserves. `torch.autocast("cpu", ...)`
            around planning stands for the card's.
        repeats: Most timed repeats of the profile after a warm-up; 0 estimates times and says so.
    """

    loss: Loss | None = None
    optimizer: Optimizer | str | None = None
    accumulation: bool = False
    holds_output: bool = True
    save_sets: bool = True
    cross_operators: bool = True
    repeatable_hooks: Repeatable = False
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    alike: bool = False
    units: tuple[nn.Module, ...] = ()
    ranks: int = 1
    parallelize: Parallelize | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    device: str | None = None
    repeats: int = 3

    @classmethod
    def of(cls, keywords: StepKeywords) -> StepOptions:
        """Check keywords and freeze them.

        Raises:
            TypeError: There is no such option.
            BatchError: `optimizer`, `exclude`, `only`, `units`, `ranks` or `repeatable_hooks` cannot be used.
        """
        check_keywords(keywords)
        units: Any = keywords.get("units", ())
        if not isinstance(units, Iterable):
            raise BatchError(
                f"units must be several modules of the model, got {type(units).__name__}: pass model.layers, say"
            )
        _check_ranks(keywords.get("ranks", 1))
        hooks: Any = keywords.get("repeatable_hooks", False)
        if not isinstance(hooks, (bool, Iterable)) or isinstance(hooks, nn.Module):
            raise BatchError(
                f"repeatable_hooks must be True or several hooks or modules, got {type(hooks).__name__}: "
                "pass [hook], say"
            )
        kept = hooks if isinstance(hooks, bool) else tuple(hooks)
        optimizer = keywords.get("optimizer")
        if isinstance(optimizer, str):
            optimizer_named(optimizer)
        elif optimizer is not None:
            unwrapped(optimizer)  # Refused here where it is a wrapper that is not known, before anything runs.
        patterns = {name: _patterns(name, keywords.get(name, ())) for name in ("exclude", "only")}
        given: dict[str, Any] = {**keywords, **patterns, "units": tuple(units), "repeatable_hooks": kept}
        return cls(**given)

    @property
    def optimizer_name(self) -> str:
        """Return the name of the optimizer that is counted, "" where none is."""
        optimizer = self.optimizer
        return optimizer if isinstance(optimizer, str) else type(optimizer).__name__ if optimizer is not None else ""

    def ranks_of(self, model: nn.Module) -> Ranks | None:
        """Return how a model will be divided over processes; None where it will not.

        Raises:
            BatchError: `units` or how they are sharded cannot be used.
        """
        units = self.unit_paths(model)
        how = self.mp_policy is not None or self.reshard_after_forward is not None
        if self.ranks == 1:
            if how or self.parallelize is not None:
                raise BatchError("parallelize=, mp_policy= and reshard_after_forward= say how ranks=N processes share")
            return None
        if self.parallelize is not None:
            if how:
                raise BatchError("with parallelize=, give mp_policy and reshard_after_forward to what it calls")
            return Ranks(count=self.ranks, parallelize=self.parallelize, words="sharded by the function given")
        shard = by_fully_shard(units, policy=self.mp_policy, reshard_after_forward=self.reshard_after_forward)
        words = f"under fully_shard, on {len(units)} units and the root"
        policy = policy_of(self.mp_policy)
        if policy is not None:
            words += f", {policy_words(policy)}"
        return Ranks(count=self.ranks, parallelize=shard, words=words)

    def unit_paths(self, model: nn.Module) -> tuple[str, ...]:
        """Return the paths of `units` in a model.

        Raises:
            BatchError: One is not a module of the model.
        """
        paths = {id(module): name for name, module in model.named_modules()}
        for unit in self.units:
            if id(unit) not in paths:
                raise BatchError(
                    f"units must be modules of the model, got a {type(unit).__name__}: pass model.layers, say"
                )
        return tuple(paths[id(unit)] for unit in self.units)

    def check_given(self, keywords: StepKeywords) -> None:
        """Refuse keywords that differ from these options, and would be ignored.

        Raises:
            PlanError: One differs; the message names it.
        """
        for name, value in self.of(keywords).items():
            known = getattr(self, name)
            if name in keywords and value is not known and (callable(value) or value != known):
                raise PlanError(
                    f"planner= was made with another {name} ({_short(known)}) than the {name}={_short(value)} given "
                    "here, which would be ignored: leave it out, or make a planner with it"
                )

    def items(self) -> list[tuple[str, Any]]:
        """Return the options with their names."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def check_keywords(keywords: Iterable[str], own: Iterable[str] = ()) -> None:
    """Refuse keywords that are no options of a step.

    Args:
        keywords: What came beside a call's own parameters.
        own: The call's own parameters, one of which may be meant.

    Raises:
        TypeError: There is no such option.
    """
    options = [field.name for field in fields(StepOptions)]
    known = [*own, *options]
    for name in keywords:
        if name not in options:
            meant = did_you_mean(name, known) or f"what can be given is {', '.join(known)}"
            raise TypeError(f"got an unexpected keyword argument {name!r}: {meant}")


def own_parameters(call: Callable[..., object]) -> list[str]:
    """Return the names of a call's parameters, without those that it passes on as keywords."""
    found = signature(call).parameters.values()
    return [parameter.name for parameter in found if parameter.kind is not Parameter.VAR_KEYWORD]


def _patterns(name: str, given: object) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise BatchError(
                f"{name} must be paths of modules, or patterns for them, got {type(pattern).__name__}: pass "
                '["h.*.attn"], say'
            )
    return tuple(pattern for pattern in patterns if isinstance(pattern, str))


def _check_ranks(ranks: object) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise BatchError(
            f"ranks must be a positive int, got {ranks!r}: pass the number of processes that share the model's shards, "
            "torch.distributed.get_world_size() for one"
        )


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
