"""Writes one rank's share of a save into a transaction: tables or their changed rows, dense tensors, values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from cnr_store.errors import BadInput
from cnr_store.integrations.dcp.layout import GatheredTensor, RankShare, ShardItems
from cnr_store.integrations.dcp.tracked_copy import TrackedCopy
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.training.tensors import TensorRows, as_array, as_tensor, dense_dtype_name, windows
from cnr_store.types import RowIds
from cnr_store.write.schema_changes import Declaration
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.whole_tables import TableValues

Resolve = Callable[[MetadataIndex], torch.Tensor]
"""Returns the tensor of an item: the local shard, on any device."""
RowsOf = Callable[[torch.Tensor], RowIds | None]
"""Returns which rows of a live tensor changed, local to it; None if nobody tracks it."""
Options = TableOptions | Mapping[str, TableOptions]


def options_of(table: str, options: Options) -> TableOptions:
    """Return the options of a table: those of the first pattern that its name matches; exact ones if none does."""
    if isinstance(options, TableOptions):
        return options
    chosen = (one for pattern, one in options.items() if fnmatchcase(table, pattern))
    return next(chosen, TableOptions.exact(nonfinite="escape"))


def write_whole(txn: Transaction, share: RankShare, resolve: Resolve, options: Options, ranks: Ranks) -> None:
    """Write all tables whole, as if none was stored. Blocks; all ranks call it, and all raise what one of them does."""
    tables: dict[str, list[Declaration]] = {}
    given: list[tuple[ShardItems, Declaration]] = []

    def declare() -> None:
        for one in share.shards:
            values, slots = _resolved(one, resolve)
            if any(isinstance(tensor, TrackedCopy) for tensor in (values, *slots.values())):
                raise BadInput(
                    f"table {one.table!r} must be written whole, because other tensors are saved than before or a "
                    "save failed, and the stager has copied changed rows only; nothing is lost, save again",
                    table=one.table,
                )
            rows = {slot: TensorRows(tensor) for slot, tensor in slots.items()}
            given.append((one, Declaration(TensorRows(values), rows, options_of(one.table, options))))
            tables.setdefault(one.table, []).append(given[-1][1])

    def put() -> None:
        txn.write_tables([
            TableValues(one.table, declared.values, declared.slots, rectangle=one.rectangle) for one, declared in given
        ])  # fmt: skip

    together(ranks, declare)
    txn.declare_tables(tables)
    together(ranks, put)


def write_changes(txn: Transaction, share: RankShare, resolve: Resolve, rows_of: RowsOf) -> None:
    """Write the rows that changed: those that a tracker names, else those whose codes are not the stored ones."""
    whole = set(txn.needs_whole_tables)
    for one in share.shards:
        values, slots = _resolved(one, resolve)
        if one.table in whole:
            rows = {slot: TensorRows(tensor) for slot, tensor in slots.items()}
            txn.write_table(one.table, TensorRows(values), slots=rows, rectangle=one.rectangle)
            continue
        local = values.row_ids if isinstance(values, TrackedCopy) else rows_of(values)
        if local is None:
            local = _changed(txn, one, values, slots)
        arrays = {name: _rows(tensor, local) for name, tensor in slots.items()}
        first = one.rectangle.rows[0]
        txn.write_rows(one.table, local + first, _rows(values, local), slots=arrays, rectangle=one.rectangle)


def _resolved(one: ShardItems, resolve: Resolve) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return resolve(one.values), {slot: resolve(index) for slot, index in one.slots.items()}


def _changed(txn: Transaction, one: ShardItems, values: torch.Tensor, slots: Mapping[str, torch.Tensor]) -> RowIds:
    """Return the rows, local to the shard, whose codes differ; compared in windows, so that no copy is as large."""
    first = one.rectangle.rows[0]
    tensors = (values, *slots.values())
    row_bytes = sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors)
    found = [np.empty(0, np.int64)]
    for start, stop in windows(len(values), row_bytes):
        arrays = {slot: as_array(tensor[start:stop]) for slot, tensor in slots.items()}
        window = as_array(values[start:stop])
        found.append(txn.changed_rows(one.table, first + start, window, slots=arrays, rectangle=one.rectangle))
    return np.concatenate(found) - first


def _rows(tensor: torch.Tensor, local: RowIds) -> Any:
    if isinstance(tensor, TrackedCopy):
        return as_array(tensor.rows)
    if len(local) == len(tensor):
        return as_array(tensor)
    return TensorRows(tensor)[local]


def write_dense(txn: Transaction, share: RankShare, resolve: Resolve, ranks: Ranks, known: Sequence[str]) -> None:
    """Hand the dense tensors to rank 0's transaction, those in pieces gathered. Blocks; all ranks call it.

    ``known``: the dense tensors of the head; those that are no more are dropped.
    """
    arrays: dict[str, Any] = {}
    dtypes: dict[str, str] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        arrays[name], dtypes[name] = as_array(tensor), dense_dtype_name(tensor, name)

    for index in share.dense:
        add(index.fqn, resolve(index))
    for one in share.gathered:
        whole = _gather(one, resolve, ranks)
        if whole is not None:
            add(one.name, whole)
    if ranks.rank == 0:
        for name in known:
            if name not in arrays:
                txn.drop_dense(name)
        carried = {name: dtype for name, dtype in dtypes.items() if dtype in ("bfloat16", "bool")}
        txn.put_dense(arrays, carried)


def _gather(one: GatheredTensor, resolve: Resolve, ranks: Ranks) -> torch.Tensor | None:
    """Return the tensor on rank 0. Blocks; all ranks call it. Every rank's memory: all pieces, for the moment."""
    mine: list[bytes] = []

    def read() -> None:
        dense_dtype_name(torch.empty(0, dtype=one.dtype), one.name)  # refused on all ranks alike
        mine.extend(as_array(resolve(index)).tobytes() for rank, index, _ in one.pieces if rank == ranks.rank)

    together(ranks, read)
    given = ranks.exchange(b"".join(mine))
    if ranks.rank > 0:
        return None
    whole = torch.empty(one.size, dtype=one.dtype, device="cpu")
    carrier = as_array(whole[..., :0] if whole.ndim else whole).dtype
    starts = [0] * ranks.world
    for rank, _, chunk in one.pieces:
        size = int(np.prod(chunk.sizes, dtype=np.int64)) * carrier.itemsize
        piece = np.frombuffer(given[rank][starts[rank] : starts[rank] + size], carrier).reshape(tuple(chunk.sizes))
        starts[rank] += size
        place = tuple(slice(at, at + length) for at, length in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[place] = as_tensor(piece.copy(), str(one.dtype).removeprefix("torch."))
    return whole
