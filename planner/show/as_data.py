"""Results as plain data, for programs: what the command line prints with --json."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pandas as pd

from ...profiler.cards import Card
from ...profiler.records import Profile
from ..compare import Comparison
from ..largest_batch import BatchSearch
from ..pictures.stages import memory_by_module
from ..pictures.timeline import memory_parts
from ..plan import Plan
from ..verify import Verification


def of_profile(profile: Profile, rows: int) -> dict[str, Any]:
    """Return where the memory is: bytes by part and by module, and times in nanoseconds."""
    return {
        "model": profile.model,
        "device": profile.device,
        "peak_bytes": profile.peak_bytes(),
        "peak_moment": profile.peak_moment(),
        "step_ns": profile.step_ns,
        "forward_ns": profile.forward_ns,
        "parts": {name: nbytes for name, nbytes, _ in memory_parts(profile)},
        "modules": _rows(memory_by_module(profile, rows)),
        "bytes_from": str(profile.bytes_from),
        "times_from": str(profile.times_from),
        "step_time_from": str(profile.step_time_from),
        "notes": list(profile.notes),
    }


def of_card(card: Card) -> dict[str, Any]:
    """Return a card's figures as its file has them: bytes, bytes per second, operations per second."""
    return card.figures()


def of_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as its file has it: saved, it can be loaded."""
    return json.loads(plan.to_json())


def of_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the rows of a comparison; what is not known is null."""
    return {"unplanned_peak_bytes": comparison.unplanned_peak_bytes, "plans": _rows(comparison.frame)}


def of_verification(verification: Verification) -> dict[str, Any]:
    """Return what a verification found."""
    return {**asdict(verification), "within_budget": verification.within_budget}


def of_batch_search(search: BatchSearch) -> dict[str, Any]:
    """Return the chosen size, what was found at every size, and the chosen size's plan."""
    verification = None if search.verification is None else of_verification(search.verification)
    return {
        "budget_bytes": search.budget_bytes,
        "size": search.size,
        "tried": _rows(search.to_frame()),
        "plan": of_plan(search.plan),
        "verification": verification,
    }


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows, in which what is not known is None."""
    return json.loads(frame.to_json(orient="records") or "[]")
