"""Wait for a model's first call in training, and act before it runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class FirstCall:
    """Stand in for a model's forward until the model is called to train; then act first, and step aside.

    A forward hook would come too late: a module looks its forward up before it runs its hooks.
    """

    def __init__(self, model: nn.Module, act: Callable[[dict[str, Any]], None]) -> None:
        self._model, self._act = model, act
        self._previous = vars(model).get("forward")
        # Signatures are read from it.
        functools.update_wrapper(self, model.forward)
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; the first time in training, act before."""
        model = self._model
        if not (model.training and torch.is_grad_enabled()):
            return self.__wrapped__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.take_off()
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        positional = dict(zip(bound.arguments, bound.args, strict=False)) if args else {}
        self._act({**positional, **kwargs})
        return model.forward(*args, **kwargs)

    def take_off(self) -> None:
        """Give the model its own forward back, if this stands there."""
        if vars(self._model).get("forward") is self:
            if self._previous is None:
                del self._model.forward
            else:
                self._model.forward = self._previous
