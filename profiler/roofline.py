"""Price operators where their device is not there: by what they compute and move, against a card's peak rates.

An operator takes the longer of two times, as in the roofline model (Williams, Waterman and Patterson, 2009): its
floating-point operations at a share of the card's rate, and its bytes at a share of the card's bandwidth. Operations
are counted by torch's own formulas (`torch.utils.flop_counter`), bytes are those of arguments and results. The shares
are the card's `Efficiency`: assumed for those in the table, measured for those in a file of `remat calibrate`.

Not counted: launching kernels, waiting for other ranks, collectives, caches that keep bytes from moving twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from .cards import Card
from .step_record import BETWEEN_RANKS, Operator

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold what an operator call computes and moves.

    Attributes:
        flops: Floating-point operations of products, convolutions and attention; 0 for other operators.
        moved_bytes: Bytes of its tensor arguments and results; 0 where it makes a view.
        dtype: Name of its first floating-point argument's type, "" without one.
    """

    flops: int
    moved_bytes: int
    dtype: str


def cost(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    out: Any,
    *,
    moves: bool,
    written: Sequence[torch.Tensor] = (),
) -> Cost:
    """Count what one operator call computes and moves.

    Args:
        func: The operator's overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: The tensors among both.
        out: Its result.
        moves: Whether it writes memory; else it makes views.
        written: The arguments that it writes, which are what it makes where it returns nothing, as foreach kernels do.
    """
    packet = func.overloadpacket
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), None)
    name = "" if dtype is None else str(dtype).removeprefix("torch.")
    if not moves:
        return Cost(0, 0, name)
    outputs = [
        value for value in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(value, torch.Tensor)
    ]
    made = sum(_bytes(tensor) for tensor in outputs or written)
    # Of a table only the rows that are looked up are read.
    read = made if packet in _LOOKUPS else sum(_bytes(tensor) for tensor in inputs)
    return Cost(_flops(packet, args, kwargs, out), read + made, name)


_LOOKUPS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
_ON_CPU: dict[Any, Any] = {
    # The CPU's own kernel computes what the card's does, under another name.
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    if packet is _aten._grouped_mm:
        return _grouped_flops(args[0], args[1])
    formula: Callable[..., Any] | None = flop_registry.get(_ON_CPU.get(packet, packet))
    if formula is None:
        return 0
    # The backward of fused attention on a CPU takes no offsets and no philox state; its first arguments are the same.
    given = args[:4] if packet in _ON_CPU and "backward" in str(packet) else args
    counted = int(formula(*given, **kwargs, out_val=out))
    return counted // 2 if is_attention(str(packet)) and _is_causal(packet, args, kwargs) else counted


def _grouped_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Count what torch has no formula for: products of a mixture's experts, each with its part of the rows."""
    each = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
    return each * (a.shape[0] if a.dim() == b.dim() == 3 else 1)


def is_attention(name: str) -> bool:
    """Say whether an operator is a fused attention, by its name."""
    return "attention" in name


def _is_causal(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    for overload in packet.overloads():
        names = [argument.name for argument in getattr(packet, overload)._schema.arguments]
        if "is_causal" in names:
            position = names.index("is_causal")
            return position < len(args) and bool(args[position])
    return False


def _bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes, those of an expanded one once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def predicted_ns(operator: Operator, card: Card, *, tf32: bool = False) -> int:
    """Return how long an operator should take on a card, in nanoseconds: a prediction, never a measurement.

    Args:
        operator: The recorded operator.
        card: The card.
        tf32: Whether float32 products may take TF32.
    """
    if operator.operator.startswith(BETWEEN_RANKS):
        return 0  # Gathering and reducing hide behind computing, as far as is known.
    moving = operator.moved_bytes / (card.reached.bandwidth * card.bandwidth)
    if not operator.flops:
        return round(1e9 * moving)
    share = card.reached.attention if is_attention(operator.operator) else card.reached.products
    computing = operator.flops / (share * card.rate(operator.dtype, tf32=tf32))
    return round(1e9 * max(moving, computing))
