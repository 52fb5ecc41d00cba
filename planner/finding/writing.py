"""Write what was found as a plan, or as the refusal of a budget that nothing fits."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ...profiler import Profile
from ...profiler.step import Step
from ...profiler.step_record import CHANGES_ARGUMENT
from ..budget import format_bytes, meant_words
from ..by_name import function_name, policy_of
from ..circumstances import Circumstances
from ..errors import InfeasibleBudgetError
from ..fingerprint import Fingerprint
from ..plan import BatchTensor, Plan
from .alike_cost import less_without
from .explain import explain_peak, held_output

if TYPE_CHECKING:
    from .effort import Effort
    from .planner import Found, Planner


EVAL_MODE = (
    "this plan does nothing in training: it was made in eval mode, and acts in eval mode only; call model.train() and "
    "plan again"
)


def plan_of(found: Found, *, budget_bytes: int, headroom: float) -> Plan:
    """Return what was found as a plan, with all that was promised about it and the circumstances it holds for.

    Args:
        found: What was found.
        budget_bytes: The budget that was asked for, headroom included.
        headroom: Share of it that was kept free.
    """
    planner, draft = found.planner, found.draft
    recorded, solution, session, dry_runs = planner.profile, draft.solution, planner.session, planner.search.dry_runs
    card, step_ns = session.card, max(1, recorded.step_ns)
    model = session.step.model
    is_estimate = recorded.times_from.is_estimate or recorded.step_time_from.is_estimate
    return Plan(
        segments=draft.segments,
        training=model.training,
        ranks=planner.ranks,
        units=planner.units,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=draft.peak_bytes,
        predicted_overhead=solution.added_ns / step_ns,
        predicted_overhead_range=_overhead_range(recorded, solution.added_ns),
        measured_overhead=found.overhead,
        measured_overhead_range=found.overhead_range,
        unrestricted_overhead=found.unrestricted,
        unplanned_peak_bytes=dry_runs.unplanned_peak_bytes(),
        lower_bound_overhead=solution.lower_bound_ns / step_ns,
        gap=solution.gap,
        solver=solution.solver,
        status=str(solution.status.value),
        circumstances=Circumstances(
            autocast=planner.autocast,
            device=session.place.words if card is None else f"cuda ({card.name}, not there: predicted)",
            card=planner.options.device or "",
            loss=function_name(planner.options.loss),
            accumulation=recorded.accumulation,
            holds_output=planner.options.holds_output,
            optimizer=planner.options.optimizer_name,
            optimizer_bytes=recorded.parts.optimizer,
            optimizer_step_peak_bytes=recorded.parts.optimizer_step_peak,
            library_bytes=recorded.library_bytes,
            whole_step_bytes=dry_runs.whole_step_bytes(),
            headroom=headroom,
            exclude=planner.options.exclude,
            only=planner.options.only,
            alike=planner.options.alike,
            mp_policy=policy_of(planner.options.mp_policy),
            reshard_after_forward=planner.options.reshard_after_forward,
            parallelize=function_name(planner.options.parallelize),
        ),
        bytes_from="measured" if card is None and session.ranks is None else "estimated",
        times_from="estimated" if is_estimate else "measured",
        fingerprint=Fingerprint.of(model, calls=tuple(call.module for call in recorded.calls)),
        batch=batch_tensors(session.step),
        versions=_versions(),
        notes=_notes(found),
    )


def infeasible(
    found: Found, *, budget: int | str, budget_bytes: int, headroom: float, effort: Effort, of: str = ""
) -> InfeasibleBudgetError:
    """Return the error that says that nothing fits: the least peak, its plan, and what holds it there.

    Args:
        found: The plan of least peak.
        budget: The budget as it was given.
        budget_bytes: The same in bytes, headroom included.
        headroom: Share of it that was to be kept free.
        effort: How it was searched for.
        of: With which of several batches the peak is reached, "" where there is one.
    """
    planner, least = found.planner, found.draft
    plan = plan_of(found, budget_bytes=least.peak_bytes, headroom=0.0)
    kind = "" if effort.solver == "auto" else f"{effort.solver} "
    limit = int(budget_bytes * (1 - headroom))
    reserved = f" ({format_bytes(limit)} after {headroom:.0%} headroom)" if headroom else ""
    holders = explain_peak(least.dry_run.record, planner.profile, least.peak_bytes)
    each = f" on each of {planner.ranks} ranks" if planner.ranks > 1 else ""
    cache = cache_words(planner)
    refused = _refusals(planner, besides=CHANGES_ARGUMENT if cache else "")
    because = f" Not replayable: {'; '.join(refused[:3])}." if refused else ""
    alike = less_without(planner.bridge, least, effort)
    remarks = [words for words in (*planner.bridge.scope.notes(), alike, _held_output(found)) if words]
    because += "".join(f" {words[0].upper()}{words[1:]}." for words in remarks)
    found_words = f" {cache}. The smallest peak found so is" if cache else ": the smallest peak found is"
    needed = _budget_for(least.peak_bytes, headroom)
    return InfeasibleBudgetError(
        f"no {kind}plan fits {format_bytes(budget_bytes)}{reserved}{each}{found_words} "
        f"{format_bytes(least.peak_bytes)}, {of}at the {holders}.{because} Raise the budget to {format_bytes(needed)} "
        f"({needed} bytes), make the batch smaller, or shorten what holds it (for logits: a chunked loss)."
        f"{meant_words(budget, planner.profile.parts.parameters)}",
        least_peak_bytes=least.peak_bytes,
        plan=plan,
    )


def cache_words(planner: Planner) -> str:
    """Say that a key-value cache keeps blocks from being replayed, and how to do without; "" where none does.

    It continues a verdict. Nobody need have asked for the cache: transformers' configurations have it on.
    """
    step = planner.session.step
    given = step.kwargs.get("use_cache")
    configs = (getattr(module, "config", None) for module in step.model.modules())
    if not (any(getattr(config, "use_cache", False) is True for config in configs) if given is None else given):
        return ""
    refused = {item.module for item in planner.bridge.refusals() if item.reason == CHANGES_ARGUMENT}
    outermost = [path for path in refused if not any(path.startswith(f"{other}.") for other in refused)]
    if not outermost:
        return ""
    blocks = f"{len(outermost)} block{'s' if len(outermost) > 1 else ''}"
    return (
        f"with use_cache on, which keeps {blocks} from being replayed: set model.config.use_cache = False (or put "
        "use_cache=False into the batch) and plan again"
    )


def _budget_for(peak_bytes: int, headroom: float) -> int:
    """Return the least budget that a peak fits with the headroom kept free."""
    budget = math.ceil(peak_bytes / (1 - headroom))
    return budget if int(budget * (1 - headroom)) >= peak_bytes else budget + 1


def batch_tensors(step: Step) -> tuple[BatchTensor, ...]:
    """Describe the batch's tensors, by their place or name."""
    named: list[tuple[str, Any]] = [(str(position), value) for position, value in enumerate(step.args)]
    named += list(step.kwargs.items())
    return tuple(
        BatchTensor(name=name, shape=tuple(value.shape), dtype=str(value.dtype), device=str(value.device))
        for name, value in named
        if hasattr(value, "shape") and hasattr(value, "dtype")
    )


def _notes(found: Found) -> tuple[str, ...]:
    planner, draft = found.planner, found.draft
    beside = draft.dry_run.beside_bytes
    context = (
        f"{format_bytes(planner.session.context_bytes)} of it for the context"
        if planner.session.card is None
        else "by a model of its allocator; the driver's context (some hundred MiB) and NCCL are not counted"
    )
    told = (
        "" if planner.session.step.model.training else EVAL_MODE,
        f"budget and peaks are what the card reserves: {format_bytes(beside)} beside what tensors take, {context}"
        if beside
        else "",
        *planner.profile.notes,
        _gathered_whole(planner),
        _held_output(found),
        *planner.bridge.scope.notes(),
        draft.solution.note,
        *found.notes,
        *(f"not replayed: {words}" for words in _refusals(planner)),
        _other_shapes(planner),
    )
    return tuple(dict.fromkeys(note for note in told if note))


def _other_shapes(planner: Planner) -> str:
    """Say what is promised for other shapes: of the same operators on smaller tensors, none allocates more."""
    if planner.profile.bytes_from != "dry run":
        return ""
    reserved = planner.session.budget_on == "reserved"
    gaps = ", though a card may reserve more for shapes that vary" if reserved else ""
    return f"smaller batches need no more memory (if the same operators run){gaps}; times are for these shapes"


def _gathered_whole(planner: Planner) -> str:
    """Say that ranks gather the whole model, where nothing was said of its units; "" else."""
    if planner.ranks == 1 or planner.units or planner.options.parallelize is not None:
        return ""
    return (
        f"all parameters are gathered at once on each of {planner.ranks} ranks, as by fully_shard(model) alone: name "
        "modules that are sharded on their own, its blocks say, by units= (--units)"
    )


def _held_output(found: Found) -> str:
    draft, planner = found.draft, found.planner
    if not planner.options.holds_output:
        return ""
    floor_bytes = planner.profile.parts.optimizer_step_peak + draft.dry_run.beside_bytes
    return held_output(draft.dry_run.record, draft.peak_bytes, floor_bytes)


def _refusals(planner: Planner, *, besides: str = "") -> list[str]:
    """Say which modules no segment holds, grouped by reason; those for one reason may be told already."""
    reasons: dict[str, list[str]] = {}
    for item in planner.bridge.refusals():
        if item.reason != besides:
            reasons.setdefault(item.reason, []).append(item.module)
    return [
        f"{_listed(modules)}, because {'it' if len(modules) == 1 else 'each'} {reason}"
        for reason, modules in reasons.items()
    ]


def _overhead_range(recorded: Profile, added_ns: int) -> tuple[float, float]:
    """Return an overhead's range: replays spread as the forward does, over a step as long or short as it was seen."""
    forward, step = recorded.forward, recorded.step
    if recorded.step_time_from.is_estimate:
        # Both are one measurement: they vary together.
        return added_ns / max(1, step.median_ns), added_ns / max(1, step.median_ns)
    share = added_ns / max(1, forward.median_ns)
    return share * forward.low_ns / max(1, step.high_ns), share * forward.high_ns / max(1, step.low_ns)


def _listed(modules: list[str]) -> str:
    """Name the first few modules."""
    more = len(modules) - 3
    return ", ".join(modules[:3]) + (f" and {more} more" if more > 0 else "")


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("remat", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
