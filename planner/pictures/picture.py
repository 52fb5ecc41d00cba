"""The figure that all pictures are: matplotlib's, and shown by a notebook whatever backend is chosen."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Picture(Figure):
    """Show a matplotlib Figure in notebooks without pyplot, which would keep it and choose a backend."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=90)
        return buffer.getvalue()
