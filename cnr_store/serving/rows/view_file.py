"""The file that describes the arrays of a view to other processes. Pure.

One line of JSON after a checked header: 8 bytes magic, the length as 8 bytes, little-endian, and the xxh3-128 of the
JSON. Nothing in it is executed, and sizes are compared with the files before they are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import xxhash

from cnr_store.errors import CorruptObject
from cnr_store.format.documents import loads
from cnr_store.format.records import TableSchema
from cnr_store.runtime.key_index import KeyIndex
from cnr_store.segment.codes import ExactRows
from cnr_store.serving.rows.memory import Array
from cnr_store.serving.rows.served_table import BaseTable, KeptAs, Overlay, Served, ServedTable, row_kind
from cnr_store.serving.rows.shards import HashShard, Shard
from cnr_store.serving.rows.views import View
from cnr_store.types import RowRange

MAGIC = b"CNRVIEW1"
_HEADER_BYTES = len(MAGIC) + 8 + 16
_FILE_NAME = re.compile(r"[0-9]+-[A-Za-z0-9_.-]*")
_DTYPES = frozenset(
    {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    | {"float16", "float32", "float64", "bool"}
)


class ArrayRef(msgspec.Struct, frozen=True):
    """Where an array is: C-contiguous, little-endian, from byte ``offset`` of a file of the generation on."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class BaseRef(msgspec.Struct, frozen=True, kw_only=True):
    """A `BaseTable`."""

    schema: TableSchema
    kept_as: KeptAs
    served: Served
    rows: ArrayRef
    start: int
    stop: int
    num_rows: int
    slots: ArrayRef | None
    status: ArrayRef | None
    range_shard: tuple[int, int] | None
    hash_shard: tuple[int, int] | None

    @property
    def files(self) -> set[str]:
        """The files that its arrays are in."""
        return {ref.file for ref in (self.rows, self.slots, self.status) if ref is not None}


class OverlayRef(msgspec.Struct, frozen=True, kw_only=True):
    """An `Overlay`."""

    schema: TableSchema
    ids: ArrayRef
    rows: ArrayRef
    status: ArrayRef
    slots: ArrayRef


class TableRef(msgspec.Struct, frozen=True, kw_only=True):
    """A `ServedTable`; ``exact_rows`` are row ids and exact floats."""

    base: BaseRef
    overlay: OverlayRef | None = None
    exact_rows: tuple[ArrayRef, ArrayRef] | None = None


class ViewDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A `View`."""

    epoch: int
    version: int
    step: int
    tables: dict[str, TableRef]
    dense: dict[str, ArrayRef]


# Made while the module is imported, as in documents.py.
_DECODER = msgspec.json.Decoder(ViewDocument)


def describe_view(view: View, ref_of: Callable[[Array], ArrayRef]) -> ViewDocument:
    """Return the description of a view; ``ref_of`` returns where an array is."""

    def overlay_ref(overlay: Overlay) -> OverlayRef:
        return OverlayRef(
            schema=overlay.schema,
            ids=ref_of(overlay.ids),
            rows=ref_of(overlay.rows),
            status=ref_of(overlay.status),
            slots=ref_of(overlay.index.slots),
        )

    def table_ref(table: ServedTable) -> TableRef:
        exact_rows = table.exact_rows
        return TableRef(
            base=_base_ref(table.base, ref_of),
            overlay=None if table.overlay is None else overlay_ref(table.overlay),
            exact_rows=(ref_of(exact_rows.rows), ref_of(exact_rows.values["codes"])) if len(exact_rows.rows) else None,
        )

    return ViewDocument(
        epoch=view.epoch,
        version=view.version,
        step=view.step,
        tables={name: table_ref(table) for name, table in view.tables.items()},
        dense={name: ref_of(tensor) for name, tensor in view.dense.items()},
    )


def _base_ref(base: BaseTable, ref_of: Callable[[Array], ArrayRef]) -> BaseRef:
    shard = base.shard
    return BaseRef(
        schema=base.schema,
        kept_as=base.kind.kept_as,
        served=base.kind.served,
        rows=ref_of(base.rows),
        start=base.start,
        stop=base.stop,
        num_rows=base.num_rows,
        slots=None if base.index is None else ref_of(base.index.slots),
        status=None if base.status is None else ref_of(base.status),
        range_shard=(shard.start, shard.stop) if isinstance(shard, RowRange) else None,
        hash_shard=(shard.index, shard.count) if isinstance(shard, HashShard) else None,
    )


def view_of(
    document: ViewDocument, array_of: Callable[[ArrayRef], Array], before: Mapping[str, tuple[BaseRef, BaseTable]]
) -> tuple[View, dict[str, tuple[BaseRef, BaseTable]]]:
    """Return the view that a document describes, and its base tables; those of ``before`` that stay are taken over."""
    base = {}
    for name, ref in document.tables.items():
        known = before.get(name)
        base[name] = (
            known if known is not None and known[0] == ref.base else (ref.base, _base_of(name, ref.base, array_of))
        )
    tables = {name: _table_of(ref, base[name][1], array_of) for name, ref in document.tables.items()}
    dense = {name: array_of(ref) for name, ref in document.dense.items()}
    view = View(document.epoch, document.version, document.step, MappingProxyType(tables), MappingProxyType(dense))
    return view, base


def _table_of(ref: TableRef, base: BaseTable, array_of: Callable[[ArrayRef], Array]) -> ServedTable:
    overlay = ref.overlay
    exact_rows = ExactRows()
    if ref.exact_rows is not None:
        exact_rows = ExactRows(array_of(ref.exact_rows[0]), {"codes": array_of(ref.exact_rows[1])})
    if overlay is None:
        return ServedTable(base, None, exact_rows)
    rows = array_of(overlay.rows)
    return ServedTable(
        base,
        Overlay(
            schema=overlay.schema,
            ids=array_of(overlay.ids),
            rows=rows,
            status=array_of(overlay.status),
            index=KeyIndex(array_of(overlay.slots), count=len(rows), used=len(rows)),
        ),
        exact_rows,
    )


def _base_of(name: str, ref: BaseRef, array_of: Callable[[ArrayRef], Array]) -> BaseTable:
    shard: Shard | None = None
    if ref.range_shard is not None:
        shard = RowRange(*ref.range_shard)
    elif ref.hash_shard is not None:
        shard = HashShard(*ref.hash_shard)
    return BaseTable(
        name=name,
        schema=ref.schema,
        kind=row_kind(ref.schema, ref.served, ref.kept_as),
        rows=array_of(ref.rows),
        start=ref.start,
        stop=ref.stop,
        index=None if ref.slots is None else KeyIndex(array_of(ref.slots)),
        num_rows=ref.num_rows,
        spare=np.empty(0, np.int64),
        status=None if ref.status is None else array_of(ref.status),
        shard=shard,
    )


def encode_view(document: ViewDocument) -> bytes:
    """Return the bytes of the file."""
    body = msgspec.json.encode(document)
    return b"".join((MAGIC, len(body).to_bytes(8, "little"), xxhash.xxh3_128_digest(body), body))


def parse_view(data: bytes, where: str) -> ViewDocument:
    """Return the description in the bytes of a file.

    Raises
    ------
    CorruptObject
        They are not what `encode_view` writes, or name what no array can be.
    """
    size = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
    body = data[_HEADER_BYTES:]
    digest = data[_HEADER_BYTES - 16 : _HEADER_BYTES]
    if data[: len(MAGIC)] != MAGIC or len(body) != size or xxhash.xxh3_128_digest(body) != digest:
        raise CorruptObject(f"{where} is no whole description of a view; restart the loader that owns it", path=where)
    try:
        document = loads(body, _DECODER)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptObject(f"{where} describes no view that this library knows: {error}", path=where) from error
    return document


def check_ref(ref: ArrayRef, file_bytes: int, where: str) -> None:
    """Refuse an array that its file cannot hold, before it is mapped.

    Raises
    ------
    CorruptObject
    """
    bad = ref.dtype not in _DTYPES or ref.offset < 0 or any(size < 0 for size in ref.shape)
    if bad or ref.offset % np.dtype(ref.dtype).itemsize or ref.offset + ref.nbytes > file_bytes:
        raise CorruptObject(
            f"{where} has {file_bytes} bytes, no room for a {ref.dtype} array of shape {ref.shape} at {ref.offset}",
            path=where, expected=ref.offset + ref.nbytes if not bad else None, found=file_bytes,
        )  # fmt: skip


def check_file_name(name: str) -> str:
    """Return the name of an array's file if it is one, so that no name leads out of the folder.

    Raises
    ------
    CorruptObject
    """
    if not _FILE_NAME.fullmatch(name):
        raise CorruptObject(f"{name!r} is no name of an array's file", path=name)
    return name
