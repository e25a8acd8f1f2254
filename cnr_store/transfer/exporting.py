"""Writes a snapshot to files that other programs read: safetensors, Parquet, npy. One window of rows at a time.

Exported values equal those of a restore. bfloat16 stays bfloat16 in safetensors, is widened to float32 in Parquet
(which has no bfloat16) and is uint16 bits in npy; `tensors.json` and the safetensors metadata record the dtype.
"""

from __future__ import annotations

import contextlib
import fnmatch
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput, PathExists, TableNotFound, Unsupported, VersionNotFound
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import encode_name
from cnr_store.read.snapshot import Snapshot
from cnr_store.read.table_view import TableView
from cnr_store.runtime.local_files import failing_at
from cnr_store.runtime.notebook import ShownReport
from cnr_store.runtime.threads import windows
from cnr_store.storage.local import check_path
from cnr_store.transfer.safetensors_file import TensorSpec, carrier_dtype, write_safetensors

ExportFormat = Literal["safetensors", "parquet", "npy"]
ExportProgress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

WINDOW_BYTES = 64 * 1024 * 1024
"""Bytes of rows that are read at once. A chunk that spans windows is read once for each of them."""

METADATA_KEY = "cnr_store"
INDEX_FILE = "tensors.json"


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """One tensor of an export.

    Attributes
    ----------
    name
        The name in the file: the table's or dense tensor's name, ``<table>/<slot>`` for a slot, ``<table>/row_ids`` for
        the keys of a hashed table.
    role
        ``table``, ``slot``, ``keys`` or ``dense``.
    table, slot
        The table and the slot that it belongs to; None for a dense tensor.
    dtype, shape
        Logical dtype (``bfloat16`` is uint16 bits where a format has none) and shape.
    """

    name: str
    role: Literal["table", "slot", "keys", "dense"]
    dtype: str
    shape: tuple[int, ...]
    table: str | None = None
    slot: str | None = None

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape."""
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ExportReport(ShownReport):
    """What was written: the files, relative to ``path`` if that is a folder, and the tensors in them."""

    path: str
    version: int
    step: int
    files: tuple[str, ...]
    size_bytes: int
    tensors: tuple[ExportedTensor, ...]


def export_snapshot(
    snapshot: Snapshot,
    path: str | Path,
    *,
    format: ExportFormat = "safetensors",  # noqa: A002 - the word every such interface uses
    tables: Sequence[str] | None = None,
    slots: bool = True,
    dense: bool = True,
    overwrite: bool = False,
    progress: ExportProgress | None = None,
) -> ExportReport:
    """Write a snapshot's tensors to local files. Nothing appears at ``path`` until all of it is written. Blocks.

    Memory: one window of 64 MiB and its chunks; hashed tables and each dense tensor as a whole. Rows that were never
    set or were deleted are written as their fill.

    Parameters
    ----------
    path
        The file (safetensors) or the folder (a Parquet file per table and ``dense.parquet``, or an npy file per
        tensor), with an index ``tensors.json``.
    tables
        Names or patterns (``*``, ``?``, ``[...]``) of tables; None exports all. A table that declares far more rows
        than it stores must be named.
    slots, dense
        Whether to write optimizer slots and dense tensors.
    overwrite
        Replace the file at ``path``, or the folder if it is an export.

    Raises
    ------
    VersionNotFound
        Nothing was saved yet at this version.
    TableNotFound
        A name or pattern matches no table.
    PathExists
        ``path`` exists, and ``overwrite`` is False.
    BadInput
        ``path`` is not valid Unicode, or a folder that is not an export, two tensors would get one name, or a table
        that is not named has at least 256 MiB of rows, nearly none of which are stored.
    Unsupported
        A one-dimensional slot is stored per column range; export such a table without slots.
    CorruptStore, AccessDenied, StorageFailure
    """
    check_path(path)
    target = Path(path)
    writers = {"safetensors": _write_safetensors, "parquet": _write_parquet, "npy": _write_npy}
    if format not in writers:
        raise BadInput(f"format is {format!r}; give one of {sorted(writers)}", found=format)
    if not target.name:
        raise BadInput(f"path {str(path)!r} has no file or folder name; give the path to write", path=str(path))
    if snapshot.is_empty:
        raise VersionNotFound(
            f"nothing was saved yet at version {snapshot.version}, so there is nothing to export",
            version=snapshot.version,
        )
    with failing_at(target, "written"):
        _check_target(target, format, overwrite=overwrite)
    chosen = matching_tables(snapshot, tables)
    for name in chosen:
        if name not in (tables or ()):
            snapshot.table(name).check_stored("name the table in tables=", slots=slots)
    source = _Source(snapshot, planned_tensors(snapshot, chosen, slots=slots, dense=dense), progress)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with failing_at(target, "written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            if format != "safetensors":
                scratch.mkdir()
            writers[format](source, scratch)
            _replace(scratch, target)
            files = sorted(p for p in target.rglob("*") if p.is_file()) if target.is_dir() else [target]
            sizes = [p.stat().st_size for p in files]
    finally:
        with contextlib.suppress(OSError):  # the first error is raised
            _remove(scratch)
    return ExportReport(
        path=str(target), version=snapshot.version, step=snapshot.step,
        files=tuple(str(p.relative_to(target)) if target.is_dir() else p.name for p in files),
        size_bytes=sum(sizes), tensors=tuple(source.tensors),
    )  # fmt: skip


def matching_tables(snapshot: Snapshot, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the tables that match a list of names and patterns. Pure.

    Raises
    ------
    TableNotFound
    """
    names = sorted(snapshot.tables)
    if patterns is None:
        return names
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise TableNotFound(
                f"no table of version {snapshot.version} matches {pattern!r}; there are {names}",
                table=pattern, version=snapshot.version,
            )  # fmt: skip
        chosen |= found
    return sorted(chosen)


def planned_tensors(
    snapshot: Snapshot, tables: Sequence[str], *, slots: bool = True, dense: bool = True
) -> list[ExportedTensor]:
    """Return the tensors of an export. Hashed tables have 0 rows here: their keys are not read yet. Pure.

    Raises
    ------
    Unsupported
        A one-dimensional slot is stored per column range, so it has several values per row.
    """
    planned = []
    for name in tables:
        schema = snapshot.tables[name]
        rows = schema.num_rows
        if schema.keys == "hashed":
            planned.append(ExportedTensor(f"{name}/row_ids", "keys", "int64", (0,), name))
        planned.append(ExportedTensor(name, "table", schema.dtype, (rows, schema.dim), name))
        for slot, kind in schema.slots.items() if slots else ():
            if kind.kind == "row" and len(cuts := snapshot.table(name).column_cuts) > 1:
                raise Unsupported(
                    f"slot {slot!r} of table {name!r} has one value per row and column range, stored for columns "
                    f"{list(cuts)}; a file has one per row: export without slots, or read it with slots_rule='mean'",
                    table=name, found=cuts,
                )  # fmt: skip
            shape = (rows,) if kind.kind == "row" else (rows, schema.dim)
            planned.append(ExportedTensor(f"{name}/{slot}", "slot", kind.dtype, shape, name, slot))
    if dense:
        planned += [ExportedTensor(name, "dense", e.dtype, e.shape) for name, e in sorted(snapshot.dense.items())]
    return planned


class _Source:
    """Reads the planned tensors in row windows and reports progress."""

    def __init__(self, snapshot: Snapshot, tensors: list[ExportedTensor], progress: ExportProgress | None) -> None:
        self.snapshot = snapshot
        self._hashed: dict[str, tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]] = {}
        self.tensors = [self._sized(tensor) for tensor in tensors]
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.spec.size_bytes for tensor in self.tensors)
        self._count(0)

    @property
    def metadata(self) -> dict[str, Any]:
        """The description of the tensors, for a later import."""
        return {
            "version": self.snapshot.version, "step": self.snapshot.step,
            "tensors": [
                {
                    "name": t.name, "role": t.role, "dtype": t.dtype, "shape": list(t.shape),
                    "table": t.table, "slot": t.slot,
                }
                for t in self.tensors
            ],
        }  # fmt: skip

    def pieces(self, tensor: ExportedTensor) -> Iterator[npt.NDArray[Any]]:
        """Yield a tensor's rows in order. A piece is valid until the next one."""
        if tensor.role == "dense":
            piece = self.snapshot.read_dense(tensor.name)
            self._count(piece.nbytes)
            yield piece
        elif tensor.table in self._hashed:
            keys, values = self._hashed[tensor.table]
            piece = keys if tensor.role == "keys" else values[tensor.slot or "values"]
            self._count(piece.nbytes)
            yield piece
        else:
            view = self.snapshot.table(tensor.table or "")
            row_bytes = int(np.prod(tensor.shape[1:], dtype=np.int64)) * carrier_dtype(tensor.dtype).itemsize
            for start, stop in windows(tensor.shape[0], row_bytes, WINDOW_BYTES):
                piece = self._read(view, tensor, start, stop)
                self._count(piece.nbytes)
                yield piece

    def table_windows(self, table: str) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
        """Yield (row ids, array name to rows) of a table's tensors, all arrays of a window together."""
        arrays = [t for t in self.tensors if t.table == table and t.role != "keys"]
        if table in self._hashed:
            keys, values = self._hashed[table]
            self._count(keys.nbytes + sum(values[t.slot or "values"].nbytes for t in arrays))
            yield keys, {t.slot or "values": values[t.slot or "values"] for t in arrays}
            return
        view = self.snapshot.table(table)
        rows = view.shape[0]
        row_bytes = sum(t.spec.size_bytes for t in arrays) // max(rows, 1)
        for start, stop in windows(rows, row_bytes, WINDOW_BYTES):
            window = {t.slot or "values": self._read(view, t, start, stop) for t in arrays}
            self._count(sum(piece.nbytes for piece in window.values()))
            yield np.arange(start, stop, dtype=np.int64), window

    def _read(self, view: TableView, tensor: ExportedTensor, start: int, stop: int) -> npt.NDArray[Any]:
        return view.read(start, stop, slot=tensor.slot)

    def _sized(self, tensor: ExportedTensor) -> ExportedTensor:
        """Return the tensor with its number of rows; a hashed table is read to count them."""
        if tensor.table is None or self.snapshot.tables[tensor.table].keys != "hashed":
            return tensor
        if tensor.table not in self._hashed:
            self._hashed[tensor.table] = self.snapshot.table(tensor.table).read_all(slots=True)
        rows = len(self._hashed[tensor.table][0])
        return ExportedTensor(
            tensor.name, tensor.role, tensor.dtype, (rows, *tensor.shape[1:]), tensor.table, tensor.slot
        )

    def _count(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _write_safetensors(source: _Source, path: Path) -> None:
    by_name = {tensor.name: tensor for tensor in source.tensors}
    metadata = {METADATA_KEY: canonical_json(source.metadata).decode(), "format": "pt"}
    specs = [tensor.spec for tensor in source.tensors]
    write_safetensors(path, specs, metadata, lambda spec: source.pieces(by_name[spec.name]))


def _write_npy(source: _Source, folder: Path) -> None:
    index = source.metadata
    for tensor, entry in zip(source.tensors, index["tensors"], strict=True):
        file = npy_file(tensor)
        entry["file"] = file
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        # A stream, not a memory map: pages of a map would count as this process's memory.
        with target.open("wb") as out:
            descr = np.lib.format.dtype_to_descr(carrier_dtype(tensor.dtype))
            header = {"descr": descr, "fortran_order": False, "shape": tensor.shape}
            np.lib.format.write_array_header_1_0(out, header)
            for piece in source.pieces(tensor):
                out.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    (folder / INDEX_FILE).write_bytes(canonical_json(index))


def npy_file(tensor: ExportedTensor) -> str:
    """Return the path of a tensor's file in an export to npy. Pure."""
    if tensor.role == "dense":
        return f"dense/{encode_name(tensor.name)}.npy"
    folder = f"tables/{encode_name(tensor.table or '')}"
    return (
        f"{folder}/slots/{encode_name(tensor.slot)}.npy"
        if tensor.slot
        else (f"{folder}/{'row_ids' if tensor.role == 'keys' else 'values'}.npy")
    )


def _write_parquet(source: _Source, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from cnr_store.read.arrow_stream import float_array, float_type

    (folder / "tables").mkdir()
    (folder / INDEX_FILE).write_bytes(canonical_json(source.metadata))
    for table in dict.fromkeys(tensor.table for tensor in source.tensors if tensor.table is not None):
        arrays = {t.slot or "values": t for t in source.tensors if t.table == table and t.role != "keys"}
        kinds = {name: float_type(t.dtype, t.shape[1] if len(t.shape) > 1 else None) for name, t in arrays.items()}
        fields = [pa.field(name, kind, nullable=False) for name, kind in {"row_id": pa.int64(), **kinds}.items()]
        about = {
            METADATA_KEY: canonical_json(
                {"table": table, "version": source.snapshot.version, "step": source.snapshot.step,
                 "dtypes": {name: tensor.dtype for name, tensor in arrays.items()}}
            )
        }  # fmt: skip
        schema = pa.schema(fields, metadata=about)
        if {"row_id", "values"} & {tensor.slot for tensor in arrays.values()}:
            raise BadInput(f"a slot of table {table!r} has the name of a column; use another format", table=table)
        file = folder / "tables" / f"{encode_name(table)}.parquet"
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows, window in source.table_windows(table):
                values = [float_array(window[name], arrays[name].dtype, kind) for name, kind in kinds.items()]
                columns = [pa.array(rows), *values]
                writer.write_batch(pa.record_batch(columns, schema=schema), row_group_size=max(1, len(rows)))
    dense = [tensor for tensor in source.tensors if tensor.role == "dense"]
    if dense:
        columns_of = {
            "name": pa.string(), "dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.large_binary(),
        }  # fmt: skip
        schema = pa.schema(list(columns_of.items()))
        with pq.ParquetWriter(folder / "dense.parquet", schema, compression="zstd") as writer:
            for tensor in dense:
                data = b"".join(np.ascontiguousarray(piece).tobytes() for piece in source.pieces(tensor))
                row = [[tensor.name], [tensor.dtype], [list(tensor.shape)], [data]]
                columns = [pa.array(value, kind) for value, kind in zip(row, schema.types, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=schema))


def _check_target(target: Path, format: ExportFormat, *, overwrite: bool) -> None:  # noqa: A002 - as above
    if not target.exists():
        return
    if not overwrite:
        raise PathExists(
            f"{target} exists; choose another path, or replace it: overwrite=True, `cnr export --overwrite`",
            path=str(target),
        )
    if target.is_dir() and (format == "safetensors" or not (target / INDEX_FILE).is_file()):
        raise BadInput(f"{target} is a folder, but not an export; choose another path", path=str(target))


def _replace(scratch: Path, target: Path) -> None:
    if target.is_symlink():
        target.unlink()  # its target is kept
    elif target.is_dir():
        shutil.rmtree(target)
    scratch.replace(target)


def _remove(scratch: Path) -> None:
    if scratch.is_dir():
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        scratch.unlink(missing_ok=True)
