"""Fused row-wise tensors for lookups by torch and FBGEMM, changed in place between batches.

One uint8 tensor per table, ``(num_rows, fused width)``: the input of
`torch.ops.quantized.embedding_bag_byte_rowwise_offsets` (8 bit) and `embedding_bag_4bit_rowwise_offsets`, and of
FBGEMM's operators on the CPU. A tensor keeps its address, so a module may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput, MissingDependency, Unsupported
from cnr_store.runtime.arguments import checked_choice
from cnr_store.serving.rows.fused_kernels import fused_row_bytes
from cnr_store.serving.sinks.positions import check_batch, check_positions
from cnr_store.serving.sinks.protocol import SinkState, SinkTable
from cnr_store.serving.sinks.stored_rows import StoredAs, check_rows, rows_to_bytes
from cnr_store.types import Float32s, RowIds

if TYPE_CHECKING:
    import torch

_STORED_AS: dict[int, StoredAs] = {8: "int8", 4: "int4"}

_MOST_WAITING = 16
"""Batches of changes that wait for `apply` before they are joined into one."""


class FusedRows:
    """A `RowSink` of fused 8-bit or 4-bit tensors in this process.

    A batch is fused beside the tensors. When they change depends on ``publish``: with ``"commit"`` in `commit`, so push
    the feed from the serving thread, between its batches; with ``"apply"`` in `apply`, which the serving thread calls
    between its batches, while the feed works on a thread of its own. Both take a copy of the changed rows' bytes and no
    longer. The tensors are not guarded against lookups meanwhile: that is what "between batches" means.

    Rows are rounded from the values of their version, never from what is served, so nothing builds up. An absent row
    (deleted, or never there) is zeros, whose scale and bias are zero too. Hashed tables have no place here: their keys
    are no positions.

    Memory: the tensors, and the fused bytes of rows that are committed but not applied; for a full batch over a table
    that is served already, a second table until it is applied.

    Parameters
    ----------
    bits
        8: scale and bias float32; 4: float16, so values up to 65,504, and an even dim for the operators.
    publish
        ``"apply"`` or ``"commit"``.
    name
        For messages and metrics.

    Raises
    ------
    BadInput
    MissingDependency
        There is no torch.
    """

    def __init__(
        self, *, bits: Literal[4, 8] = 8, publish: Literal["apply", "commit"] = "apply", name: str = "fused"
    ) -> None:
        checked_choice("bits", bits, tuple(_STORED_AS))
        checked_choice("publish", publish, ("apply", "commit"))
        if find_spec("torch") is None:
            raise MissingDependency('fused tensors need torch; pip install "cnr-store[train]"', found="torch")
        self.bits = bits
        self._publish = publish
        self.name = name
        self._lock = threading.Lock()  # of what is committed and not applied; not of the tensors
        self._tensors: dict[str, torch.Tensor] = {}
        self._dims: dict[str, int] = {}
        self._batch: _FusedBatch | None = None
        self._committed: list[_FusedBatch] = []
        self._state: SinkState | None = None
        self._shown: SinkState | None = None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by table, (num_rows, width) uint8; a table is there from the first batch that is applied."""
        return dict(self._tensors)

    @property
    def version(self) -> int | None:
        """The version of the tensors; None before the first."""
        return None if self._shown is None else self._shown.version

    def dim(self, table: str) -> int:
        """Return the values per row of a table; with 4 bits and an odd dim the tensor's width does not show it."""
        return self._dims[table]

    def open(self) -> SinkState | None:
        """Return what was committed last; an interrupted batch is dropped. No I/O."""
        self._batch = None
        return self._state

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        """Begin a batch; see `RowSink.begin`.

        Raises
        ------
        Unsupported
            A hashed table, or one that changes its size: a module holds the tensor.
        BadInput
            A batch of changes, where nothing was committed.
        """
        check_batch(self.name, tables, full=full, has_rows=self._state is not None)
        for table, shape in tables.items():
            tensor = self._tensors.get(table)
            width = fused_row_bytes(shape.dim, self.bits)
            if tensor is not None and tuple(tensor.shape) != (shape.num_rows, width):
                raise Unsupported(
                    f"table {table!r} of {self.name} changed from {tuple(tensor.shape)} to {(shape.num_rows, width)} "
                    "bytes, and the size of a tensor that a module uses cannot change; make another FusedRows",
                    table=table, expected=tuple(tensor.shape), found=(shape.num_rows, width),
                )  # fmt: skip
        self._batch = (
            _full_batch(tables, self.bits) if full else _FusedBatch(dict(tables), {}, {table: [] for table in tables})
        )

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        """Fuse rows beside the tensor; see `RowSink.put`.

        Raises
        ------
        NonFiniteValues, BadShape, BadRowIds, TableNotFound
        """
        batch = self._writing(table, row_ids)
        check_rows(table, row_ids, values, batch.tables[table].dim)
        stored = rows_to_bytes(_STORED_AS[self.bits], table, row_ids, values)
        batch.write(table, row_ids, stored)

    def delete(self, table: str, row_ids: RowIds) -> None:
        """Make rows zeros; see `RowSink.delete`.

        Raises
        ------
        BadRowIds, TableNotFound
        """
        batch = self._writing(table, row_ids)
        width = fused_row_bytes(batch.tables[table].dim, self.bits)
        batch.write(table, row_ids, np.zeros((len(row_ids), width), np.uint8))

    def commit(self, state: SinkState) -> None:
        """Make the batch what `apply` shows next, or show it now with ``publish="commit"``."""
        if self._batch is None:
            raise BadInput(f"{self.name} has no batch to commit: begin() one")
        batch, self._batch = self._batch, None
        with self._lock:
            self._committed = [batch] if batch.whole else [*self._committed, batch]
            if len(self._committed) > _MOST_WAITING:
                self._committed = [_joined(self._committed)]
            self._state = state
        if self._publish == "commit":
            self.apply()

    def abort(self) -> None:
        """Drop the batch."""
        self._batch = None

    def apply(self) -> bool:
        """Change the tensors to the last committed version; return whether there was a change.

        Call it where no lookup runs. Takes a copy of the changed rows' bytes; waits for nothing but that.
        """
        with self._lock:
            batches, self._committed = self._committed, []
            shown = self._state
        for batch in batches:
            self._scatter(batch)
        self._shown = shown
        return bool(batches)

    def _scatter(self, batch: _FusedBatch) -> None:
        import torch

        for table, rows in batch.whole.items():
            tensor = self._tensors.get(table)
            if tensor is None:
                self._tensors[table] = torch.from_numpy(rows)
                self._dims[table] = batch.tables[table].dim
            else:
                tensor.numpy()[...] = rows
        if batch.whole:
            for table in self._tensors.keys() - batch.whole.keys():
                self._tensors[table].zero_()
        for table, pieces in batch.changes.items():
            rows = self._tensors[table].numpy()
            for row_ids, stored in pieces:
                rows[row_ids] = stored

    def _writing(self, table: str, row_ids: RowIds) -> _FusedBatch:
        batch = self._batch
        if batch is None:
            raise BadInput(f"{self.name} has no batch to write to: begin() one", table=table)
        check_positions(self.name, batch.tables, table, row_ids)
        return batch


@dataclass(frozen=True, slots=True)
class _FusedBatch:
    """Fused rows on their way: whole tables of a full batch, or changed rows in pieces, of which later ones count."""

    tables: dict[str, SinkTable]
    whole: dict[str, npt.NDArray[np.uint8]]
    changes: dict[str, list[tuple[RowIds, npt.NDArray[np.uint8]]]]

    def write(self, table: str, row_ids: RowIds, stored: npt.NDArray[np.uint8]) -> None:
        if table in self.whole:
            self.whole[table][row_ids] = stored
        else:
            self.changes[table].append((row_ids.copy(), stored))


def _full_batch(tables: Mapping[str, SinkTable], bits: int) -> _FusedBatch:
    whole = {
        name: np.zeros((table.num_rows or 0, fused_row_bytes(table.dim, bits)), np.uint8)
        for name, table in tables.items()
    }
    return _FusedBatch(dict(tables), whole, {})


def _joined(batches: list[_FusedBatch]) -> _FusedBatch:
    """Return one batch that changes what these change, in order: a caller that does not apply must not fill memory."""
    first, *later = batches
    for batch in later:
        for table, pieces in batch.changes.items():
            for row_ids, stored in pieces:
                if table in first.whole:
                    first.whole[table][row_ids] = stored
                else:
                    first.changes.setdefault(table, []).append((row_ids, stored))
    for table, pieces in first.changes.items():
        ids = np.concatenate([row_ids for row_ids, _ in pieces] or [np.empty(0, np.int64)])
        if len(ids):
            stored = np.concatenate([rows for _, rows in pieces])
            unique, last = np.unique(ids[::-1], return_index=True)
            first.changes[table] = [(unique, stored[::-1][last])]
    return _FusedBatch({**first.tables, **batches[-1].tables}, first.whole, first.changes)
