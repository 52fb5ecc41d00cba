"""What a solver is given and what it returns: numbers only, no torch.

A training step is a chain of *stages* in execution order. Stages keep *tensors* for backward. A *candidate* is an
interval of stages that can be run as one checkpointed segment; a *segment* is a candidate that was chosen, with the
operators whose outputs it keeps (its save set) and the segments nested inside it. `simulate` gives the meaning of
all of it: peak bytes and added nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Describe one stage of the step.

    Attributes:
        name: What people call it, for messages.
        forward_ns: Time of its operators in forward, in nanoseconds.
        forward_extra_bytes: Most bytes alive at any moment of its forward that are neither fixed nor one of the
            problem's tensors (temporaries, scratch of its operators).
        backward_extra_bytes: Likewise for its backward: gradients made so far, gradients in flight, temporaries.
        entry_extra_bytes: Likewise at the moment its backward begins, before it has allocated anything: gradients
            made so far and the gradient of its output. A replay that ends with this stage runs on top of these.

    Extras may be negative: a stage's tensors are counted as alive together, which they need not have been.
    """

    name: str
    forward_ns: int
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    entry_extra_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Describe one storage, counted once however many views or consumers it has. Parameters are never tensors.

    Attributes:
        nbytes: Bytes of the storage.
        producer: The stage that makes it; -1 when it exists before the first stage.
        holders: Stages that save it for their backward, ascending. Empty when nobody does.
        consumers: Later stages than the producer that read it in forward, ascending. A stage that saves a tensor it
            did not make also reads it, so such holders are consumers too.
        last_alive: The last stage in whose forward it exists even if nothing is saved for backward (the last reader,
            or later when Python still refers to it). `len(stages)` when it outlives the whole step's forward, as the
            model's output does; then it is alive in every backward moment too.
    """

    nbytes: int
    producer: int
    holders: tuple[int, ...]
    consumers: tuple[int, ...]
    last_alive: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Describe an operator whose outputs a segment may keep (selective checkpointing).

    Attributes:
        stage: The stage it belongs to.
        forward_ns: What a replay saves by not running it.
        outputs: The tensors kept when it is kept: indices into `Problem.tensors`, all produced by `stage`.
    """

    stage: int
    forward_ns: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Describe an interval of stages that can be one checkpointed segment.

    Attributes:
        start: First stage.
        stop: One past the last stage.
        replay_ns: Time of one replay that keeps nothing: forward time up to its last saved tensor (early stop) plus
            the host's overhead for the region.
        selective_ns: What is added to `replay_ns` when the save set is not empty (Python runs at every operator).
        operators: Operators that may be kept, indices into `Problem.operators`; those after the last saved tensor
            are not listed, for they are never replayed.
        block: Whether it is one of the model's repeated blocks, as a user would wrap by hand. Only the baselines
            (`all`, `uniform`, `sqrt`) look at it; blocks are disjoint.
        never_within: Boundaries, ascending: no segment that stops at one of them may have this one among its children.
    """

    start: int
    stop: int
    replay_ns: int
    selective_ns: int = 0
    operators: tuple[int, ...] = ()
    block: bool = False
    never_within: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """List blocks that are built alike, in the order of execution, and what corresponds in them.

    Attributes:
        bounds: By block, as many boundaries in each, ascending: where the block starts, boundaries inside it, and one
            past its last stage. Those in the same place correspond; a block may have others in between.
        operators: By block, the operators that correspond, as many in each: indices into `Problem.operators`.
    """

    bounds: tuple[tuple[int, ...], ...]
    operators: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """State where checkpoints may fall, what everything costs and what the budget is.

    Attributes:
        stages: The step's stages, in execution order.
        tensors: Every storage that some plan could keep or free.
        candidates: The intervals that can be segments. Any two are disjoint, nested, or overlap (then at most one of
            them is chosen). No two have the same start and stop.
        operators: Operators that save sets may name.
        fixed_bytes: What is alive throughout: parameters, buffers, the batch, optimizer state.
        floor_bytes: Largest total of moments that no plan changes (the optimizer's step), fixed bytes included.
        budget_bytes: Limit on the peak of the whole step.
        step_ns: Time of the whole step with nothing checkpointed; only percentages use it.
        kinds: Blocks to be treated alike, disjoint; only the solvers in `ALIKE` look at them.
    """

    stages: tuple[Stage, ...]
    tensors: tuple[Tensor, ...]
    candidates: tuple[Candidate, ...]
    operators: tuple[Operator, ...] = ()
    fixed_bytes: int = 0
    floor_bytes: int = 0
    budget_bytes: int
    step_ns: int = 0
    kinds: tuple[Kind, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Choose one candidate.

    Attributes:
        start: First stage, as in the candidate.
        stop: One past the last stage.
        keep: Its save set: indices into `Problem.operators`, ascending. Empty for nested segments and for those around
            them: what torch's selective checkpointing keeps, it keeps from the first forward on, so that a nested save
            set would take its bytes throughout.
        children: Segments nested inside it, ascending and disjoint.
            The last stage of a segment that saves a tensor must lie outside its children: under early stop a
            body that ends in another checkpoint is not replayed the number of times the model counts.
    """

    start: int
    stop: int
    keep: tuple[int, ...] = ()
    children: tuple[Segment, ...] = ()

    def walk(self) -> Iterator[Segment]:
        """Yield this segment, then everything nested in it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()
