"""Draws a table as lines of text: each column as wide as its widest cell, narrower where a terminal has no room. Pure.

A log has ten thousand lines: rich, which lays out and styles each cell, takes a millisecond for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import cell_len, chop_cells

GAP = 2
"""Spaces between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and its cells as text of one line.

    ``is_number`` puts the cells on the right. A column that ``keeps_width`` is never made narrower.
    """

    heading: str
    cells: Sequence[str]
    is_number: bool = False
    keeps_width: bool = False

    @property
    def width(self) -> int:
        """Terminal columns that the widest cell, or the heading, takes."""
        return max(cell_len(self.heading), max(map(cell_len, self.cells), default=0))


def widths_within(columns: Sequence[Column], room: int) -> list[int]:
    """Return the widths of the columns: the widest ones become narrower until all of them fit ``room``.

    >>> columns = [Column("a", ["x" * 9]), Column("b", ["y" * 30]), Column("t", ["z" * 8], keeps_width=True)]
    >>> widths_within(columns, 100), widths_within(columns, 30), widths_within(columns, 20)
    ([9, 30, 8], [9, 9, 8], [4, 4, 8])
    """
    widths = [column.width for column in columns]
    excess = sum(widths) + GAP * (len(widths) - 1) - room
    while excess > 0:
        widest = max(
            (width for width, column in zip(widths, columns, strict=True) if not column.keeps_width), default=1
        )
        if widest == 1:
            break
        index = next(i for i, column in enumerate(columns) if not column.keeps_width and widths[i] == widest)
        widths[index] -= 1
        excess -= 1
    return widths


def drawn(
    columns: Sequence[Column], widths: Sequence[int], rule: str = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
) -> Iterator[str]:
    """Return the lines of a table, without spaces at their ends: the headings, a rule, and the rows.

    >>> for line in drawn([Column("name", ["a", "bcdef"]), Column("rows", ["7", "1234"], is_number=True)], [4, 4], "-"):
    ...     print(line)
    name  rows
    ----------
    a        7
    bcde  1234
    f
    """
    yield from _row([column.heading for column in columns], columns, widths)
    yield rule * (sum(widths) + GAP * (len(widths) - 1))
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield from _row(cells, columns, widths)


def _row(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        padded = []
        for part, column, width in zip(parts, columns, widths, strict=True):
            spaces = " " * (width - cell_len(part))
            padded.append(spaces + part if column.is_number else part + spaces)
        yield (" " * GAP).join(padded).rstrip()


def _folded(text: str, width: int) -> list[str]:
    """Return text as lines of at most ``width``: broken between words, and within a word that is wider.

    >>> _folded("a long note", 6), _folded("abcdefgh", 3)
    (['a long', 'note'], ['abc', 'def', 'gh'])
    """
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        pieces = chop_cells(word, width)
        lines[-1:] = [lines[-1], *pieces] if lines[-1] else pieces
    return lines
