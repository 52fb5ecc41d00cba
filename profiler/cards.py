"""Know what named cards can hold and do, by their makers' data sheets: a step is priced where no card is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from remat.near_names import did_you_mean

GIB = 2**30
TERA = 10**12


class CardError(ValueError):
    """Raised when a card's name is not in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Hold one card's figures, all of them nominal.

    Attributes:
        name: What it is called here, "h100-80gb".
        memory_bytes: What torch reports as the card's total, the driver's context (some hundred MiB) included.
        bandwidth: Bytes per second between memory and chip.
        rates: Dense floating-point operations per second by torch dtype, "bfloat16"; without structured sparsity, with
            sums in 32 bits. "tf32" is what float32 matrix products take where they are allowed to. A type the card has
            no instructions for is not there.
        capability: CUDA compute capability, which decides what kernels torch takes.
        source: Where the figures are from.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    rates: Mapping[str, float]
    capability: tuple[int, int]
    source: str

    def rate(self, dtype: str, *, tf32: bool = False) -> float:
        """Return dense operations per second in a torch dtype ("float32"); unknown types count as float32.

        Args:
            dtype: Name of the dtype, without "torch.".
            tf32: Whether float32 products may take TF32.
        """
        if dtype == "float32" and tf32:
            return self.rates.get("tf32", self.rates["float32"])
        return self.rates.get(dtype, self.rates["float32"])


def card(name: str) -> Card:
    """Return a card by name; case, blanks and underscores do not matter.

    Raises:
        CardError: There is no such card; the message lists those there are.
    """
    wanted = str(name).strip().lower().replace("_", "-").replace(" ", "-")
    wanted = _OTHER_NAMES.get(wanted, wanted)
    if wanted not in CARDS:
        is_kind = wanted.partition(":")[0] in ("cuda", "gpu", "cpu")
        question = "for the device that is here leave device= (--card) out;" if is_kind else did_you_mean(wanted, CARDS)
        raise CardError(f"unknown card {name!r}: {question}{' ' if question else ''}cards known are {', '.join(CARDS)}")
    return CARDS[wanted]


def _card(
    name: str, memory_gib: float, bandwidth_gb: float, capability: tuple[int, int], source: str, **tera: float
) -> Card:
    return Card(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        bandwidth=bandwidth_gb * 1e9,
        rates=MappingProxyType({dtype: rate * TERA for dtype, rate in tera.items()}),
        capability=capability,
        source=source,
    )


# Data sheets print rates with structured sparsity for cards from Ampere on; half of those is dense. Totals are those in
# torch's own out-of-memory messages in public reports, where one was found; else the data sheet's in decimal bytes,
# which is a few per cent less.
_HOPPER = {
    "float64": 33.5,
    "float32": 66.9,
    "tf32": 494.7,
    "float16": 989.4,
    "bfloat16": 989.4,
    "float8_e4m3fn": 1978.9,
}
_AMPERE = {"float64": 9.7, "float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_A100 = "NVIDIA A100 data sheet, June 2021"
_H100 = "NVIDIA H100 data sheet and Hopper white paper V1.04"
_V100 = "NVIDIA V100 data sheet, January 2020 (NVLink); it has no bfloat16"
_ADA = "NVIDIA Ada white paper V2.1, appendix A"
_SHEET = "; total from the data sheet"

CARDS: Mapping[str, Card] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            _card("t4-16gb", 14.75, 320, (7, 5), "NVIDIA T4 data sheet; no bfloat16", float32=8.1, float16=65.0),
            _card("v100-16gb", 16e9 / GIB, 900, (7, 0), _V100 + _SHEET, **_VOLTA),
            _card("v100-32gb", 31.74, 900, (7, 0), _V100, **_VOLTA),
            _card("a100-40gb", 39.50, 1555, (8, 0), _A100, **_AMPERE),
            _card("a100-80gb", 79.25, 2039, (8, 0), f"{_A100} (SXM)", **_AMPERE),
            _card("a100-80gb-pcie", 79.25, 1935, (8, 0), f"{_A100} (PCIe)", **_AMPERE),
            _card(
                "a10-24gb",
                24e9 / GIB,
                600,
                (8, 6),
                f"NVIDIA A10 data sheet, March 2021{_SHEET}",
                float32=31.2,
                tf32=62.5,
                float16=125.0,
                bfloat16=125.0,
            ),
            _card(
                "rtx3090-24gb",
                23.68,
                936,
                (8, 6),
                "NVIDIA GA102 white paper V2, table 9",
                float32=35.6,
                tf32=35.6,
                float16=71.0,
                bfloat16=71.0,
            ),
            _card("rtx4090-24gb", 23.52, 1008, (8, 9), _ADA, float32=82.6, tf32=82.6, float16=165.2, bfloat16=165.2),
            _card(
                "l4-24gb",
                24e9 / GIB,
                300,
                (8, 9),
                f"NVIDIA L4 data sheet, 2023{_SHEET}",
                float32=30.3,
                tf32=60.0,
                float16=121.0,
                bfloat16=121.0,
                float8_e4m3fn=242.5,
            ),
            _card(
                "l40s-48gb",
                48e9 / GIB,
                864,
                (8, 9),
                f"NVIDIA L40S data sheet, 2023{_SHEET}",
                float32=91.6,
                tf32=183.0,
                float16=362.05,
                bfloat16=362.05,
                float8_e4m3fn=733.0,
            ),
            _card("h100-80gb", 79.11, 3350, (9, 0), f"{_H100} (SXM5)", **_HOPPER),
            _card(
                "h100-80gb-pcie",
                79.11,
                2000,
                (9, 0),
                f"{_H100} (PCIe)",
                float64=25.6,
                float32=51.2,
                tf32=378.0,
                float16=756.0,
                bfloat16=756.0,
                float8_e4m3fn=1513.0,
            ),
            _card(
                "h100-96gb-hbm2e",
                96e9 / GIB,
                2400,
                (9, 0),
                "torchtitan's benchmark pages of December 2024: 96 GB HBM2e at 2.4 TB/s; rates of the SXM5, which that "
                "card, limited to 500 W, does not reach",
                **_HOPPER,
            ),
            _card("h200-141gb", 141e9 / GIB, 4800, (9, 0), f"NVIDIA H200 data sheet, 2024{_SHEET}", **_HOPPER),
            _card(
                "b200-180gb",
                180e9 / GIB,
                8000,
                (10, 0),
                f"NVIDIA DGX B200 data sheet, 2024, an eighth of it{_SHEET}",
                float64=37.0,
                float32=75.0,
                tf32=1125.0,
                float16=2250.0,
                bfloat16=2250.0,
                float8_e4m3fn=4500.0,
            ),
        )
    }
)
"""Every card known, by name."""

_OTHER_NAMES = {
    "t4": "t4-16gb",
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "a10": "a10-24gb",
    "rtx3090": "rtx3090-24gb",
    "rtx-3090": "rtx3090-24gb",
    "rtx4090": "rtx4090-24gb",
    "rtx-4090": "rtx4090-24gb",
    "l4": "l4-24gb",
    "l40s": "l40s-48gb",
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "b200": "b200-180gb",
}
