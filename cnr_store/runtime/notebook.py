"""HTML for notebooks: small tables, every text in them escaped. No I/O."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence

_MOST_RECORDS = 20
"""Records of one list that a report shows."""


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a titled table as HTML without styles, so that it takes on the notebook's.

    >>> html_table("t <1>", ["a"], [[1_000]]).partition("<tbody>")[2]
    '<tr><td>1,000</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<strong>{html.escape(title)}</strong><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class ShownReport:
    """Base of a dataclass that a notebook shows as a table of its fields, and each list of records as one more."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        lists = {name: value for name, value in fields.items() if _is_records(value)}
        alone = [(name, len(value) if name in lists else value) for name, value in fields.items()]
        return html_table(type(self).__name__, ("", "value"), alone) + "".join(
            _records_table(name, value) for name, value in lists.items()
        )


def _is_records(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(dataclasses.is_dataclass(one) for one in value)


def _records_table(name: str, records: Sequence[object]) -> str:
    columns = [field.name for field in dataclasses.fields(records[0])]  # type: ignore[arg-type]
    rows = [[getattr(record, column) for column in columns] for record in records[:_MOST_RECORDS]]
    left_out = len(records) - len(rows)
    return html_table(f"{name}, the first {len(rows)}" if left_out else name, columns, rows)


def _cell(value: object) -> str:
    if value is None or value == ():
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else html.escape(str(value))
