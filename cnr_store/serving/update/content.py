"""Reads rows of a table at a version, from its chain, in the form in which they are served.

Column intervals are joined here. A row with different states in two intervals becomes an exact row: its floats are
exact, and no difference can be added to it without its codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import carrier
from cnr_store.errors import CorruptStore
from cnr_store.read.plan import Columns, TablePlan, by_columns, holding
from cnr_store.read.replay import ChunkReader, finish, matching
from cnr_store.read.table_reader import read_codes
from cnr_store.runtime.threads import Workers, blocks
from cnr_store.segment.codes import CODED, ESCAPED, TASK_ROWS, Array, ExactRows, TableCodes, array_specs
from cnr_store.serving.rows.served_table import Overlay, RowKind, ServedTable, no_int8_form
from cnr_store.types import RowIds

Status = npt.NDArray[np.uint8]


class CodesTooWide(Exception):
    """Codes exceed int16: the table is kept as int32 from here on. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Content:
    """Rows as they are kept, (n, kind.width); their status, None if all are coded; and exact rows.

    ``exact_rows`` has positions in ``rows``, not ids; only if codes are kept. Absent rows have the fill if values are
    kept, and are undefined if codes are.
    """

    rows: Array
    status: Status | None
    exact_rows: ExactRows

    def take(self, at: RowIds) -> Content:
        """Return the rows at sorted positions."""
        mine, theirs = matching(at, self.exact_rows.rows)
        values = {name: values[theirs] for name, values in self.exact_rows.values.items()}
        return Content(self.rows[at], None if self.status is None else self.status[at], ExactRows(mine, values))


@dataclass(slots=True)
class _IntervalRows:
    columns: Columns
    status: Status | None
    exact_rows: ExactRows


@dataclass(slots=True)
class ContentBuilder:
    """Converts the codes of `table_reader.read_codes` to `Content`; `take` is its callback.

    Attributes
    ----------
    plan, kind
        The table, and how its rows are kept.
    place
        Returns the memory for rows [start, stop), (stop - start, kind.width), C-contiguous.
    done
        Called with a window after its last column interval.
    """

    plan: TablePlan
    kind: RowKind
    workers: Workers
    place: Callable[[int, int], Array]
    done: Callable[[int, int, Content], None]
    _out: Array = field(default_factory=lambda: np.empty((0, 0)))
    _floats: Array = field(default_factory=lambda: np.empty((0, 0)))
    _intervals: list[_IntervalRows] = field(default_factory=list)

    def take(self, codes: TableCodes, with_digest: bool) -> int:
        """Add one column interval of a window; return its state digest if requested.

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
        if self.kind.kept_as == "codes":
            self._put_codes(codes)
            total = codes.digest(self.workers) if with_digest else 0
            if not is_whole:
                finish(codes, {"codes": self._floats[:, low:high]}, self.workers, with_digest=False)
        else:
            total = finish(codes, {"codes": self._floats[:, low:high]}, self.workers, with_digest=with_digest)
        exact_rows = ExactRows(codes.escapes.rows - codes.start, dict(codes.escapes.values))
        self._intervals.append(_IntervalRows(codes.columns, codes.status, exact_rows))
        if high == self.kind.dim:
            self._end(codes.start, codes.stop)
        return total

    def _begin(self, codes: TableCodes) -> None:
        kind = self.kind
        self._intervals = []
        self._out = self.place(codes.start, codes.stop)
        if kind.kept_as == "values" and kind.served == kind.table_dtype:
            self._floats = self._out
        elif kind.kept_as == "values" or codes.columns[1] < kind.dim:
            self._floats = np.empty((codes.num_rows, kind.dim), carrier(kind.table_dtype))

    def _put_codes(self, codes: TableCodes) -> None:
        low, high = codes.columns
        base, out = codes.arrays["codes"], self._out[:, low:high]
        if np.shares_memory(base, out):
            return
        limits = np.iinfo(out.dtype)
        if base.itemsize > out.itemsize and base.size and not limits.min <= base.min() <= base.max() <= limits.max:
            raise CodesTooWide
        out[...] = base

    def _end(self, start: int, stop: int) -> None:
        kind = self.kind
        status = _merged([one.status for one in self._intervals])
        if status is not None and not status.any():
            status = None
        exact_rows = ExactRows()
        if kind.kept_as == "values" and kind.served != kind.table_dtype:
            serve(kind, self._floats, self._out, self.plan.table, start, self.workers)
        elif kind.kept_as == "codes" and len(self._intervals) == 1:
            exact_rows = self._intervals[0].exact_rows
        elif kind.kept_as == "codes" and status is not None:
            at = np.flatnonzero(status == ESCAPED).astype(np.int64)
            exact_rows = ExactRows(at, {"codes": self._floats[at]})
        self.done(start, stop, Content(self._out, status, exact_rows))


def _merged(states: Sequence[Status | None]) -> Status | None:
    """Return the status of whole rows from those of their column intervals."""
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
            raise no_int8_form(first_row + bad, table)


def check_exact_rows(kind: RowKind, exact_rows: ExactRows, table: str) -> None:
    """Refuse exact rows that no lookup could return. Pure.

    Raises
    ------
    NonFiniteValues
        A row that is not finite has no int8 form.
    """
    if kind.served == "int8" and len(exact_rows.rows):
        out = np.empty((len(exact_rows.rows), kind.served_width), kind.served_dtype)
        bad = kind.serve(exact_rows.values["codes"], out)
        if bad >= 0:
            raise no_int8_form(int(exact_rows.rows[bad]), table)


def in_two_lists(plan: TablePlan, reader: ChunkReader, row: int) -> CorruptStore:
    """Return the error of a segment that lists a row twice. Pure."""
    return CorruptStore(
        f"row {row} of table {plan.table!r} is in two row lists of segment {reader.name}; run `cnr verify`",
        table=plan.table, found=row,
    )  # fmt: skip


def holds_codes_in_place(plan: TablePlan, kind: RowKind) -> bool:
    """Return whether a table can be replayed in the memory of its rows, without separate codes. Pure."""
    if len(by_columns(plan)) > 1:
        return False
    if kind.kept_as == "codes":
        return True
    spec = array_specs(plan.schema)["codes"]
    return kind.served == kind.table_dtype and spec.memory_dtype.itemsize == kind.dtype.itemsize


def read_content(
    readers: Sequence[ChunkReader], plan: TablePlan, rows: RowIds, kind: RowKind, workers: Workers, out: Array
) -> Content:
    """Return rows (sorted, unique) of a table as the chain's state has them, in ``out``. Blocks.

    Parameters
    ----------
    plan
        Of these rows, or of more: chunks that cannot hold one are not read.
    out
        (len(rows), kind.width), of ``kind.dtype``, or int32 for codes that exceed int16.

    Raises
    ------
    CorruptStore, CorruptObject, MissingObject
    CodesTooWide
        Codes do not fit the dtype.
    """
    plan = holding(plan, rows)
    found: list[Content] = []
    builder = ContentBuilder(
        plan, kind, workers, lambda _start, _stop: out, lambda _start, _stop, one: found.append(one)
    )
    read_codes(readers, plan, workers, builder.take, rows=rows)
    return found[0]


def exact_rows_after(served: ServedTable, overlay: Overlay, exact: Sequence[tuple[RowIds, Array]]) -> ExactRows:
    """Return all exact rows of a table after an overlay; ``exact`` has the ids and floats of the overlay's. Pure.

    Without rows if values are kept.
    """
    if served.kind.kept_as != "codes":
        return ExactRows()
    before = served.exact_rows
    exact_rows = ExactRows(before.rows, dict(before.values))
    if len(before.rows):
        exact_rows.drop(before.rows[overlay.index.find(before.rows) >= 0])
    if sum(len(rows) for rows, _ in exact):
        rows = np.concatenate([rows for rows, _ in exact])
        values = np.concatenate([values for _, values in exact])
        order = np.argsort(rows, kind="stable")
        exact_rows.put(rows[order], {"codes": values[order]})
    return exact_rows
