"""HTML for notebooks: one small table, every text in it escaped. No I/O."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a titled table as HTML without styles, so that it takes on the notebook's.

    >>> html_table("t <1>", ["a"], [[1_000]]).partition("<tbody>")[2]
    '<tr><td>1,000</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<strong>{html.escape(title)}</strong><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else html.escape(str(value))
