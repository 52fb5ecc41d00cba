"""Measure a card once: its memory, and the rates that large operators reach on it, as a `Card` that can be saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from statistics import median
from types import MappingProxyType

import torch
from torch.nn.functional import scaled_dot_product_attention

from .cards import Card, Efficiency
from .devices import DeviceError, device_of, is_out_of_memory

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Say how large the operators are that are timed: large enough to reach what a card reaches.

    Attributes:
        rows: Rows and columns of the square matrices that are multiplied.
        copied_bytes: What is copied within the card's memory.
        attention: Batch, heads, sequence length and head size of the attention that is timed.
        repeats: How often each is timed, after one run that is not; the median counts.
    """

    rows: int = 8192
    copied_bytes: int = 1 << 30
    attention: tuple[int, int, int, int] = (4, 16, 4096, 128)
    repeats: int = 10


ON_CPU = Sizes(rows=1024, copied_bytes=1 << 28, attention=(1, 8, 1024, 64))


def calibrate(device: torch.device | str, sizes: Sizes | None = None) -> Card:
    """Measure a device's memory bandwidth and its rates of products and attention, in some seconds.

    Every rate is that of one large operator run again and again; smaller ones reach less.

    Args:
        device: What to measure. A CPU's figures serve to compare predictions with what is measured on it.
        sizes: How large the operators are; unless given they are smaller on a CPU.

    Returns:
        A card of which the rates are what is reached, so that its shares are 1 but for attention, whose share is of the
        rate of products in the same type. It has no name until it is saved and read again.

    Raises:
        DeviceError: There is no such device, or it is of a kind that is not known.
    """
    device = torch.device(device)
    sizes = sizes or (ON_CPU if device.type == "cpu" else Sizes())
    place = device_of(device)
    if not place.is_there():
        raise DeviceError(f"there is no {device} here to be measured: run this on the machine that has the card")
    rates: dict[str, float] = {}
    for dtype in DTYPES:
        _note(rates, str(dtype).removeprefix("torch."), lambda dtype=dtype: _product_rate(device, dtype, sizes))
    if place.capability >= (8, 0):
        with _tf32():
            _note(rates, "tf32", lambda: _product_rate(device, torch.float32, sizes))
    fused = torch.bfloat16 if "bfloat16" in rates else torch.float16 if "float16" in rates else torch.float32
    attention = _attention_rate(device, fused, sizes) / rates[str(fused).removeprefix("torch.")]
    return Card(
        name="",
        memory_bytes=place.total_bytes,
        bandwidth=_bandwidth(device, sizes),
        rates=MappingProxyType(rates),
        capability=place.capability,
        source=f"measured on {place.words}, {date.today().isoformat()}, torch {torch.__version__}",
        reached=Efficiency(products=1.0, attention=attention, bandwidth=1.0),
        measured=True,
    )


def _note(rates: dict[str, float], name: str, measure: Callable[[], float]) -> None:
    """Measure a rate, where the card has the type and the room; float32, which stands for others, must be there."""
    try:
        rates[name] = measure()
    except RuntimeError as error:
        if name == "float32" or not (is_out_of_memory(error) or "not implemented" in str(error)):
            raise


def _product_rate(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    a, b, out = (torch.ones(sizes.rows, sizes.rows, dtype=dtype, device=device) for _ in range(3))
    return 2 * sizes.rows**3 / _seconds(device, lambda: torch.mm(a, b, out=out), sizes.repeats)


def _attention_rate(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    batch, heads, length, size = sizes.attention
    q, k, v = (torch.ones(sizes.attention, dtype=dtype, device=device) for _ in range(3))
    flops = 4 * batch * heads * length * length * size
    with torch.no_grad():
        return flops / _seconds(device, lambda: scaled_dot_product_attention(q, k, v), sizes.repeats)


def _bandwidth(device: torch.device, sizes: Sizes) -> float:
    source, target = (torch.ones(sizes.copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * sizes.copied_bytes / _seconds(device, lambda: target.copy_(source), sizes.repeats)


def _seconds(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    place = device_of(device)
    times: list[float] = []
    for _ in range(repeats + 1):
        place.synchronize()
        start = time.perf_counter()
        run()
        place.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])


@contextmanager
def _tf32() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
