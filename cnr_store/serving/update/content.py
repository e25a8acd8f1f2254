"""What rows of a table are at a version, read from its chain in the form that a consumer holds them.

Column intervals are put together here. A row that is in one state in some columns and in another elsewhere counts as an
escape row: its floats are exact, and no difference can be added to it without its codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import carrier
from cnr_store.errors import NonFiniteValues
from cnr_store.read.plan import Columns, TablePlan, by_columns, plan_table
from cnr_store.read.replay import ChunkReader, finish
from cnr_store.read.table_reader import read_codes
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import CODED, ESCAPED, TASK_ROWS, Array, EscapeRows, TableCodes, array_specs
from cnr_store.serving.rows.served_table import Overlay, RowKind, ServedTable
from cnr_store.types import RowIds

Status = npt.NDArray[np.uint8]


class CodesTooWide(Exception):
    """Codes leave int16: the table is held in int32 from here on. Never leaves this package's movers."""


@dataclass(frozen=True, slots=True)
class Content:
    """Rows as they are held, (n, kind.width); their status, None where all are coded; and rows kept as exact floats.

    ``escapes`` counts positions among the rows, not ids; only where codes are held. What stands at absent rows of
    ``rows`` is the fill where values are held, and means nothing where codes are.
    """

    rows: Array
    status: Status | None
    escapes: EscapeRows


@dataclass(slots=True)
class _ColumnEscapes:
    columns: Columns
    status: Status | None
    escapes: EscapeRows


@dataclass(slots=True)
class ContentBuilder:
    """Makes `Content` of the codes that `restore.read_codes` hands out: its ``take``.

    Attributes
    ----------
    plan, kind
        The table, and how its rows are held.
    place
        Rows [start, stop) of a window to where they go, (stop - start, kind.width), C-contiguous.
    done
        Gets a window when its last column interval is in.
    """

    plan: TablePlan
    kind: RowKind
    workers: Workers
    place: Callable[[int, int], Array]
    done: Callable[[int, int, Content], None]
    _out: Array = field(default_factory=lambda: np.empty((0, 0)))
    _floats: Array = field(default_factory=lambda: np.empty((0, 0)))
    _intervals: list[_ColumnEscapes] = field(default_factory=list)

    def take(self, codes: TableCodes, with_digest: bool) -> int:
        """Take one column interval of a window; returns its state digest if that is wanted.

        Raises
        ------
        CodesTooWide
            ``place`` gave int16, and the codes need int32.
        NonFiniteValues
            A row that is not finite has no int8 form.
        """
        low, high = codes.columns
        if low == 0:
            self._begin(codes)
        is_whole = high - low == self.kind.dim
        if self.kind.holds == "codes":
            self._put_codes(codes)
            total = codes.digest(self.workers) if with_digest else 0
            if not is_whole:
                finish(codes, {"codes": self._floats[:, low:high]}, self.workers, with_digest=False)
        else:
            total = finish(codes, {"codes": self._floats[:, low:high]}, self.workers, with_digest=with_digest)
        escapes = EscapeRows(codes.escapes.rows - codes.start, dict(codes.escapes.values))
        self._intervals.append(_ColumnEscapes(codes.columns, codes.status, escapes))
        if high == self.kind.dim:
            self._end(codes.start, codes.stop)
        return total

    def _begin(self, codes: TableCodes) -> None:
        kind = self.kind
        self._intervals = []
        self._out = self.place(codes.start, codes.stop)
        if kind.holds == "values" and kind.served == kind.table_dtype:
            self._floats = self._out
        elif kind.holds == "values" or codes.columns[1] < kind.dim:
            self._floats = np.empty((codes.num_rows, kind.dim), carrier(kind.table_dtype))

    def _put_codes(self, codes: TableCodes) -> None:
        low, high = codes.columns
        held, out = codes.arrays["codes"], self._out[:, low:high]
        if np.shares_memory(held, out):
            return
        limits = np.iinfo(out.dtype)
        if held.itemsize > out.itemsize and held.size and not limits.min <= held.min() <= held.max() <= limits.max:
            raise CodesTooWide
        out[...] = held

    def _end(self, start: int, stop: int) -> None:
        kind = self.kind
        status = _merged([one.status for one in self._intervals])
        if status is not None and not status.any():
            status = None
        escapes = EscapeRows()
        if kind.holds == "values" and kind.served != kind.table_dtype:
            serve(kind, self._floats, self._out, self.plan.table, start, self.workers)
        elif kind.holds == "codes" and len(self._intervals) == 1:
            escapes = self._intervals[0].escapes
        elif kind.holds == "codes" and status is not None:
            at = np.flatnonzero(status == ESCAPED).astype(np.int64)
            escapes = EscapeRows(at, {"codes": self._floats[at]})
        self.done(start, stop, Content(self._out, status, escapes))


def _merged(states: Sequence[Status | None]) -> Status | None:
    """The status of rows as a whole, of those of their column intervals."""
    known = [status for status in states if status is not None]
    if not known:
        return None
    first = np.zeros_like(known[0]) if states[0] is None else states[0]
    merged: Status = first.copy()
    for status in states[1:]:
        merged[first != (CODED if status is None else status)] = ESCAPED
    return merged


def serve(kind: RowKind, floats: Array, out: Array, table: str, first_row: int, workers: Workers) -> None:
    """Write floats of the table's dtype as a lookup returns them; blocks.

    Raises
    ------
    NonFiniteValues
        A row that is not finite has no int8 form.
    """

    def block(low: int, high: int) -> int:
        bad = kind.serve(floats[low:high], out[low:high])
        return -1 if bad < 0 else low + bad

    for bad in workers.run(partial(block, low, high) for low, high in blocks(len(floats), TASK_ROWS)):
        if bad >= 0:
            raise _no_int8_form(first_row + bad, table)


def check_escapes(kind: RowKind, escapes: EscapeRows, table: str) -> None:
    """Refuse rows kept as exact floats beside codes that no lookup could return. Pure.

    Raises
    ------
    NonFiniteValues
        A row that is not finite has no int8 form.
    """
    if kind.served == "int8" and len(escapes.rows):
        out = np.empty((len(escapes.rows), kind.served_width), kind.served_dtype)
        bad = kind.serve(escapes.values["codes"], out)
        if bad >= 0:
            raise _no_int8_form(int(escapes.rows[bad]), table)


def _no_int8_form(row: int, table: str) -> NonFiniteValues:
    return NonFiniteValues(
        f"row {row} of table {table!r} holds NaN or Inf, which has no int8 form; serve the table as floats",
        table=table, found=row,
    )  # fmt: skip


def holds_codes_in_place(plan: TablePlan, kind: RowKind) -> bool:
    """Return whether a table can be replayed where its rows will be held, with no codes beside them. Pure."""
    if len(by_columns(plan)) > 1:
        return False
    if kind.holds == "codes":
        return True
    spec = array_specs(plan.schema)["codes"]
    return kind.served == kind.table_dtype and spec.memory_dtype.itemsize == kind.dtype.itemsize


def read_content(
    readers: Sequence[ChunkReader],
    table: str,
    rows: RowIds,
    kind: RowKind,
    workers: Workers,
    *,
    dtype: npt.DTypeLike | None = None,
) -> Content:
    """Return rows (sorted, unique) of a dense table as the chain's state has them; reads chunks that hold one. Blocks.

    Parameters
    ----------
    dtype
        What rows are held in, where that is not ``kind.dtype``: int32 for codes that outgrew int16.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    CodesTooWide
        Codes do not fit the dtype.
    """
    plan = plan_table([reader.manifest for reader in readers], table, rows=rows)
    out = np.empty((len(rows), kind.width), kind.dtype if dtype is None else dtype)
    found: list[Content] = []
    builder = ContentBuilder(
        plan, kind, workers, lambda _start, _stop: out, lambda _start, _stop, one: found.append(one)
    )
    read_codes(readers, plan, workers, builder.take, rows=rows)
    return found[0]


def escapes_after(served: ServedTable, overlay: Overlay, exact: Sequence[tuple[RowIds, Array]]) -> EscapeRows:
    """Return all escape rows of a table after an overlay: ``exact`` are the overlay's, ids and floats. Pure.

    None where values are held.
    """
    if served.kind.holds != "codes":
        return EscapeRows()
    before = served.escapes
    escapes = EscapeRows(before.rows, dict(before.values))
    if len(before.rows):
        escapes.drop(before.rows[overlay.index.find(before.rows) >= 0])
    if sum(len(rows) for rows, _ in exact):
        rows = np.concatenate([rows for rows, _ in exact])
        values = np.concatenate([values for _, values in exact])
        order = np.argsort(rows, kind="stable")
        escapes.put(rows[order], {"codes": values[order]})
    return escapes
