"""The ids of rows that a caller gives: int64, ascending, unique, inside the table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cnr_store.errors import BadRowIds
from cnr_store.types import RowIds


def check_row_ids(rows: Any, num_rows: int | None = None, *, first_row: int = 0, table: str | None = None) -> RowIds:
    """Return ``rows`` if they are int64 (n,), ascending, unique and inside the table.

    Parameters
    ----------
    rows
        The ids to check.
    num_rows
        Rows of the table; None for hashed tables, where any int64 is a key.
    first_row
        The first row that the caller holds, where it holds the rows from there to ``num_rows``.
    table
        Named in the error.

    Raises
    ------
    BadRowIds
        Naming the first offender and its position.
    """
    of_table = f" of table {table!r}" if table else ""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.int64 or rows.ndim != 1:
        found = f"{rows.dtype} with shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise BadRowIds(
            f"row ids{of_table} must be a one-dimensional int64 array, found {found}",
            table=table,
            expected="int64 (n,)",
            found=found,
        )
    if rows.size == 0:
        return rows
    # Compared, not subtracted: the difference of two int64 keys can overflow.
    out_of_order = rows[1:] <= rows[:-1]
    if out_of_order.any():
        at = int(np.argmax(out_of_order)) + 1
        what = "repeats" if rows[at] == rows[at - 1] else "is smaller than"
        raise BadRowIds(
            f"row ids{of_table} must be ascending and unique: id {rows[at]} at position {at} {what} the id before it "
            f"({rows[at - 1]}); sort them and drop duplicates",
            table=table,
            expected="ascending, unique",
            found=int(rows[at]),
        )
    if num_rows is not None and (rows[0] < 0 or rows[-1] >= num_rows):
        at = 0 if rows[0] < 0 else int(np.searchsorted(rows, num_rows))
        raise BadRowIds(
            f"row id {rows[at]} at position {at} is outside table{f' {table!r}' if table else ''} with {num_rows} rows",
            table=table,
            expected=[0, num_rows],
            found=int(rows[at]),
        )
    if num_rows is not None and rows[0] < first_row:
        raise BadRowIds(
            f"row {int(rows[0])}{of_table} is not of this writer's rows {first_row} to {num_rows - 1}; row ids are "
            "those of the whole table",
            table=table,
            expected=(first_row, num_rows),
            found=int(rows[0]),
        )
    return rows


def own_row_ids(given: Sequence[Any], ranges: Sequence[tuple[int, int] | None], tables: Sequence[str]) -> list[RowIds]:
    """Return copies of the row ids of several tables, checked as `check_row_ids` does, all of them at once.

    Parameters
    ----------
    given
        Row ids, one array for each table.
    ranges
        The rows that the caller holds of each table, half-open; None for hashed tables.

    Raises
    ------
    BadRowIds
        As `check_row_ids` of the first table whose ids are wrong.
    """
    is_plain = all(isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1 for rows in given)
    if is_plain and given:
        joined: RowIds = np.concatenate(given)
        ends = np.cumsum([len(rows) for rows in given])
        bounds = ends.tolist()
        if _are_in_ranges(joined, ends, ranges):
            return [joined[start:stop] for start, stop in zip([0, *bounds], bounds, strict=False)]
    return [
        check_row_ids(
            rows, None if held is None else held[1], first_row=0 if held is None else held[0], table=table
        ).copy()
        for rows, held, table in zip(given, ranges, tables, strict=True)
    ]


def _are_in_ranges(joined: RowIds, ends: RowIds, ranges: Sequence[tuple[int, int] | None]) -> bool:
    """Whether ids that stand end to end are ascending and unique in each range, and inside it."""
    if not len(joined):
        return True
    ascending = joined[1:] > joined[:-1]
    ascending[ends[(ends > 0) & (ends < len(joined))] - 1] = True  # from one table to the next
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    any_key = np.iinfo(np.int64)
    lowest = np.array([any_key.min if one is None else one[0] for one in ranges], np.int64)
    highest = np.array([any_key.max if one is None else one[1] - 1 for one in ranges], np.int64)
    filled = ends > starts
    first, last = joined[starts[filled]], joined[ends[filled] - 1]
    inside = (first >= lowest[filled]) & (last <= highest[filled])
    return bool(ascending.all() and inside.all())
