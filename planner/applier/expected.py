"""Tell the user, once for each applied plan, of a step that is not the one planned for: exact, but perhaps larger."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from ..circumstances import autocast_now, precision_words
from ..plan import Plan
from .internals import autocast_is_on
from .thread_state import CallKey

_SHOWN = 3
_log = logging.getLogger("remat")


class Expected:
    """What a plan's figures rest on, and what was already told of a step that differs.

    Args:
        plan: The plan.
        calls: Every call that is the member of a segment, with the segment's name.
        root: The model that the plan is applied to.
    """

    def __init__(self, plan: Plan, calls: dict[CallKey, str], root: nn.Module) -> None:
        self._autocast = plan.circumstances.autocast
        self._device = plan.circumstances.device.partition(" ")[0] or "cpu"
        batches = [entry.tensors for entry in plan.batches] or [plan.batch]
        self._shapes = [{tensor.name: tensor.shape for tensor in tensors} for tensors in batches]
        self._circumstances_told = plan.fingerprint is None
        # Of the parameter whose gradient is the largest: it stands for all of them, as looking at each takes time.
        trained = [(tensor.numel(), name) for name, tensor in root.named_parameters() if tensor.requires_grad]
        self._largest = max(trained)[1] if trained and plan.fingerprint and not plan.circumstances.accumulation else ""
        self._with_gradients = 0
        self._is_as_planned = False
        self._calls_told = False
        self._calls = calls
        # By module, the calls that at least must come.
        self._least: dict[int, int] = {}
        for key, index in calls:
            self._least[key] = max(self._least.get(key, 0), index + 1)

    def begin_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell, once each, of gradients and of a larger batch; note whether autocast is as planned for."""
        if self._largest:
            self._check_gradients(root)
        if not self._circumstances_told:
            self._is_as_planned = self._precision_is_planned()
            self._check_batch(args, kwargs)

    def check_precision(self) -> None:
        """Warn, once, of other autocast settings than planned for, at a segment's beginning.

        There again, because a trainer may have put its autocast around the model's own forward, inside what a plan put
        there. Where the forward began as planned, or a segment did, other settings are those of a part of the model.
        """
        if self._circumstances_told or self._is_as_planned:
            return
        self._is_as_planned = self._precision_is_planned()
        if not self._is_as_planned:
            now = precision_words(autocast_now(self._device))
            self._tell_of_circumstances(f"with {now}, planned with {precision_words(self._autocast)}")

    def _precision_is_planned(self) -> bool:
        return not (autocast_is_on() or self._autocast) or autocast_now(self._device) == self._autocast

    def _check_gradients(self, root: nn.Module) -> None:
        """Log, once, that steps begin with gradients, which were planned to be made in backward; one alone is no habit.

        No warning: the step may be as planned in all else, and what is above the promise is within many budgets.
        """
        try:
            there = root.get_parameter(self._largest).grad is not None
        except AttributeError:
            there = False  # A parametrization has taken the parameter's place since.
        self._with_gradients += there
        if self._with_gradients < 2:
            return
        self._largest = ""
        _log.warning(
            "steps under the plan begin with gradients of an earlier backward, and it was planned without: they are "
            "exact, but their peak may be above the promised one, by the gradients. If they accumulate, plan with "
            "accumulation=True; else free them before forward: optimizer.zero_grad() before it, with set_to_none=True"
        )

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of a batch that is larger than each of those planned for, in whatever dimension."""
        named = (*((str(k), v) for k, v in enumerate(args)), *kwargs.items())
        given = {name: tuple(value.shape) for name, value in named if isinstance(value, torch.Tensor)}
        larger = [[name for name in given if _is_larger(given[name], planned.get(name))] for planned in self._shapes]
        if all(larger):
            name = larger[0][0]
            planned = " or ".join(str(list(shapes[name])) for shapes in self._shapes)
            self._tell_of_circumstances(
                f"with argument {name!r} of shape {list(given[name])}, larger than planned ({planned})"
            )

    def _tell_of_circumstances(self, difference: str) -> None:
        self._circumstances_told = True
        warnings.warn(
            f"a step under the plan runs {difference}: it is exact, but its peak may be above the promised one; plan "
            "again as the step is run",
            stacklevel=2,
        )

    def check_calls(self, counts: dict[int, int], cut: list[str], compiled: frozenset[int]) -> None:
        """Warn, once, of planned calls that a forward has not made, and of segments that did not end as planned.

        Args:
            counts: The forward's calls with gradients, by module.
            cut: Segments that were ended before their last call came.
            compiled: Modules whose calls are not counted, because they run inside compiled ones.
        """
        if self._calls_told:
            return
        if not (cut or any(counts.get(key, 0) < least and key not in compiled for key, least in self._least.items())):
            return
        self._calls_told = True
        never = [
            where for (key, index), where in self._calls.items() if counts.get(key, 0) <= index and key not in compiled
        ]
        names = list(dict.fromkeys((*never, *cut)))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            "a forward under the plan made other calls than were planned (layers dropped, or another way through "
            f"forward?): of segment {', '.join(names[:_SHOWN])}{more} not all calls came, or not in order. The step "
            "is exact, but its peak may be above the promised one; this is said once",
            stacklevel=2,
        )


def _is_larger(shape: tuple[int, ...], planned: tuple[int, ...] | None) -> bool:
    """Say whether a tensor is larger in some dimension than planned; with other dimensions, whether in elements."""
    if planned is None:
        return False
    if len(shape) != len(planned):
        return torch.Size(shape).numel() > torch.Size(planned).numel()
    return any(size > most for size, most in zip(shape, planned, strict=True))
