"""A table in memory: base rows, an overlay of changed rows, and lookups in both.

Base rows are what a lookup returns (``values``) if the codes that differences are added to can be computed from them,
or are never needed. Otherwise they are codes, which are decoded by each lookup. Nothing here does I/O or takes locks:
`views` decides which table a reader reads, and when base rows are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import kernels, widths
from cnr_store.errors import BadInput, BadRowIds, NonFiniteValues
from cnr_store.format.records import TableSchema
from cnr_store.runtime.addresses import address_of
from cnr_store.runtime.arguments import checked_choice
from cnr_store.runtime.key_index import KeyIndex, slots_for
from cnr_store.runtime.threads import blocks
from cnr_store.segment.codes import (
    ABSENT,
    Array,
    ArraySpec,
    ExactRows,
    array_specs,
    decode_block,
    schema_key,
    schema_of,
)  # fmt: skip
from cnr_store.serving.rows import gather
from cnr_store.serving.rows.fused_kernels import BITS_8_EXTRA_BYTES, fuse_rows_8bit
from cnr_store.serving.rows.memory import ANONYMOUS, Memory
from cnr_store.serving.rows.rounding import round_float32
from cnr_store.serving.rows.shards import HashShard, Shard, dense_range, is_in_shard, is_keyed
from cnr_store.types import FloatBits, Lattice, RowIds, TableDtype

Served = Literal["float32", "float16", "bfloat16", "int8"]
"""How a lookup returns rows. ``int8``: fused 8-bit rows (uint8, dim + 8): codes, float32 scale, float32 bias."""

KeptAs = Literal["values", "codes"]

READ_BLOCK_ROWS = 1024
"""Rows decoded at a time in a lookup, so that codes and floats on the way stay in the cache."""

_SERVED_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
}


@dataclass(frozen=True, slots=True)
class RowKind:
    """The form of a table's base rows, and of the rows that a lookup returns; see `row_kind`.

    Two kinds are equal if the base rows of one are valid base rows of the other.

    Attributes
    ----------
    kept_as
        ``values``: base rows are what a lookup returns, bit for bit, absent and exact rows included.
        ``codes``: base rows are integer codes; those of absent and exact rows are undefined.
    served
        The form of the rows that a lookup returns.
    table_dtype, dim, fill
        Of the table.
    spec
        The encoding and scale of the codes; None for ``values``.
    fill_row
        What a lookup returns for an absent row, (served_width,) of `served_dtype`; not to be written.
    """

    kept_as: KeptAs
    served: Served
    table_dtype: TableDtype
    dim: int
    fill: float
    spec: ArraySpec | None
    fill_row: Array = field(compare=False, repr=False)

    @property
    def served_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of a row that a lookup returns (uint16 for bfloat16, uint8 for int8)."""
        return _SERVED_DTYPES[self.served]

    @property
    def served_width(self) -> int:
        """Elements of a row that a lookup returns: dim, or dim + 8 bytes for int8."""
        return self.dim + (BITS_8_EXTRA_BYTES if self.served == "int8" else 0)

    @property
    def width(self) -> int:
        """Elements of a base row."""
        return self.dim if self.kept_as == "codes" else self.served_width

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that base rows start with: lattice codes are int16, and int32 once they outgrow it."""
        return self.served_dtype if self.spec is None else self.spec.mirror_dtype

    @property
    def absent_row(self) -> Array:
        """The base row of an absent row, (width,) of `dtype`: the fill, or for codes zeros, which are never read."""
        return self.fill_row if self.spec is None else np.zeros(self.dim, self.dtype)

    def serve(self, values: Array, out: Array) -> int:
        """Write floats (n, dim) of the table's dtype as a lookup returns them, (n, served_width).

        Returns -1, or the first row that has no int8 form because it is not finite; it and later rows are undefined.
        Rounding is to the nearest, ties to even; a finite value never becomes Inf.
        """
        if self.served == self.table_dtype:
            out[...] = values
        elif self.served == "int8":
            floats = np.ascontiguousarray(widths.to_float32(values, self.table_dtype))
            return int(fuse_rows_8bit(floats, out))
        elif self.served == "float32":
            widths.to_float32(values, self.table_dtype, out)
        else:
            floats = np.ascontiguousarray(widths.to_float32(values, self.table_dtype))
            round_float32(floats, self.served, out)
        return -1

    def decode(self, codes: Array, out: Array) -> int:
        """Write codes (n, dim) as a lookup returns them; returns as `serve`. Only where codes are kept."""
        assert self.spec is not None
        is_served = self.served == self.table_dtype
        values = out if is_served else np.empty(codes.shape, widths.carrier(self.table_dtype))
        if isinstance(self.spec.encoding, Lattice) and self.table_dtype != "float32":
            floats = np.empty(codes.shape, np.float32)
            kernels.lattice_decode(codes, self.spec.scale, floats)
            round_float32(floats, self.table_dtype, values)
        else:
            decode_block(self.spec, codes, values)
        return -1 if is_served else self.serve(values, out)


def row_kind(schema: TableSchema, served: Served | None = None, kept_as: Literal["auto"] | KeptAs = "auto") -> RowKind:
    """Return the form of base rows that lookups return as ``served`` and deltas can be applied to. Pure.

    ``served`` None means the table's own dtype. ``auto`` keeps values if possible. Values need no decoding; codes of a
    float32 lattice table take half the memory if they fit int16.

    Raises
    ------
    BadInput
        A word that is none, values of a table whose deltas need codes that cannot be had back from them, or codes of a
        table that has none.
    """
    served = checked_choice("served", schema.dtype if served is None else served, get_args(Served))
    return _row_kind(schema_key(schema), served, checked_choice("kept_as", kept_as, ("auto", *get_args(KeptAs))))


@lru_cache(maxsize=1 << 14)
def _row_kind(key: bytes, served: Served, kept_as: Literal["auto"] | KeptAs) -> RowKind:
    schema = schema_of(key)
    name = type(schema.encoding).__name__
    has_codes = isinstance(schema.encoding, Lattice | FloatBits)
    if kept_as == "codes" and not has_codes:
        raise BadInput(
            f"a table of encoding {name} has no codes: its rows are always whole; use kept_as='values'",
            expected="values", found=kept_as,
        )  # fmt: skip
    if kept_as == "values" and not _values_suffice(schema, served):
        raise BadInput(
            f"differences to a {schema.dtype} table of encoding {name} cannot be added to rows kept as {served}: "
            "these do not determine their codes; use kept_as='codes', or 'auto'",
            expected="codes", found=kept_as,
        )  # fmt: skip
    keeps_codes = kept_as == "codes" or (kept_as == "auto" and not _values_suffice(schema, served))
    kind = RowKind(
        kept_as="codes" if keeps_codes else "values",
        served=served,
        table_dtype=schema.dtype,
        dim=schema.dim,
        fill=schema.fill,
        spec=array_specs(schema)["codes"] if keeps_codes else None,
        fill_row=np.empty(0),
    )
    fill = widths.from_float32(np.full((1, schema.dim), schema.fill, np.float32), schema.dtype)
    fill_row = np.empty((1, kind.served_width), kind.served_dtype)
    kind.serve(fill, fill_row)
    fill_row.flags.writeable = False
    return replace(kind, fill_row=fill_row[0])


def _values_suffice(schema: TableSchema, served: Served) -> bool:
    """Whether served rows give back the codes that later differences add to, or no difference ever comes."""
    if not array_specs(schema).are_additive:
        return True
    if isinstance(schema.encoding, Lattice):  # a 16-bit table's values were rounded off the lattice
        return schema.dtype == "float32" and served == "float32"
    return served == schema.dtype


@dataclass(frozen=True, slots=True, eq=False)
class BaseTable:
    """The rows of a table, or of a shard of it, as of one version. Only merging writes the arrays.

    Attributes
    ----------
    name, schema, kind
        Of the table. The schema is that of the version the rows are of.
    rows
        (capacity, kind.width), in ``kind.dtype`` or, for codes, int32. By position: row id - start. By key: `index`.
    start, stop
        Row ids that are found by position; both 0 where rows are found by key.
    index
        Key to position; None where rows are found by position. A row that it lacks is absent.
    num_rows
        Positions in use: all of ``rows`` by position; by key the rest is room for new keys.
    spare
        By key: positions below ``num_rows`` that belong to no key, int64.
    status
        uint8 (capacity,): `CODED`, `ABSENT` or `ESCAPED`; None while all are coded. By key nothing is `ABSENT` here.
    shard
        The part of the table that is served; None means all of it.
    line
        What kernels that work on many tables take of it: address of the rows, start, stop, bytes of a row, address of
        the kind's fill.
    """

    name: str
    schema: TableSchema
    kind: RowKind
    rows: Array
    start: int
    stop: int
    index: KeyIndex | None
    num_rows: int
    spare: npt.NDArray[np.int64]
    status: npt.NDArray[np.uint8] | None
    shard: Shard | None
    line: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row_bytes = self.rows.shape[1] * self.rows.itemsize
        line = _of_bytes(self.rows), self.start, self.stop, row_bytes, _of_bytes(self.kind.fill_row)
        object.__setattr__(self, "line", line)

    @classmethod
    def allocate(
        cls,
        name: str,
        schema: TableSchema,
        kind: RowKind,
        *,
        shard: Shard | None = None,
        num_keys: int = 0,
        dtype: npt.DTypeLike | None = None,
        memory: Memory = ANONYMOUS,
    ) -> BaseTable:
        """Return a table of zeros, every row coded, or no key yet, to be filled by its only user before publication.

        ``dtype`` is ``kind.dtype`` unless given (int32 for wide codes). By key there is room for ``num_keys`` rows and
        as many again, which take no memory yet; the caller fills rows [0, num_keys) and inserts their keys.
        """
        keyed = is_keyed(shard, schema)
        rows = dense_range(shard, schema.num_rows)
        capacity = 2 * max(num_keys, 64) if keyed else len(rows)
        return cls(
            name=name,
            schema=schema,
            kind=kind,
            rows=memory.allocate(
                f"{name}.rows",
                (capacity, kind.width),
                kind.dtype if dtype is None else dtype,
                used_rows=num_keys if keyed else None,
            ),
            start=0 if keyed else rows.start,
            stop=0 if keyed else rows.stop,
            index=KeyIndex.allocate(index_capacity(num_keys), memory, f"{name}.index") if keyed else None,
            num_rows=num_keys if keyed else capacity,
            spare=np.empty(0, np.int64),
            status=None,
            shard=shard,
        )

    @property
    def is_keyed(self) -> bool:
        """Whether rows are found by key rather than by position."""
        return self.index is not None

    def with_status(self, memory: Memory = ANONYMOUS) -> BaseTable:
        """Return the same table with a status per row, all `CODED` where there was none so far."""
        if self.status is not None:
            return self
        return replace(self, status=memory.allocate(f"{self.name}.status", (len(self.rows),), np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """The rows of a table that one or several versions changed: absolute content, found by key.

    Attributes
    ----------
    schema
        Of the version that the table is at with this overlay.
    ids
        int64 (n,), unique, any order.
    rows
        (n, kind.width) of the base rows' dtype; what stands at `ABSENT` rows (and for codes at `ESCAPED` ones) means
        nothing.
    status
        uint8 (n,): `CODED`, `ABSENT` (deleted) or `ESCAPED`.
    index
        Row id to position in the other three. Not to be changed once published.
    line
        As that of a `BaseTable`: addresses of ids, rows, status and the index's slots, number of slots, number of rows.
        Made from the arrays unless it is given.
    """

    schema: TableSchema
    ids: RowIds
    rows: Array
    status: npt.NDArray[np.uint8]
    index: KeyIndex
    line: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.line:
            slots = self.index.slots
            addresses = address_of(self.ids), _of_bytes(self.rows), address_of(self.status), address_of(slots)
            object.__setattr__(self, "line", (*addresses, len(slots), len(self.rows)))

    @classmethod
    def allocate(
        cls, name: str, schema: TableSchema, count: int, width: int, dtype: npt.DTypeLike, memory: Memory = ANONYMOUS
    ) -> Overlay:
        """Return an overlay of ``count`` rows, `CODED`, in one block. Fill ids and rows, then call `fill_index`."""
        ids, rows, status, slots = memory.allocate_together(
            f"{name}.overlay",
            [((count,), np.int64), ((count, width), dtype), ((count,), np.uint8), ((slots_for(count), 2), np.int64)],
        )
        gather.clear(status.reshape(1, -1))
        gather.clear(slots)
        return cls(schema, ids, rows, status, KeyIndex(slots))

    def fill_index(self) -> int:
        """Insert all ids; return -1, or the position of the first that another row has too. Releases the GIL."""
        return self.index.insert_many(self.ids, np.arange(len(self.ids), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def merged(cls, name: str, older: Overlay, newer: Overlay, memory: Memory = ANONYMOUS) -> Overlay:
        """Return one overlay that reads as ``newer`` over ``older``; neither is changed."""
        kept = np.flatnonzero(newer.index.find(older.ids) < 0)
        first = len(newer)
        result = cls.allocate(
            name, newer.schema, first + len(kept), newer.rows.shape[1], newer.rows.dtype, memory
        )  # fmt: skip
        for into, new, old in (
            (result.ids, newer.ids, older.ids),
            (result.rows, newer.rows, older.rows),
            (result.status, newer.status, older.status),
        ):
            into[:first] = new
            np.take(old, kept, axis=0, out=into[first:])
        duplicate = result.fill_index()
        assert duplicate < 0, "overlays hold unique ids"
        return result


@dataclass(frozen=True, slots=True, eq=False)
class ServedTable:
    """A table in one view: base rows, an overlay of changed rows, and exact rows.

    ``exact_rows`` (array ``codes`` in the table's dtype): all exact rows of this version; only if codes are kept.
    """

    base: BaseTable
    overlay: Overlay | None = None
    exact_rows: ExactRows = field(default_factory=ExactRows)

    @property
    def name(self) -> str:
        """The table's name."""
        return self.base.name

    @property
    def schema(self) -> TableSchema:
        """The schema as of the view's version."""
        return self.base.schema if self.overlay is None else self.overlay.schema

    @property
    def kind(self) -> RowKind:
        """The form of base rows and lookups."""
        return self.base.kind

    def gather_stored(self, ids: RowIds, out: Array) -> npt.NDArray[np.uint8]:
        """Write the rows ``ids`` (int64 (n,), any order) as they are kept, (n, kind.width); return their status.

        Deltas are applied to these. Absent rows are ``kind.absent_row``. Releases the GIL.

        Raises
        ------
        BadRowIds
        """
        places = self._places(ids)
        base, overlay = self.base, self.overlay
        absent = base.kind.absent_row.astype(base.rows.dtype, copy=False)
        over = base.rows[:0] if overlay is None else overlay.rows
        gather.gather(
            gather.as_words(base.rows),
            gather.as_words(over),
            gather.as_words(absent.reshape(1, -1))[0],
            places,
            gather.as_words(out),
        )
        status = np.empty(len(ids), np.uint8)
        no_status = status[:0]
        gather.gather_status(
            no_status if base.status is None else base.status,
            no_status if overlay is None else overlay.status,
            places,
            status,
        )
        return status

    def read(self, ids: RowIds, out: Array, missing: npt.NDArray[np.bool_] | None = None) -> int:
        """Write the rows ``ids`` (int64 (n,), any order, repeats allowed) as served; return how many are absent.

        Parameters
        ----------
        out
            (n, kind.served_width) of ``kind.served_dtype``, C-contiguous. Absent rows get the fill.
        missing
            bool (n,), states which rows are absent. Rows of a table that keeps values by position count as there.

        Raises
        ------
        BadRowIds
            An id is outside the table, or outside the shard that is served.
        NonFiniteValues
            A row that is not finite has no int8 form.
        """
        base, kind = self.base, self.base.kind
        if self.overlay is None and base.index is None and kind.kept_as == "values":
            outside = gather.gather_range(gather.as_words(base.rows), base.start, ids, gather.as_words(out))
            if outside >= 0:
                raise self._outside(ids, outside)
            if missing is not None:
                missing[...] = False
            return 0
        places = self._places(ids)
        if missing is not None:
            np.equal(places, gather.ABSENT_PLACE, out=missing)
        if kind.kept_as == "values":
            over = base.rows[:0] if self.overlay is None else self.overlay.rows
            fill = gather.as_words(kind.fill_row.reshape(1, -1))[0]
            return int(
                gather.gather(gather.as_words(base.rows), gather.as_words(over), fill, places, gather.as_words(out))
            )
        return self._decode(ids, places, out)

    def row_ids(self) -> RowIds:
        """Return the sorted ids of all rows that are there (by position where no status is kept: all). Reads much."""
        base, overlay = self.base, self.overlay
        if base.index is not None:
            ids = np.sort(base.index.entries()[0])
        elif base.status is not None:
            ids = np.flatnonzero(base.status[: base.num_rows] != ABSENT).astype(np.int64) + base.start
        else:
            ids = np.arange(base.start, base.stop, dtype=np.int64)
        if overlay is None:
            return ids
        ids = np.union1d(ids, overlay.ids)
        at = overlay.index.find(ids)
        gone = np.zeros(len(ids), np.bool_)
        gone[at >= 0] = overlay.status[at[at >= 0]] == ABSENT
        return ids[~gone]

    def _places(self, ids: RowIds) -> gather.Places:
        """Where each row is; checks that all are of this table and shard."""
        base, overlay = self.base, self.overlay
        places = np.empty(len(ids), np.int64)
        if base.index is None:
            outside = gather.places_in_range(base.start, base.stop, ids, places)
            if outside >= 0:
                raise self._outside(ids, outside)
            if base.status is not None:
                gather.drop_absent(places, base.status)
        else:
            base.index.find(ids, places)
        if overlay is not None:
            gather.put_overlay_places(overlay.index.find(ids), overlay.status, places)
        if base.index is not None:
            self._check_missing(ids, places)
        return places

    def _check_missing(self, ids: RowIds, places: gather.Places) -> None:
        """Refuse keys that are not there because they belong to another shard, or are no rows of a dense table."""
        nowhere = np.flatnonzero(places == gather.ABSENT_PLACE)
        schema = self.schema
        if len(nowhere) == 0 or (self.base.shard is None and schema.keys == "hashed"):
            return
        keys = ids[nowhere]
        strange = ~is_in_shard(self.base.shard, keys)
        if schema.keys == "dense":
            strange |= (keys < 0) | (keys >= schema.num_rows)
        if strange.any():
            raise self._outside(ids, int(nowhere[np.argmax(strange)]))

    def _decode(self, ids: RowIds, places: gather.Places, out: Array) -> int:
        base, kind = self.base, self.base.kind
        rows = gather.as_words(base.rows)
        over = rows[:0] if self.overlay is None else gather.as_words(self.overlay.rows)
        codes = np.empty((min(len(ids), READ_BLOCK_ROWS), kind.dim), base.rows.dtype)
        words = gather.as_words(codes)
        fill = np.zeros(words.shape[1], words.dtype)
        absent = 0
        for low, high in blocks(len(ids), READ_BLOCK_ROWS):
            size = high - low
            absent += int(gather.gather(rows, over, fill, places[low:high], words[:size]))
            self._check_served(kind.decode(codes[:size], out[low:high]), ids, low)
        if absent:
            out[places == gather.ABSENT_PLACE] = kind.fill_row
        if len(self.exact_rows.rows):
            self._put_exact_rows(ids, out)
        return absent

    def _put_exact_rows(self, ids: RowIds, out: Array) -> None:
        at = np.minimum(np.searchsorted(self.exact_rows.rows, ids), len(self.exact_rows.rows) - 1)
        escaped = np.flatnonzero(self.exact_rows.rows[at] == ids)
        if len(escaped):
            exact = np.empty((len(escaped), self.kind.served_width), self.kind.served_dtype)
            bad = self.kind.serve(self.exact_rows.values["codes"][at[escaped]], exact)
            self._check_served(bad, ids[escaped], 0)
            out[escaped] = exact

    def _check_served(self, bad: int, ids: RowIds, low: int) -> None:
        if bad >= 0:
            raise no_int8_form(int(ids[low + bad]), self.name)

    def _outside(self, ids: RowIds, at: int) -> BadRowIds:
        row, schema, shard = int(ids[at]), self.schema, self.base.shard
        what = "hashed keys" if schema.keys == "hashed" else f"{schema.num_rows} rows"
        part = ""
        if isinstance(shard, HashShard):
            part = f", of which hash shard {shard.index} of {shard.count} is served here"
        elif shard is not None:
            part = f", of which rows [{shard.start}, {shard.stop}) are served here"
        return BadRowIds(
            f"row id {row} at position {at} is outside table {self.name!r} with {what}{part}",
            table=self.name,
            expected=str(shard) if shard is not None else [0, schema.num_rows],
            found=row,
        )


NO_OVERLAY = (0,) * 6
"""The line of the overlay of a table that has none."""

Lines = npt.NDArray[np.int64]
"""(n, 11): a line per table, that of its base and that of its overlay."""


def lines_of(tables: Iterable[ServedTable]) -> Lines:
    """Return the lines of tables, whose arrays the caller keeps alive while a kernel works on them."""
    lines = [one.base.line + (NO_OVERLAY if one.overlay is None else one.overlay.line) for one in tables]
    return np.array(lines, np.int64).reshape(-1, 11)


def _of_bytes(array: Array) -> int:
    return address_of(array.view(np.uint8))


def no_int8_form(row: int, table: str) -> NonFiniteValues:
    """Return the error of a row that cannot be served as int8. Pure."""
    return NonFiniteValues(
        f"row {row} of table {table!r} holds NaN or Inf, which has no int8 form; serve the table as floats",
        table=table, found=row,
    )  # fmt: skip


def index_capacity(num_keys: int) -> int:
    """Return for how many keys an index is made where there are ``num_keys``: it is rebuilt when it is full. Pure."""
    return num_keys + num_keys // 8 + 64
