"""Rows of a table by raw id: the map that a managed-collision module of TorchRec (ZCH) keeps, as a state has it.

Such a module gives each raw id a row of a dense table, and takes rows away again. Its map is saved as two dense tensors
in the commit of the rows. Whoever looks rows up by raw id must take both from one state: a row may have another id in
the next. Needs no TorchRec; the names are those of the state dict of `MCHManagedCollisionModule` (torchrec 1.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.errors import DoesNotApply, TableNotFound
from cnr_store.read.snapshot import Snapshot
from cnr_store.types import RowIds

_COLLECTION, _RAW_IDS, _ROWS = "_managed_collision_modules.", "._mch_sorted_raw_ids", "._mch_remapped_ids_mapping"


@dataclass(frozen=True, slots=True, eq=False)
class IdMap:
    """The map of one table: row ``row_ids[i]`` is that of ``raw_ids[i]``; int64 (num_rows,) both.

    Raw ids ascend; places without an id are the last ones and have the largest int64.
    """

    raw_ids: RowIds
    row_ids: RowIds

    def find(self, raw_ids: RowIds) -> tuple[RowIds, npt.NDArray[np.bool_]]:
        """Return the row of each raw id, int64 (n,), and which ids have one of their own, bool (n,). No I/O.

        As the module does it: all other ids share the last row of the table. Ids are those after the module's
        ``input_hash_func``, if it has one.
        """
        at = np.searchsorted(self.raw_ids[:-1], raw_ids)
        is_known = self.raw_ids[at] == raw_ids
        return np.where(is_known, self.row_ids[at], len(self.row_ids) - 1), is_known


def read_id_map(snapshot: Snapshot, table: str) -> IdMap:
    """Return the map from raw ids to rows of a table, as it was at a snapshot. Blocks; reads two dense tensors.

    Examples
    --------
    ``row_ids, is_known = read_id_map(snapshot, table).find(raw_ids)``, then
    ``snapshot.table(table).read_rows(row_ids)``: both of one version.

    Raises
    ------
    TableNotFound
        There is no such table, or no map of it.
    DoesNotApply
        The map is of another number of rows than the table, its raw ids do not ascend, or a row is outside the table.
    CorruptStore
    """
    names = map_names(table, snapshot.dense)
    found = checked_map(table, snapshot.table(table).schema.num_rows, names, snapshot.read_many_dense(names))
    _check_values(table, names, found)
    return found


def _check_values(table: str, names: tuple[str, str], found: IdMap) -> None:
    """Raise unless raw ids ascend, each once but for the places without an id, and all rows are in the table."""
    raw_ids, row_ids = found.raw_ids, found.row_ids
    is_free = raw_ids[1:] == np.iinfo(np.int64).max
    if not ((raw_ids[1:] > raw_ids[:-1]) | is_free).all():
        raise DoesNotApply(
            f"{names[0]!r} is no map of table {table!r}: its raw ids do not ascend, so an id would not be found; save "
            "the module's own state",
            table=table, expected="ascending raw ids",
        )  # fmt: skip
    outside = np.flatnonzero((row_ids < 0) | (row_ids >= len(row_ids)))
    if len(outside):
        row = int(row_ids[outside[0]])
        raise DoesNotApply(
            f"{names[1]!r} is no map of table {table!r}: it names row {row}, and the table has {len(row_ids)} rows",
            table=table, expected=f"rows below {len(row_ids)}", found=row,
        )  # fmt: skip


def checked_map(table: str, num_rows: int, names: tuple[str, str], tensors: Mapping[str, npt.NDArray[Any]]) -> IdMap:
    """Return the map that two dense tensors make up. No I/O.

    Raises
    ------
    DoesNotApply
    """
    raw_ids, row_ids = (tensors[name] for name in names)
    for name, tensor in zip(names, (raw_ids, row_ids), strict=True):
        if tensor.shape != (num_rows,) or tensor.dtype != np.int64 or not num_rows:
            raise DoesNotApply(
                f"table {table!r} has {num_rows} rows, but {name!r} is {tensor.dtype} {tensor.shape}; the map of a "
                "table has an int64 for each row, and that of one shard finds no rows of the whole table",
                table=table, expected=f"int64 ({num_rows},)", found=f"{tensor.dtype} {tensor.shape}",
            )  # fmt: skip
    return IdMap(raw_ids, row_ids)


def map_names(table: str, dense: Iterable[str]) -> tuple[str, str]:
    """Return the names of the dense tensors with a table's raw ids and their rows. No I/O.

    Where modules have tables of one name, the map is that of the innermost module that both are in.

    Raises
    ------
    TableNotFound
        No tensors are its map, or those of several modules could be.
    """
    return _map_names(table, tuple(dense))


@lru_cache(maxsize=64)
def _map_names(table: str, dense: tuple[str, ...]) -> tuple[str, str]:
    maps = [name.removesuffix(_RAW_IDS) for name in dense if name.endswith(_RAW_IDS) and _COLLECTION in name]
    named = [one for one in maps if table.endswith(f".{one.partition(_COLLECTION)[2]}.weight")]
    owned = [one for one in named if table.startswith(_owner(one))]
    found = sorted(owned, key=len)[-1:] if len(named) > 1 else named
    if len(found) != 1 or found[0] + _ROWS not in dense:
        raise TableNotFound(
            f"there is no map of raw ids for table {table!r}: of tables of that name there are {named}; all maps are "
            f"{maps}",
            table=table, found=named,
        )  # fmt: skip
    return found[0] + _RAW_IDS, found[0] + _ROWS


def _owner(path: str) -> str:
    """Return the path, with its dot, of the module that has a map's collection beside the tables."""
    return path.partition(_COLLECTION)[0].removesuffix("_managed_collision_collection.")
