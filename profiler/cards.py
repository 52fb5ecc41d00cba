"""Know what cards can hold and do, by data sheets or a file of measurements: steps are priced where none is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from remat.near_names import did_you_mean
from remat.whole_file import write_whole

FORMAT = 1
"""The version of a card's file."""
GIB = 2**30
TERA = 10**12


class CardError(ValueError):
    """Raised when a card's name is not in the table, or its file does not hold a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Say which share of a card's peak rates operators reach.

    The defaults are what large matrix products, flash attention and elementwise kernels are commonly seen to reach on
    A100 and H100. Absolute times stand and fall with them; ratios between plans hardly do, since a replay and the step
    it is added to are priced alike.

    Attributes:
        products: Of matrix products and convolutions, of the dense rate.
        attention: Of fused attention, of the same; its operations are halved where a causal mask skips half.
        bandwidth: Of everything, of the memory's bandwidth.
    """

    products: float = 0.65
    attention: float = 0.5
    bandwidth: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Hold one card's figures: nominal ones from a data sheet, or measured ones.

    Attributes:
        name: What it is called here, "h100-80gb"; of a measured one the file that holds it.
        memory_bytes: What torch reports as the card's total, the driver's context (some hundred MiB) included.
        bandwidth: Bytes per second between memory and chip.
        rates: Dense floating-point operations per second by torch dtype, "bfloat16"; without structured sparsity, with
            sums in 32 bits. "tf32" is what float32 matrix products take where they are allowed to. A type the card has
            no instructions for is not there.
        capability: CUDA compute capability, which decides what kernels torch takes.
        source: Where the figures are from.
        reached: Which share of the rates operators reach.
        measured: Whether rates and bandwidth were measured.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    rates: Mapping[str, float]
    capability: tuple[int, int]
    source: str
    reached: Efficiency = Efficiency()
    measured: bool = False

    @property
    def rates_words(self) -> str:
        """Return what times are predicted from, continuing "predicted from"."""
        if self.measured:
            return f"rates that were {self.source}"
        return "the card's peak rates, so that absolute ones are rough"

    def save(self, path: str | Path) -> None:
        """Write the figures to a JSON file that `device=` and `--card` take in place of a name.

        Raises:
            OSError: The file cannot be written.
        """
        write_whole(Path(path), json.dumps(self.figures(), indent=2) + "\n")

    def figures(self) -> dict[str, Any]:
        """Return what its file holds, as plain data."""
        return {
            "format": FORMAT,
            "source": self.source,
            "measured": self.measured,
            "memory_bytes": self.memory_bytes,
            "bandwidth": self.bandwidth,
            "rates": dict(self.rates),
            "reached": asdict(self.reached),
            "capability": list(self.capability),
        }

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
    """Return a card by name, in which case, blanks and underscores do not matter, or by a file of `remat calibrate`.

    Raises:
        CardError: There is no such card, and the message lists those there are; or the file holds none.
    """
    if str(name).endswith(".json"):
        return _from_file(str(name))
    wanted = str(name).strip().lower().replace("_", "-").replace(" ", "-")
    wanted = _OTHER_NAMES.get(wanted, wanted)
    if wanted not in CARDS:
        is_kind = wanted.partition(":")[0] in ("cuda", "gpu", "cpu")
        question = "for the device that is here leave device= (--card) out;" if is_kind else did_you_mean(wanted, CARDS)
        raise CardError(f"unknown card {name!r}: {question}{' ' if question else ''}cards known are {', '.join(CARDS)}")
    return CARDS[wanted]


def _from_file(name: str) -> Card:
    try:
        figures = json.loads(Path(name).read_text(encoding="utf-8"))
        known = figures.pop("format")
        if known != FORMAT:
            raise CardError(f"{name} is a card's file of format {known}, this remat reads {FORMAT}: calibrate again")
        return Card(
            name=name,
            memory_bytes=int(figures["memory_bytes"]),
            bandwidth=float(figures["bandwidth"]),
            rates=MappingProxyType({str(dtype): float(rate) for dtype, rate in figures["rates"].items()}),
            capability=(int(figures["capability"][0]), int(figures["capability"][1])),
            source=str(figures["source"]),
            reached=Efficiency(**figures["reached"]),
            measured=bool(figures["measured"]),
        )
    except OSError as error:
        raise CardError(f"the card's file {name} cannot be read: {error.strerror or error}") from error
    except CardError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CardError(
            f"{name} does not hold a card's figures ({type(error).__name__}: {error}); make one with: remat calibrate "
            f"--out {name}"
        ) from error


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
