"""The bitmaps of all devices behind one set of table names.

Why this module exists: tables may lie on several devices, and rows are marked where their ids are. One bitmap per
device keeps marking local to it; the tracker and its callers go on thinking of tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from cnr_store.errors import TableNotFound
from cnr_store.types import RowIds
from cnr_store_gpu.bitmap import Ids, OutOfRange, RowBitmap, Taken
from cnr_store_gpu.words import Words


class DeviceBitmaps:
    """One ``RowBitmap`` per device; each method does what that of ``RowBitmap`` does for the table's own.

    Parameters
    ----------
    tables
        (rows, device) of each table, by name. Tables of one device share one bitmap, in this order.
    on_host
        As for ``RowBitmap``.
    """

    def __init__(self, tables: Mapping[str, tuple[int, torch.device]], *, on_host: bool | None = None) -> None:
        rows: dict[torch.device, dict[str, int]] = {}
        for table, (num_rows, device) in tables.items():
            rows.setdefault(device, {})[table] = num_rows
        self._bitmaps = {device: RowBitmap(own, device, on_host=on_host) for device, own in rows.items()}
        self._by_table = {table: self._bitmaps[device] for table, (_, device) in tables.items()}

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table, by name."""
        return {table: bitmap.table_rows[table] for table, bitmap in self._by_table.items()}

    @property
    def by_device(self) -> dict[torch.device, RowBitmap]:
        """The bitmaps; live."""
        return dict(self._bitmaps)

    @property
    def size_bytes(self) -> int:
        """Bytes of all words."""
        return sum(bitmap.size_bytes for bitmap in self._bitmaps.values())

    def of(self, table: str) -> RowBitmap:
        """Return the bitmap that has the table; raises TableNotFound."""
        try:
            return self._by_table[table]
        except KeyError:
            raise TableNotFound(f"no table {table!r} here; there are {sorted(self._by_table)}", table=table) from None

    def mark(self, table: str, ids: Ids, *, skip_row: int | None = None, out_of_range: OutOfRange = "raise") -> None:
        """Mark rows as changed."""
        self.of(table).mark(table, ids, skip_row=skip_row, out_of_range=out_of_range)

    def mark_all(self, table: str) -> None:
        """Mark every row of the table."""
        self.of(table).mark_all(table)

    def mark_mask(self, table: str, mask: torch.Tensor) -> None:
        """Mark the rows where a mask is true."""
        self.of(table).mark_mask(table, mask)

    def or_words(self, table: str, words: Words) -> None:
        """Mark the rows whose bits are set."""
        self.of(table).or_words(table, words)

    def row_ids(self, table: str) -> RowIds:
        """Return the marked rows; the marks stay."""
        return self.of(table).row_ids(table)

    def count(self, table: str) -> int:
        """Return how many rows of the table are marked; waits for its device."""
        return self.of(table).count(table)

    def any(self) -> bool:
        """Return whether any row of any table is marked; waits for the devices."""
        return any(bitmap.any() for bitmap in self._bitmaps.values())

    def take(self, table: str) -> RowIds:
        """Return the table's marked rows and clear them."""
        return self.of(table).take(table)

    def take_all(self, tables: Iterable[str] | None = None) -> dict[str, Taken]:
        """Return the marked rows of every table and clear them; one wait per device."""
        wanted = list(self._by_table if tables is None else tables)
        taken: dict[str, Taken] = {}
        for bitmap in dict.fromkeys(self.of(table) for table in wanted):
            taken.update(bitmap.take_all([table for table in wanted if self._by_table[table] is bitmap]))
        return {table: taken[table] for table in wanted}

    def give_back(self, taken: Taken | Mapping[str, Taken]) -> None:
        """Mark taken rows again."""
        for one in (taken,) if isinstance(taken, Taken) else taken.values():
            self.of(one.table).give_back(one)

    def clear(self) -> None:
        """Forget all marks."""
        for bitmap in self._bitmaps.values():
            bitmap.clear()
