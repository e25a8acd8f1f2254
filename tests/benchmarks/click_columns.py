"""Columns of a data file: read up to a limit, then turned into numbers, table rows and names.

Ids become table rows in one of two ways: a column of integers below :func:`direct_bound` is used as it is,
any other column gets rows in order of first appearance. The bound grows with the file, so a single hostile id
cannot decide how much memory a table takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, csv

from cnr_store.errors import BadInput


def direct_bound(num_samples: int) -> int:
    """Largest table that a column of ``num_samples`` integers may span without being encoded."""
    return max(1 << 16, 8 * num_samples)


def read_delimited(path: Path, max_samples: int, *, parse: Any, read: Any, convert: Any) -> list[Any]:
    """String columns of a text file, read block by block up to ``max_samples`` lines."""
    try:
        with csv.open_csv(path, parse_options=parse, read_options=read, convert_options=convert) as reader:
            return take(reader, read.column_names, max_samples)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}", path=str(path)) from error


def take(batches: Iterable[Any], names: Sequence[str], max_samples: int) -> list[Any]:
    """The named columns of the first ``max_samples`` rows, each one pyarrow array."""
    taken, count = [], 0
    for batch in batches:
        taken.append(batch.slice(0, max_samples - count).select(list(names)))
        count += taken[-1].num_rows
        if count >= max_samples:
            break
    if not taken or count == 0:
        raise BadInput("the data file holds no samples")
    table = pa.Table.from_batches(taken).unify_dictionaries()
    return [table.column(name).combine_chunks() for name in names]


def floats(column: Any, where: str, *, fill: float | None = None) -> npt.NDArray[np.float64]:
    """A column as finite float64 (n,), nulls replaced by ``fill``; BadInput names ``where`` otherwise."""
    try:
        numbers = compute.cast(column, pa.float64())
    except pa.ArrowException as error:
        raise BadInput(f"{where} is not a number everywhere: {error}") from error
    if numbers.null_count and fill is None:
        raise BadInput(f"{where} has {numbers.null_count} blanks", found=numbers.null_count)
    if fill is not None:
        numbers = compute.fill_null(numbers, fill)
    values: npt.NDArray[np.float64] = numbers.to_numpy(zero_copy_only=False)
    finite = np.isfinite(values)
    if not finite.all():
        raise BadInput(f"{where} has {int((~finite).sum())} values that are NaN or infinite; remove these samples")
    return values


def row_numbers(column: Any, *, direct: bool) -> tuple[npt.NDArray[np.int64], int]:
    """Table rows int64 (n,) of an id column and the size of the table.

    With ``direct``, integers in [0, direct_bound(n)) without a blank are rows already.
    """
    if direct and column.null_count == 0 and not pa.types.is_dictionary(column.type):
        try:
            rows = compute.cast(column, pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            rows = None
        if rows is not None and rows.min() >= 0 and rows.max() < direct_bound(rows.size):
            return rows.astype(np.int64, copy=False), int(rows.max()) + 1
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    encoded = column.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def table_names(columns: list[str]) -> list[str]:
    """Column names as unique table names of letters, digits, dash and underscore (a dot would split them)."""
    names: list[str] = []
    for column in columns:
        base = re.sub(r"[^A-Za-z0-9_-]", "_", column) or "column"
        name, suffix = base, 2
        while name in names:
            name, suffix = f"{base}_{suffix}", suffix + 1
        names.append(name)
    return names
