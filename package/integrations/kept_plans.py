"""Plans kept in a folder, each under a name made of everything it was made for: a second start needs no planning."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from remat.planner import Plan, PlanFileError
from remat.planner.circumstances import autocast_now
from remat.planner.fingerprint import Fingerprint
from remat.profiler.devices import device_of
from torch import nn
from torch.utils import _pytree as pytree

_log = logging.getLogger("remat")
_VERSIONS = ("remat", "torch", "transformers", "lightning", "accelerate")


class KeptPlans:
    """Find and keep plans in a folder.

    Args:
        folder: Made when a plan is kept; None keeps nothing.
        asked: What was asked for: budget, solver, options of the step.
        model: The model.
        batch: The batch, as it enters the model.

    Attributes:
        path: The file that the plan is kept in; None where none is.
    """

    def __init__(self, folder: Path | None, asked: Mapping[str, object], model: nn.Module, batch: object) -> None:
        self.path = None if folder is None else folder / f"plan-{_key(asked, model, batch)}.json"

    def find(self) -> Plan | None:
        """Return the plan kept for all of this; None where there is none, or none that can be read, which is logged."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            return Plan.load(self.path)
        except PlanFileError as error:
            _log.warning("remat: the plan kept in %s cannot be read, and is made anew: %s", self.path, error)
            return None

    def keep(self, plan: Plan) -> None:
        """Write a plan, whole or not at all."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(self.path)


def _key(asked: Mapping[str, object], model: nn.Module, batch: object) -> str:
    """Return a short name for what a plan was made for: model, shapes, precision, device, options and versions."""
    device = next(model.parameters()).device
    facts = {
        "asked": {name: _words(value) for name, value in asked.items()},
        "model": asdict(Fingerprint.of(model)),
        # Settings that no shape shows: dropout, the implementation of attention.
        "settings": [repr(model), str(getattr(model, "config", ""))],
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "training": model.training,
        "batch": [_words(leaf) for leaf in pytree.tree_leaves(batch)],
        "autocast": autocast_now(device.type),
        "device": device_of(device).words,
        "versions": {package: _version(package) for package in _VERSIONS},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _words(value: Any) -> str:
    """Describe a value the same way in every process."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return str([_words(item) for item in value])
    return getattr(value, "__qualname__", type(value).__qualname__)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
