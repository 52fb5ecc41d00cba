"""The one legend of all pictures: what each colour, hatch and marker means, here and in the report.

A colour means one thing. Memory has the colours of Okabe and Ito; what a plan does with a stage has those of the memory
that it leaves behind, darker the more often the stage runs; solvers have eight others, and a marker each. A test
looks at them as colour-blind readers see them; hatches and markers repeat what they say, for print.
"""

from __future__ import annotations

from dataclasses import dataclass

INK, PALE = "#000000", "#BBBBBB"
"""Lines and words; grids and what is beside the point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Hold how a thing is drawn.

    Attributes:
        colour: Of its area or line.
        hatch: Of its area, as matplotlib writes it.
        second: Colour of the hatch; white where it stands for nothing itself.
        marker: Of its points, as matplotlib writes it.
        symbol: The same as plotly names it.
    """

    colour: str
    hatch: str = ""
    second: str = "#FFFFFF"
    marker: str = ""
    symbol: str = ""


_KEPT, _RECOMPUTED = "#E69F00", "#D55E00"

BESIDE = "allocated or reserved beside tensors"
"""What no recorded tensor accounts for: a library's own, and on a card what its allocator reserves in gaps."""
MEMORY: dict[str, Look] = {
    "parameters": Look(colour="#0072B2"),
    "optimizer state": Look(colour="#CC79A7"),
    "buffers and batch": Look(colour="#CFCFCF"),
    "gradients": Look(colour="#009E73"),
    "activations kept for backward": Look(colour=_KEPT),
    "recomputed activations": Look(colour=_RECOMPUTED, hatch="////"),
    "temporaries": Look(colour="#56B4E9"),
    "gathered parameters and collectives": Look(colour="#F0E442", hatch="...."),
    BESIDE: Look(colour="#4D4D4D", hatch="\\\\\\\\"),
}
"""What memory is used for, in the order in which it is stacked, from below."""

TREATMENTS: dict[str, Look] = {
    "kept": Look(colour=_KEPT),
    "recomputed, some outputs kept": Look(colour=_KEPT, hatch="////", second=_RECOMPUTED),
    "recomputed": Look(colour=_RECOMPUTED, hatch="////"),
    "recomputed more than once": Look(colour="#7A2500", hatch="xxxx"),
}
"""What a plan can do with a stage."""

SOLVERS: dict[str, Look] = {
    "auto": Look(colour="#9000F0", marker="o", symbol="circle"),
    "dp": Look(colour="#187860", marker="s", symbol="square"),
    "ilp": Look(colour="#7848C0", marker="^", symbol="triangle-up"),
    "dp_nested": Look(colour="#18A8A8", marker="D", symbol="diamond"),
    "greedy": Look(colour="#786000", marker="v", symbol="triangle-down"),
    "sqrt": Look(colour="#90A800", marker="P", symbol="cross"),
    "uniform": Look(colour="#78A860", marker="X", symbol="x"),
    "all": Look(colour="#9090D8", marker="h", symbol="hexagon"),
    "none": Look(colour=INK, marker="*", symbol="star"),
}
"""One look for each solver."""


def treatment_of(*, replays: int, keeps: bool) -> str:
    """Name what a plan does with a stage.

    Args:
        replays: How often it runs again.
        keeps: Whether outputs of some of its operators are kept.
    """
    names = tuple(TREATMENTS)
    if replays > 1:
        return names[3]
    return names[0] if replays == 0 else names[1] if keeps else names[2]
