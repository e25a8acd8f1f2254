"""Touched rows of one table as a caller gives them to a transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cnr_store.segment.codes import Array
from cnr_store.types import Rectangle, RowIds


@dataclass(frozen=True, slots=True, eq=False)
class RowUpdate:
    """New values of some rows of a table: what `Transaction.write_many` takes of each.

    Attributes
    ----------
    table
        Name of the table.
    row_ids, values, slots, nonfinite, rectangle
        As for `Transaction.write_rows`.
    """

    table: str
    row_ids: RowIds
    values: Array
    slots: Mapping[str, Array] = field(default_factory=dict)
    nonfinite: Literal["refuse", "escape"] | None = None
    rectangle: Rectangle | None = None
