"""What a notebook shows of a value: a heading, a table, and remarks below it, as HTML without styles of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1, notes: Iterable[str] = ()
) -> str:
    """Return a table for people.

    Args:
        title: A line above it.
        header: Names of its columns.
        rows: Its cells, for people.
        text: How many columns, from the left, hold words; the others are numbers.
        notes: Lines below it.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ("left" if column < text else "right" for column in range(len(cells)))
        made = (
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<p><b>{escape(title)}</b></p>\n<table>\n{line(header, 'th')}\n{body}\n</table>\n{below}"
