"""torch's automatic selective checkpointing (torch.distributed._tools), run on a CPU and applied to a model.

One integer programme picks the modules to checkpoint and the share of its activations that each drops; a second one
picks the operators whose outputs that is. Applied as torch's pull request 140410 does: each module under a selective
checkpoint that counts operators. Both of torch's clocks are CUDA's. Here its benchmark of operators reads the CPU's
clock instead; nothing else of it is changed. Its curves are fitted by the package pwlf.
"""

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from hand_written import each_checkpointed
from models import Built
from remat.profiler.step import Step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker, _ModState
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator, SACStats
from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MODE = "operator-level-benchmark"
CPU = torch.device("cpu")


class NoAnswerError(RuntimeError):
    """Raised where torch's Auto-SAC cannot be asked, or finds nothing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Hold what to do with one module.

    Operators go by name and turn, as a save set's do: on fake tensors, which the estimate is made with, transformers
    builds a mask that a real forward does without, so places in the whole order would not agree.

    Attributes:
        module: Its path in the model.
        saved: By an operator's name, for each of its calls in order, whether the output is saved.
    """

    module: str
    saved: Mapping[str, Sequence[bool]]

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return what the module's forward and its replay run in."""
        return create_selective_checkpoint_contexts(partial(self._choose, Counter()))

    def _choose(self, turns: Counter, context, operator, *_, **__) -> CheckpointPolicy:
        if operator in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        name = operator.overloadpacket.__name__
        turn = turns[name, context.is_recompute]
        turns[name, context.is_recompute] += 1
        calls = self.saved.get(name, ())
        if turn >= len(calls):
            raise NoAnswerError(f"{self.module} calls {name} more often than the {len(calls)} times estimated")
        return CheckpointPolicy.MUST_SAVE if calls[turn] else CheckpointPolicy.PREFER_RECOMPUTE


class AutoSac:
    """Estimate a model's step once, then decide for any budget.

    Raises:
        NoAnswerError: torch's tools fail with the model.
    """

    def __init__(self, build: Callable[[], Built]) -> None:
        try:
            self._estimate(build)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            raise NoAnswerError(f"torch's estimate fails with {type(error).__name__}: {text[:120]}") from error

    def _estimate(self, build: Callable[[], Built]) -> None:
        with FakeTensorMode():
            model, batch, loss = build()
            step = Step.of(model, batch, loss)
            memory = _memory(step)
            with _cpu_clock():
                runtime, selective = RuntimeEstimator(), SACEstimator()
                with runtime(MODE):
                    step.train()
                model.zero_grad()
                with selective(MODE):
                    step.loss_of(step.forward())
            self.graph: Graph = parse_module_info(aggregate_stats(model, memory, runtime, selective, CPU))
        self.stats: dict[str, SACStats] = selective.sac_mod_stats

    def decide(self, budget_bytes: float) -> list[Decision]:
        """Return what torch would do under a budget of the step's peak.

        Raises:
            NoAnswerError: Its programme has no solution, or cannot be written down.
        """
        flat = [node for node in self.graph.nodes if not all(map(math.isfinite, node["slopes"]))]
        if flat:
            raise NoAnswerError(
                f"{len(flat)} modules ({flat[0]['fqn']} the first) have so few operators to choose from that their "
                f"trade-off curve is one point; the line that torch fits to it has slope {flat[0]['slopes'][0]}, which "
                "its integer programme refuses"
            )
        shares, _, peak = sac_milp(self.graph, budget_bytes / 2**30)
        if peak < 0:
            raise NoAnswerError("sac_milp finds no solution under this budget")
        return [self._decision(name, share) for name, share in shares.items()]

    def _decision(self, name: str, dropped: float) -> Decision:
        stats = self.stats[name]
        saved = get_optimal_checkpointing_policy_per_module(stats, 1 - dropped)
        if not saved:
            raise NoAnswerError(f"the choice of operators in {name} has no solution with {dropped:.0%} dropped")
        calls: dict[str, list[bool]] = defaultdict(list)
        for operator, choice in zip(stats.func_names, saved, strict=True):
            calls[operator].append(bool(choice))
        # Names begin with the class of the model itself.
        return Decision(name.partition(".")[2], calls)


def applied(model: nn.Module, decisions: Sequence[Decision]) -> AbstractContextManager:
    """Checkpoint a model's modules as decided."""
    modules = [model.get_submodule(decision.module) for decision in decisions]
    return each_checkpointed(modules, [decision.contexts for decision in decisions])


def _memory(step: Step) -> MemTracker:
    tracker = MemTracker()
    tracker.track_external(step.model)
    with tracker:
        held = step.train()
        del held
        after = tracker.get_tracker_snapshot("current")
        step.model.zero_grad()
    # The hook after backward is not called for modules whose inputs need no gradient.
    for stats in tracker.memory_tracking.values():
        stats.snapshots.setdefault(_ModState.POST_BW, [copy.deepcopy(after)])
    return tracker


@contextmanager
def _cpu_clock() -> Iterator[None]:
    with patch.multiple("torch.cuda", Event=_Event, current_stream=lambda: None, synchronize=lambda: None):
        yield


class _Event:
    """Stand in for a CUDA event."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = math.nan

    def record(self, stream: None) -> None:
        """Note the time."""
        self.at = time.perf_counter()

    def elapsed_time(self, other: "_Event") -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (other.at - self.at)
