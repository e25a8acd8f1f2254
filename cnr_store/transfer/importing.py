"""Saves tensors of another program as a version of a store. A pure function decides which of them are tables.

The tensors of a source can be sliced by rows (`cnr_store.transfer.safetensors_file`), so tables are encoded from
memory-mapped files and are never in memory as a whole.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from cnr_store.encodings import widths
from cnr_store.errors import BadInput, TableNotFound
from cnr_store.format.document_tree import Default
from cnr_store.format.documents import loads
from cnr_store.format.layout import check_names
from cnr_store.runtime.notebook import ShownReport
from cnr_store.runtime.threads import windows
from cnr_store.segment.codes import array_specs
from cnr_store.store import Store
from cnr_store.transfer.export_folder import open_export
from cnr_store.transfer.exporting import METADATA_KEY
from cnr_store.transfer.safetensors_file import Tensor, TensorFile, open_safetensors
from cnr_store.types import JsonValue
from cnr_store.write.encode import check_arrays, refused_rows
from cnr_store.write.schema_choice import checked_shape, table_dtype, table_schema
from cnr_store.write.table_options import TableOptions

ImportProgress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

MIN_TABLE_ROWS = 1000
"""A matrix with fewer rows is dense unless a pattern matches it."""

_WINDOW_BYTES = 64 * 1024 * 1024

_TABLE_DTYPES = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The role of each tensor: table name to tensor, table to slot name to tensor, and dense tensors.

    ``hashed`` maps a table to the tensor with its keys.
    """

    tables: dict[str, str]
    slots: dict[str, dict[str, str]]
    hashed: dict[str, str]
    dense: tuple[str, ...]
    step: int | None = None


@dataclass(frozen=True, slots=True)
class ImportReport(ShownReport):
    """What an import committed.

    Attributes
    ----------
    slots
        By table, the names of its optimizer state.
    dropped
        Tables of the version before that are not in the source.
    ignored
        Values of the source that a store cannot have, and second names of tied weights.
    """

    version: int
    step: int
    size_bytes: int
    tables: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    dense: tuple[str, ...]
    dropped: tuple[str, ...]
    ignored: tuple[str, ...] = ()


class _Described(msgspec.Struct, frozen=True):
    name: str
    role: str
    table: str | None = None
    slot: str | None = None


class _Description(msgspec.Struct, frozen=True):
    step: int
    tensors: tuple[_Described, ...]


# Created at import, as in documents.py.
_DESCRIPTION = msgspec.json.Decoder(_Description)


def plan_import(source: TensorFile, patterns: Sequence[str] | None = None) -> ImportPlan:
    """Decide which tensors are tables. Pure, no I/O.

    A file that this library exported has a description. In other files tables are the matrices of float32, float16 or
    bfloat16 with at least 1,000 rows, or with ``patterns`` those whose name matches. All other tensors are dense.

    Raises
    ------
    TableNotFound
        A pattern matches no tensor.
    BadInput
        There are no tensors, a pattern matches one that cannot be a table, or the file's description does not match it.
    """
    described = source.metadata.get(METADATA_KEY)
    if described is not None and patterns is None:
        return _described_plan(source, described)
    if not source.tensors:
        raise BadInput(
            "the file has no tensors, so there is nothing to import; name its entry with the model's weights"
        )
    tables = {}
    for name, tensor in source.tensors.items():
        shape = tensor.values.shape
        can_be = tensor.dtype in _TABLE_DTYPES and len(shape) == 2 and shape[1] > 0
        if patterns is None:
            if can_be and shape[0] >= MIN_TABLE_ROWS:
                tables[name] = name
        elif any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            if not can_be:
                raise BadInput(
                    f"tensor {name!r} is {tensor.dtype} {shape}; a table is a matrix of float32, float16 or bfloat16",
                    table=name, found=f"{tensor.dtype} {shape}",
                )  # fmt: skip
            tables[name] = name
    for pattern in patterns or ():
        if not any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in source.tensors):
            raise TableNotFound(f"no tensor matches {pattern!r}", table=pattern)
    return ImportPlan(tables, {}, {}, tuple(name for name in source.tensors if name not in tables))


def _described_plan(source: TensorFile, described: str) -> ImportPlan:
    try:
        description = loads(described.encode(), _DESCRIPTION)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadInput(f"the file's own description of its tensors cannot be parsed: {error}") from error
    tables: dict[str, str] = {}
    slots: dict[str, dict[str, str]] = {}
    hashed: dict[str, str] = {}
    for item in description.tensors:
        if item.name not in source.tensors:
            raise BadInput(f"the file describes tensor {item.name!r}, but does not contain it", found=item.name)
        table = item.table or ""
        if item.role == "table":
            tables[table] = item.name
        elif item.role == "slot" and item.slot:
            slots.setdefault(table, {})[item.slot] = item.name
        elif item.role == "keys":
            hashed[table] = item.name
    used = {*tables.values(), *hashed.values(), *(name for of_table in slots.values() for name in of_table.values())}
    if not slots.keys() <= tables.keys() or not hashed.keys() <= tables.keys() or "" in tables:
        raise BadInput("the file's description names slots or keys of tables that it does not contain; export it again")
    return ImportPlan(tables, slots, hashed, tuple(n for n in source.tensors if n not in used), description.step)


def _opened(source: TensorFile | str | Path) -> TensorFile:
    if isinstance(source, TensorFile):
        return source
    path = Path(source)
    return open_export(path) if path.is_dir() else open_safetensors(path)


def check_import(
    source: TensorFile | str | Path, *, tables: Sequence[str] | None = None, options: TableOptions | None = None
) -> None:
    """Raise if `import_tensors` cannot store tensors in an empty store. Blocks; reads tables and their slots once.

    Call it before a store is created for them, so that a wrong file leaves none.

    Raises
    ------
    BadInput and its kinds, NotFound
        A name, an option or a scale that does not fit, or rows with NaN or Inf; else as `import_tensors`.
    AccessDenied, StorageFailure
    """
    file = _opened(source)
    check_planned(file, plan_import(file, tables), options)


def check_planned(file: TensorFile, plan: ImportPlan, options: TableOptions | None) -> None:
    """Raise if the tables of a plan cannot be stored in an empty store, see `check_import`."""
    options = options or TableOptions()
    check_names([*plan.tables, *plan.dense])
    for table, tensor in plan.tables.items():
        values, slots = file.tensors[tensor], {name: file.tensors[of] for name, of in plan.slots.get(table, {}).items()}
        dtype = table_dtype(values.values, table)
        num_rows, dim = checked_shape(values.values, table)
        arrays = {name: slot.values for name, slot in slots.items()}
        schema = table_schema(
            table, options, num_rows=num_rows, dim=dim, dtype=dtype, sample=values.values, slots=arrays
        )  # fmt: skip
        check_arrays(table, array_specs(schema), num_rows, values.values, arrays)
        if options.nonfinite == "refuse":
            _check_finite(table, [values, *slots.values()])


def _check_finite(table: str, tensors: Sequence[Tensor]) -> None:
    """Raise if a row of a table, or of its slots, has NaN or Inf."""
    num_rows = len(tensors[0].values)
    row_bytes = sum(one.values.nbytes for one in tensors) // max(1, num_rows)
    first, count = 0, 0
    for start, stop in windows(num_rows, row_bytes, _WINDOW_BYTES):
        is_bad = np.zeros(stop - start, np.bool_)
        for one in tensors:
            block = widths.to_float32(one.values[start:stop], one.dtype)  # type: ignore[arg-type]
            is_bad |= ~np.isfinite(block).reshape(len(is_bad), -1).all(axis=1)
        if is_bad.any():
            first = first if count else start + int(is_bad.argmax())
            count += int(is_bad.sum())
    if count:
        raise refused_rows(table, first, count)


def import_tensors(
    store: Store,
    source: TensorFile | str | Path,
    *,
    step: int | None = None,
    tables: Sequence[str] | None = None,
    options: TableOptions | None = None,
    scalars: Mapping[str, JsonValue] | None = None,
    replace: bool = False,
    progress: ImportProgress | None = None,
) -> ImportReport:
    """Commit tensors as a ``baseline``. Becomes the store's writer and fences another open one. Blocks.

    Parameters
    ----------
    source
        The path of a safetensors file or of an exported folder (npy, Parquet), or its opened tensors.
    step
        The training step of the state; None uses the file's, or 0.
    tables
        Names or patterns of the tensors that are tables; see `plan_import`.
    options
        How all tables are stored; None uses the defaults. Every table starts a new generation.
    scalars
        Plain values to save with the state.
    replace
        Drop tables of the store's head that the source does not contain; without it they are an error.
    progress
        Called with (bytes done, total bytes) after each table.

    While this runs, the writer's mirror is in temporary files (2 bytes per element).

    Raises
    ------
    BadInput and its kinds, NotFound
        Nothing was committed.
    Conflict, CommitStateUnknown, StorageFailure
    """
    file = _opened(source)
    plan = plan_import(file, tables)
    return commit_import(
        store, file, plan, step=plan.step or 0 if step is None else step, options=options, scalars=scalars or {},
        replace=replace, progress=progress,
    )  # fmt: skip


def commit_import(
    store: Store,
    file: TensorFile,
    plan: ImportPlan,
    *,
    step: int,
    options: TableOptions | None,
    scalars: Mapping[str, JsonValue],
    documents: Mapping[str, Any] = MappingProxyType({}),
    leaf: Default | None = None,
    replace: bool,
    progress: ImportProgress | None,
) -> ImportReport:
    """Commit the tensors of a plan as a ``baseline``, see `import_tensors`; ``leaf`` is for values in ``documents``."""
    missing = sorted(store.snapshot().tables.keys() - plan.tables.keys())
    if missing and not replace:
        raise BadInput(
            f"the store has tables {missing}, which the source does not contain; a baseline replaces the whole state: "
            "pass replace (--replace) to drop them, or import into another store",
            table=missing[0], found=missing,
        )  # fmt: skip
    total = sum(tensor.values.nbytes for tensor in file.tensors.values())
    done = 0
    # A mirror, so that the baseline has state digests; in files, so that it takes no memory.
    with store.writer(mirror="mmap") as writer:
        with writer.begin(step, kind="baseline") as txn:
            for table in missing:
                txn.drop_table(table)
            for table, tensor in plan.tables.items():
                slots = {slot: file.tensors[of_slot].values for slot, of_slot in plan.slots.get(table, {}).items()}
                values = file.tensors[tensor]
                if table in plan.hashed:
                    txn.create_table(
                        table, dim=values.values.shape[1], options=options, dtype=values.dtype,
                        slots={slot: "row" if array.ndim == 1 else "element" for slot, array in slots.items()},
                        sample=values.values,
                    )  # fmt: skip
                    row_ids = file.tensors[plan.hashed[table]].values
                    txn.write_rows(table, row_ids, values.values, slots=slots)
                else:
                    txn.write_table(table, values.values, slots=slots, options=options)
                done += values.values.nbytes + sum(array.nbytes for array in slots.values())
                if progress is not None:
                    progress(done, total)
            dense = {name: file.tensors[name] for name in plan.dense}
            txn.put_dense(
                {name: tensor.values for name, tensor in dense.items()},
                {name: tensor.dtype for name, tensor in dense.items()},
            )
            txn.put_scalars(dict(scalars))
            for name, document in documents.items():
                txn.put_document(name, document, leaf)
        size_bytes, version = txn.size_bytes, txn.version
    assert version is not None  # the commit succeeded, or it raised
    if progress is not None:
        progress(total, total)
    slot_names = {table: tuple(of_table) for table, of_table in plan.slots.items()}
    return ImportReport(version, step, size_bytes, tuple(plan.tables), slot_names, plan.dense, tuple(missing))
