"""The bitmaps of all devices, by table name.

Why this module exists: tables may lie on several devices, and rows are marked where their ids are. One bitmap per
device keeps marking local to it; the tracker and its callers go on thinking of tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from cnr_store.errors import TableNotFound
from cnr_store_gpu.bitmap import RowBitmap, Taken


class DeviceBitmaps:
    """One ``RowBitmap`` per device. Its methods are those that look at all devices; for one table ask `of`.

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

    def any(self) -> bool:
        """Return whether any row of any table is marked; waits for the devices."""
        return any(bitmap.any() for bitmap in self._bitmaps.values())

    def take_all(self, tables: Iterable[str] | None = None) -> dict[str, Taken]:
        """Return the marked rows of every table and clear them; one wait per device."""
        wanted = list(self._by_table if tables is None else tables)
        taken: dict[str, Taken] = {}
        for bitmap in dict.fromkeys(self.of(table) for table in wanted):
            taken.update(bitmap.take_all([table for table in wanted if self._by_table[table] is bitmap]))
        return {table: taken[table] for table in wanted}

    def clear(self) -> None:
        """Forget all marks."""
        for bitmap in self._bitmaps.values():
            bitmap.clear()
