"""Checks of sinks whose rows are found by position: what they can hold, and which rows they are given. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cnr_store.errors import BadInput, BadRowIds, TableNotFound, Unsupported
from cnr_store.runtime.arguments import some_of
from cnr_store.serving.sinks.protocol import SinkTable
from cnr_store.types import RowIds


def check_batch(name: str, tables: Mapping[str, SinkTable], *, full: bool, has_rows: bool) -> None:
    """Refuse changes of nothing, and hashed tables, whose keys are no positions; ``name`` is the sink's.

    Raises
    ------
    BadInput, Unsupported
    """
    if not (full or has_rows):
        raise BadInput(f"{name} has no rows yet: its first batch must be a full one")
    for table, shape in tables.items():
        if shape.num_rows is None:
            raise Unsupported(
                f"table {table!r} is hashed, and rows of {name} are looked up by position; leave it out of {name}",
                table=table,
            )


def check_positions(name: str, tables: Mapping[str, SinkTable], table: str, row_ids: RowIds) -> None:
    """Refuse rows that a table does not have, and tables that there are not.

    Raises
    ------
    TableNotFound, BadRowIds
    """
    if table not in tables:
        raise TableNotFound(f"{name} has no table {table!r}; it has {some_of(tables, table)}", table=table)
    num_rows = tables[table].num_rows
    assert num_rows is not None  # `check_batch`
    if len(row_ids) and not 0 <= row_ids.min() <= row_ids.max() < num_rows:
        raise BadRowIds(
            f"rows {row_ids.min()} to {row_ids.max()} of table {table!r} are not all in [0, {num_rows})",
            table=table, expected=(0, num_rows), found=(int(row_ids.min()), int(row_ids.max())),
        )  # fmt: skip
