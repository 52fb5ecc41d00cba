"""What a plan file says of options that it cannot hold: FSDP2's policies and functions, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Policy = dict[str, str | bool | None]
"""FSDP2's `MixedPrecisionPolicy` by name: its dtypes as "bfloat16", its switches as they are."""


def policy_of(policy: MixedPrecisionPolicy | None) -> Policy | None:
    """Return a mixed-precision policy by name."""
    if policy is None:
        return None
    values = {item.name: getattr(policy, item.name) for item in fields(policy)}
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in values.items()
    }


def policy_named(policy: Policy | None) -> MixedPrecisionPolicy | None:
    """Return the mixed-precision policy that `policy_of` wrote down."""
    if policy is None:
        return None
    # Imported here: a model that is not sharded needs none of it.
    from torch.distributed.fsdp import MixedPrecisionPolicy

    values: dict[str, Any] = {
        name: getattr(torch, value) if isinstance(value, str) else value for name, value in policy.items()
    }
    return MixedPrecisionPolicy(**values)


def policy_words(policy: Policy) -> str:
    """Say what a mixed-precision policy does."""
    verbs = {"computing": policy.get("param_dtype"), "reducing": policy.get("reduce_dtype")}
    return ", ".join(f"{verb} in {dtype}" for verb, dtype in verbs.items() if dtype)


def function_name(function: Callable[..., Any] | None) -> str:
    """Return what a function is called, for a file that cannot hold it: "shard", or the class of an object."""
    if function is None:
        return ""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))
