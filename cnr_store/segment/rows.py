"""The ids of rows that a caller gives: int64, ascending, unique, inside the table. Pure."""

from __future__ import annotations

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
