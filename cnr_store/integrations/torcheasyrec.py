"""Imports what TorchEasyRec dumps of its tables while it trains: the files of each step become a version of a store.

A dump has the rows that changed since the one before, without optimizer state. One rank writes
``PREFIX_step_N.parquet``, several write ``step_N/PREFIX_step_N_rank_R_of_W.parquet``, one file each, an empty one too.
Names, columns and the bytes of quantized rows are those of the source of TorchEasyRec 1.3.16 (commit 54cac316:
``tzrec/utils/delta_embedding_dump.py``, ``quant_util.py``); the tombstones of evicted keys those of its pull request
638, which was merged later. No dump of a real training was at hand.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cnr_store.errors import BadInput, BadRowIds, BadShape, DoesNotApply, NotFound
from cnr_store.format.layout import check_name
from cnr_store.format.records import TableSchema
from cnr_store.runtime.local_files import failing_at
from cnr_store.runtime.notebook import ShownReport
from cnr_store.store import Store
from cnr_store.transfer.importing import ImportProgress
from cnr_store.types import RowIds
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction

__all__ = ["DumpImportReport", "DumpedStep", "check_dump", "import_dump", "plan_dump"]

Array = npt.NDArray[Any]

_NUMBER = "0|[1-9][0-9]{0,%d}"  # with no zero before it: two names of one file would be one
_NAME = re.compile(
    rf"(?P<prefix>.+)_step_(?P<step>{_NUMBER % 17})"
    rf"(?:_rank_(?P<rank>{_NUMBER % 5})_of_(?P<world>{_NUMBER % 5}))?\.parquet"
)
_COLUMNS = {
    "global_step": (pa.int64(),),
    "rank": (pa.int32(),),
    "world_size": (pa.int32(),),
    "table_fqn": (pa.string(),),
    "key_id": (pa.int64(),),
    "embedding": (pa.list_(pa.float32()), pa.list_(pa.uint8())),
    "source": (pa.string(),),
}
"""The columns that are read, and the types that each may have."""
_TRAINED, _EVICTED = "model_delta_tracker", "dynamicemb_evicted"
_QUANTIZED_TAIL = 4
"""Bytes of a quantized row after its codes: a float16 scale and a float16 offset, little-endian."""
_BATCH_ROWS = 65_536
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DumpedStep:
    """The files of one training step, by rank."""

    step: int
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class DumpImportReport(ShownReport):
    """What an import of a dump committed.

    Attributes
    ----------
    versions, steps
        The versions, and the training step of each.
    skipped
        Steps that are not after the one that the store had: an earlier import brought them.
    rows, evicted
        Rows and tombstones that were read of these steps.
    """

    versions: tuple[int, ...]
    steps: tuple[int, ...]
    skipped: tuple[int, ...]
    tables: tuple[str, ...]
    rows: int
    evicted: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _StepRows:
    """What one step has of a table: keys int64 (n,), values float32 (n, dim), and evicted keys; keys ascend."""

    step: int
    table: str
    keys: RowIds
    values: Array
    evicted: RowIds


def plan_dump(paths: Iterable[Path]) -> tuple[DumpedStep, ...]:
    """Sort the files of a dump into steps, ascending, each with a file of every rank. Pure; ``paths`` are relative.

    Raises
    ------
    BadInput
        A file is none of a dump or of another one, or a step lacks a rank's file or has files of two world sizes.
    """
    found: dict[int, dict[tuple[int, int], Path]] = {}
    prefixes = set()
    for path in sorted(paths):
        name = _NAME.fullmatch(path.name)
        folder = None if name is None else "." if name["rank"] is None else f"step_{name['step']}"
        if name is None or str(path.parent) != folder:
            raise BadInput(
                f"{path} is no file of a dump: they are PREFIX_step_N.parquet, or "
                "step_N/PREFIX_step_N_rank_R_of_W.parquet where several ranks wrote; move it elsewhere",
                path=str(path),
            )
        prefixes.add(name["prefix"])
        rank = (0, 1) if name["rank"] is None else (int(name["rank"]), int(name["world"]))
        found.setdefault(int(name["step"]), {})[rank] = path
    if len(prefixes) > 1:
        raise BadInput(
            f"the folder has files of {len(prefixes)} dumps, {sorted(prefixes)}; import each from a folder of its own",
            found=sorted(prefixes),
        )
    return tuple(_planned(step, found[step]) for step in sorted(found))


def _planned(step: int, files: Mapping[tuple[int, int], Path]) -> DumpedStep:
    worlds = sorted({world for _, world in files})
    if len(worlds) > 1:
        raise BadInput(
            f"step {step} has files of {' and of '.join(map(str, worlds))} ranks: two runs wrote it; remove those of "
            "one of them",
            found=worlds,
        )
    [world] = worlds
    absent = [rank for rank in range(world) if (rank, world) not in files]
    if absent or len(files) != world:
        raise BadInput(
            f"step {step} has {len(files)} files of {world} ranks, without those of ranks {absent}; every rank writes "
            "one, an empty one too",
            expected=world, found=len(files),
        )  # fmt: skip
    return DumpedStep(step, tuple(files[rank, world] for rank in range(world)))


def check_dump(source: str | Path) -> None:
    """Raise if `import_dump` cannot store a dump in an empty store. Blocks; reads every file once.

    Call it before a store is created for it, so that a damaged dump leaves none.

    Raises
    ------
    NotFound, BadInput and its kinds, AccessDenied, StorageFailure
    """
    _check_steps(_found(Path(source)), {}, lambda _: None)


def import_dump(
    store: Store,
    source: str | Path,
    *,
    options: TableOptions | None = None,
    replace: bool = False,
    progress: ImportProgress | None = None,
) -> DumpImportReport:
    """Commit each step of a dump as a version of hashed tables, under its own step. Blocks.

    In a store without a state the first step is a baseline, the others are deltas. In one that has a state all are
    deltas, of the steps after its newest one: run it again as the training goes on. Rows with NaN or Inf are stored
    exactly. Becomes the store's writer and fences another open one.

    Every file is read twice: all are checked before anything is written. Memory: the rows that one step has of its
    largest table, as float32, twice; what is written of one step; 65,536 rows of a file. The writer's mirror is in
    temporary files.

    Parameters
    ----------
    source
        The folder of the dump: TorchEasyRec's ``output_dir``.
    options
        How tables are stored that the store does not have yet; None uses the defaults.
    replace
        Begin with a baseline that drops all tables of the store.
    progress
        Called with (bytes read, total bytes) after each step; each file counts twice.

    Raises
    ------
    NotFound
        There is no such folder, or no file in it.
    BadInput and its kinds
        Files of two dumps, of two world sizes or without a rank; another layout; a row of another width; a key with two
        rows. Nothing was written.
    DoesNotApply
        The store has a table of that name that is dense, or has another width, or slots. Nothing was written.
    Conflict, CommitStateUnknown, StorageFailure
        Steps that were committed stay: run it again.
    """
    folder = Path(source)
    steps = _found(folder)
    head = store.snapshot()
    begins = head.is_empty or replace
    newer = steps if begins else tuple(one for one in steps if one.step > head.step)
    count = _counter([*newer, *newer], progress)
    widths = _check_steps(newer, {} if begins else head.tables, count)
    skipped = tuple(one.step for one in steps if one not in newer)
    if not newer:
        return DumpImportReport((), (), skipped, (), 0, 0, 0)
    chosen = dataclasses.replace(options or TableOptions(), nonfinite="escape")
    versions: list[int] = []
    size_bytes = rows = evicted = 0
    # A mirror, so that rows are stored as differences; in files, so that it takes no memory.
    with store.writer(mirror="mmap") as writer:
        if not begins:
            writer.restore()
        for one in newer:
            is_first = begins and not versions
            with writer.begin(one.step, "baseline" if is_first else "delta") as txn:
                for table in head.tables if is_first else ():
                    txn.drop_table(table)
                for found in _read(one):
                    _write(txn, found, chosen)
                    rows, evicted = rows + len(found.keys), evicted + len(found.evicted)
            assert txn.version is not None  # the commit succeeded, or it raised
            versions.append(txn.version)
            size_bytes += txn.size_bytes
            count(one)
    steps_done = tuple(one.step for one in newer)
    return DumpImportReport(tuple(versions), steps_done, skipped, tuple(sorted(widths)), rows, evicted, size_bytes)


def _found(folder: Path) -> tuple[DumpedStep, ...]:
    with failing_at(folder, "read"):
        paths = [path.relative_to(folder) for path in chain(folder.glob("*.parquet"), folder.glob("*/*.parquet"))]
    if not paths:
        raise NotFound(f"{folder} has no file of a dump (PREFIX_step_N.parquet, step_N/...)", path=str(folder))
    return tuple(DumpedStep(one.step, tuple(folder / file for file in one.files)) for one in plan_dump(paths))


def _counter(steps: Sequence[DumpedStep], progress: ImportProgress | None) -> Callable[[DumpedStep], None]:
    """Return a function that reports the bytes of a step that was read."""
    sizes = {one.step: sum(file.stat().st_size for file in one.files) for one in steps}
    total, done = sum(sizes[one.step] for one in steps), 0

    def count(step: DumpedStep) -> None:
        nonlocal done
        done += sizes[step.step]
        if progress is not None:
            progress(done, total)

    return count


def _check_steps(
    steps: Sequence[DumpedStep], stored: Mapping[str, TableSchema], count: Callable[[DumpedStep], None]
) -> dict[str, int]:
    """Read all rows of steps; return the width of each table, or raise."""
    widths: dict[str, int] = {}
    for one in steps:
        for found in _read(one):
            _check_table(found, widths, stored)
        count(one)
    return widths


def _check_table(found: _StepRows, widths: dict[str, int], stored: Mapping[str, TableSchema]) -> None:
    """Raise if rows do not fit those that were read before, or the table of the store."""
    check_name(found.table)
    width = found.values.shape[1]
    if widths.setdefault(found.table, width) != width:
        raise BadShape(
            f"table {found.table!r} has rows of {width} elements at step {found.step}, of {widths[found.table]} before",
            table=found.table, expected=widths[found.table], found=width,
        )  # fmt: skip
    schema = stored.get(found.table)
    if schema is None:
        return
    form = (schema.keys, schema.dtype, schema.dim, sorted(schema.slots))
    if form != ("hashed", "float32", width, []):
        raise DoesNotApply(
            f"the store has table {found.table!r} with {schema.keys} keys, {schema.dtype}, width {schema.dim}, slots "
            f"{sorted(schema.slots)}; the dump has hashed keys and float32 rows of {width} elements: import it into "
            "another store, or replace the tables",
            table=found.table, expected=f"hashed float32 {width}", found=str(form),
        )  # fmt: skip


def _write(txn: Transaction, found: _StepRows, options: TableOptions) -> None:
    is_new = found.table not in txn.tables
    if len(found.keys):
        if is_new:
            txn.create_table(found.table, dim=found.values.shape[1], options=options, sample=found.values)
        txn.write_rows(found.table, found.keys, found.values, nonfinite="escape")
    if len(found.evicted) and not is_new:  # a new table has none of them
        txn.delete_rows(found.table, found.evicted)


def _read(step: DumpedStep) -> Iterator[_StepRows]:
    """Yield the rows that a step has of each table, by name; checked, so that a step is read as a whole or raises."""
    places: dict[str, dict[Path, list[int]]] = {}
    for file in step.files:
        with _opened(file) as parquet:
            for group in range(parquet.num_row_groups):
                names = parquet.read_row_group(group, columns=["table_fqn"]).column(0).unique()
                for table in names.to_pylist():
                    if table is None:
                        raise _wrong(file, "a row whose table_fqn is null")
                    places.setdefault(table, {}).setdefault(file, []).append(group)
    for table in sorted(places):
        yield _read_table(step, table, places[table])


def _read_table(step: DumpedStep, table: str, places: Mapping[Path, Sequence[int]]) -> _StepRows:
    keys: list[RowIds] = []
    values: list[Array] = []
    is_evicted: list[npt.NDArray[np.bool_]] = []
    for file, groups in places.items():
        rank = step.files.index(file)
        expected = {"global_step": step.step, "rank": rank, "world_size": len(step.files)}
        with _opened(file) as parquet:
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=list(_COLUMNS)):
                mine = batch.filter(pc.equal(batch.column("table_fqn"), table))
                if not mine.num_rows:
                    continue
                _check_columns(file, mine, expected)
                keys.append(mine.column("key_id").to_numpy())
                values.append(_floats(file, mine.column("embedding")))
                is_evicted.append(pc.equal(mine.column("source"), _EVICTED).to_numpy(zero_copy_only=False))
                if values[-1].shape[1] != values[0].shape[1]:
                    raise _wrong(
                        file,
                        f"rows of {values[-1].shape[1]} elements of table {table!r}, which has {values[0].shape[1]}",
                    )
    return _in_order(step, table, np.concatenate(keys), np.concatenate(values), np.concatenate(is_evicted))


def _in_order(
    step: DumpedStep, table: str, keys: RowIds, values: Array, is_evicted: npt.NDArray[np.bool_]
) -> _StepRows:
    """Sort rows by key. Of a data-parallel table several ranks have a row: one is taken, if they agree."""
    order = np.argsort(keys, kind="stable")
    if (order[1:] < order[:-1]).any():
        keys, values, is_evicted = keys[order], values[order], is_evicted[order]
    again = np.flatnonzero(keys[1:] == keys[:-1])
    differs = (values[again].view(np.int32) != values[again + 1].view(np.int32)).any(axis=1)
    differs |= is_evicted[again] != is_evicted[again + 1]
    if differs.any():
        key = int(keys[again[differs][0]])
        raise BadRowIds(
            f"key {key} of table {table!r} has two different rows at step {step.step}; replicas of a data-parallel "
            "table must be equal, and of any other table one rank has the key",
            table=table, found=key,
        )  # fmt: skip
    if len(again):
        is_first = np.ones(len(keys), np.bool_)
        is_first[again + 1] = False
        keys, values, is_evicted = keys[is_first], values[is_first], is_evicted[is_first]
    if is_evicted.any():
        return _StepRows(step.step, table, keys[~is_evicted], values[~is_evicted], keys[is_evicted])
    return _StepRows(step.step, table, keys, values, keys[:0])


@contextmanager
def _opened(file: Path) -> Iterator[pq.ParquetFile]:
    """Open a file whose columns are those of a dump; errors of Parquet become errors of this library."""
    try:
        with failing_at(file, "read"), pq.ParquetFile(file, buffer_size=_BUFFER_BYTES) as parquet:
            schema = parquet.schema_arrow
            for name, types in _COLUMNS.items():
                found = schema.field(name).type if schema.names.count(name) == 1 else None
                if not any(_same(found, one) for one in types):
                    raise _wrong(file, f"a column {name} of type {found}, not {' or '.join(map(str, types))}")
            yield parquet
    except pa.ArrowException as error:
        raise BadInput(f"{file} cannot be read as Parquet: {error}", path=str(file)) from error


def _same(found: pa.DataType | None, wanted: pa.DataType) -> bool:
    """Whether types are equal but for the name of a list's elements."""
    if found is None or not pa.types.is_list(found) or not pa.types.is_list(wanted):
        return bool(found == wanted)
    return bool(found.value_type == wanted.value_type)


def _check_columns(file: Path, batch: pa.RecordBatch, expected: Mapping[str, int]) -> None:
    for name in _COLUMNS:
        if batch.column(name).null_count:
            raise _wrong(file, f"a row whose {name} is null")
    for name, wanted in expected.items():
        found = batch.column(name).to_numpy()
        if (found != wanted).any():
            raise _wrong(file, f"{name} {int(found[found != wanted][0])}, its name says {wanted}")
    sources = set(batch.column("source").unique().to_pylist())
    if not sources <= {_TRAINED, _EVICTED}:
        raise _wrong(file, f"rows of source {sorted(sources)}; known are {_TRAINED!r} and {_EVICTED!r}")


def _floats(file: Path, column: pa.ListArray) -> Array:
    """Return embeddings as float32 (n, dim): those of quantized rows are ``code * scale + offset``, in float32."""
    widths = pc.list_value_length(column).to_numpy()
    flat = column.flatten()
    is_quantized = column.type.value_type == pa.uint8()
    width = int(widths[0])
    if (widths != width).any() or flat.null_count or width <= (_QUANTIZED_TAIL if is_quantized else 0):
        raise _wrong(file, f"embeddings of {sorted(set(widths.tolist()))} elements, or with empty ones")
    rows: Array = flat.to_numpy().reshape(len(column), width)
    if not is_quantized:
        return rows
    tail = np.ascontiguousarray(rows[:, -_QUANTIZED_TAIL:]).view("<f2").astype(np.float32)
    with np.errstate(invalid="ignore"):  # a scale may be Inf or NaN, as the row that was quantized was
        decoded: Array = rows[:, :-_QUANTIZED_TAIL].astype(np.float32) * tail[:, :1] + tail[:, 1:]
    return decoded


def _wrong(file: Path, found: str) -> BadInput:
    return BadInput(
        f"{file} has {found}; expected is the dump of a step by TorchEasyRec: dump it again, or remove the step",
        path=str(file), found=found,
    )  # fmt: skip
