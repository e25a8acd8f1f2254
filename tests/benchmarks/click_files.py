"""Readers for the benchmarks: RecBole ``.inter``, Criteo CSV and TSV, Parquet, all into a ClickLog.

Each reader is bounded by ``max_samples``, so a file of any size can be pointed at.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from click_columns import floats, read_delimited, row_numbers, table_names, take
from pyarrow import csv, parquet

from cnr_store.errors import BadInput, NotFound
from cnr_store_tools.demo.click_log import ClickLog

DEFAULT_MAX_SAMPLES = 500_000
CRITEO_INTEGERS = 13
CRITEO_CATEGORIES = 26
RATING_THRESHOLD = 4.0


def read_click_log(path: str | Path, *, max_samples: int = DEFAULT_MAX_SAMPLES) -> ClickLog:
    """Return the samples of a file in time order; the reader is chosen by the suffix.

    ``.inter`` is RecBole; ``.csv``, ``.tsv`` and ``.txt`` (also with ``.gz``) are Criteo; ``.parquet`` is
    Parquet.

    Raises
    ------
    NotFound
        If there is no such file.
    BadInput
        For another suffix, or contents that the reader cannot take; the message names file and column.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFound(f"no data file at {path}", path=str(path))
    suffix = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    readers: dict[str, Callable[..., ClickLog]] = {
        "inter": read_inter,
        "csv": read_criteo,
        "tsv": read_criteo,
        "txt": read_criteo,
        "parquet": read_parquet,
    }
    if suffix not in readers:
        raise BadInput(
            f"cannot tell the format of {path} by its name: expected .inter (RecBole), .csv or .tsv (Criteo) "
            f"or .parquet",
            path=str(path),
            expected=sorted(readers),
            found=suffix,
        )
    return readers[suffix](path, max_samples=max_samples)


def read_inter(path: str | Path, *, max_samples: int = DEFAULT_MAX_SAMPLES) -> ClickLog:
    """Return a RecBole atomic interaction file: a header of ``name:type``, then tab separated values.

    ``token`` columns are tables, ``float`` columns dense features, except three by name: ``label`` is the
    label; without it ``rating`` gives it (rating >= 4); ``timestamp`` gives the order (stable; file order
    without it). Sequence columns are left out. Only the first ``max_samples`` lines are read.
    """
    names, columns = _read_inter_columns(Path(path), max_samples)
    kinds = {name.rpartition(":")[0]: name.rpartition(":")[2] for name in names}
    unknown = sorted(set(kinds.values()) - {"token", "float", "token_seq", "float_seq"})
    if unknown or "" in kinds:
        raise BadInput(
            f"{path}: the first line must be a RecBole header of name:type with types token, float, "
            f"token_seq and float_seq: found {names}",
            path=str(path),
            found=names,
        )
    values = dict(zip(kinds, columns, strict=True))
    if "label" in kinds:
        labels = floats(values["label"], f"{path}: column 'label'") > 0.5
    elif "rating" in kinds:
        labels = floats(values["rating"], f"{path}: column 'rating'") >= RATING_THRESHOLD
    else:
        raise BadInput(f"{path} has neither a label nor a rating column: found {list(kinds)}", path=str(path))
    order = np.arange(labels.size)
    if "timestamp" in kinds:
        order = np.argsort(floats(values["timestamp"], f"{path}: column 'timestamp'"), kind="stable")
    tables = [name for name, kind in kinds.items() if kind == "token" and name not in ("label", "timestamp")]
    dense = [name for name, kind in kinds.items() if kind == "float" and name not in ("label", "rating", "timestamp")]
    return _click_log(
        path,
        labels=labels[order],
        # Rows in order of first appearance *in time*: sort before encoding.
        tables={name: row_numbers(values[name].take(order), direct=False) for name in tables},
        dense=[floats(values[name], f"{path}: column {name!r}", fill=0.0)[order] for name in dense],
    )


def read_criteo(path: str | Path, *, max_samples: int = DEFAULT_MAX_SAMPLES) -> ClickLog:
    """Return a Criteo display advertising file, which is in time order already and has no header.

    Columns: label, 13 integers, 26 categories. Tabs or commas, by the first line. The integers become dense
    features ``log(1 + max(x, 0))``, a blank 0. The categories become 26 tables: integers as they are,
    hexadecimal strings and columns with blanks (a blank is a value of its own) by first appearance.
    """
    path = Path(path)
    integers = [f"i{index}" for index in range(1, CRITEO_INTEGERS + 1)]
    categories = [f"c{index}" for index in range(1, CRITEO_CATEGORIES + 1)]
    column_names = ["label", *integers, *categories]
    columns = read_delimited(
        path,
        max_samples,
        parse=csv.ParseOptions(delimiter=_delimiter(path), quote_char=False),
        read=csv.ReadOptions(column_names=column_names, block_size=1 << 20),
        convert=csv.ConvertOptions(
            column_types={name: pa.string() for name in column_names},
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
            null_values=[""],
        ),
    )
    values = dict(zip(column_names, columns, strict=True))
    dense = [np.log1p(np.maximum(floats(values[name], f"{path}: column {name!r}", fill=0.0), 0.0)) for name in integers]
    return _click_log(
        path,
        labels=floats(values["label"], f"{path}: the label (first column)") > 0.5,
        tables={name: row_numbers(values[name], direct=True) for name in categories},
        dense=dense,
    )


def read_parquet(
    path: str | Path,
    *,
    label: str = "label",
    id_columns: Sequence[str] | None = None,
    dense_columns: Sequence[str] | None = None,
    time_column: str | None = "timestamp",
    max_samples: int = DEFAULT_MAX_SAMPLES,
) -> ClickLog:
    """Return a Parquet file with a label column, id columns and, if there are any, dense columns.

    Parameters
    ----------
    label
        Column of labels: a sample is a click if its value is above 0.5.
    id_columns
        Columns that are tables; by default every integer, string and dictionary column left over.
    dense_columns
        Columns that are dense features; by default every floating point column left over. Nulls become 0.
    time_column
        Sort by this column (stable) if the file has it; otherwise the order of the file is the order in time.
    max_samples
        Read this many rows from the start of the file.
    """
    path = Path(path)
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            found = {field.name: field.type for field in schema}
            ids, dense = _parquet_columns(found, label, id_columns, dense_columns, time_column)
            wanted = [label, *ids, *dense]
            ordered = time_column in found
            if ordered:
                wanted.append(str(time_column))
            missing = [name for name in wanted if name not in found]
            if missing:
                raise BadInput(
                    f"{path} has no column {missing}: found {list(found)}",
                    path=str(path),
                    expected=missing,
                    found=list(found),
                )
            columns = take(file.iter_batches(65_536, columns=wanted), wanted, max_samples)
    except pa.ArrowException as error:
        raise BadInput(f"{path} is not a Parquet file that can be read: {error}", path=str(path)) from error
    values = dict(zip(wanted, columns, strict=True))
    order = np.arange(len(values[label]))
    if ordered:
        times = values[str(time_column)]
        if times.null_count:
            raise BadInput(f"{path}: column {time_column!r} has {times.null_count} nulls", path=str(path))
        order = np.argsort(times.to_numpy(zero_copy_only=False), kind="stable")
    return _click_log(
        path,
        labels=floats(values[label], f"{path}: column {label!r}")[order] > 0.5,
        tables={name: row_numbers(values[name].take(order), direct=True) for name in ids},
        dense=[floats(values[name], f"{path}: column {name!r}", fill=0.0)[order] for name in dense],
    )


def _parquet_columns(
    found: dict[str, Any],
    label: str,
    id_columns: Sequence[str] | None,
    dense_columns: Sequence[str] | None,
    time_column: str | None,
) -> tuple[list[str], list[str]]:
    """Names of the id and dense columns, those not given by the caller chosen by type."""
    types = pa.types
    rest = {
        name: kind
        for name, kind in found.items()
        if name not in (label, time_column, *(id_columns or ()), *(dense_columns or ()))
    }
    if id_columns is None:
        id_columns = [
            name
            for name, kind in rest.items()
            if types.is_integer(kind)
            or types.is_string(kind)
            or types.is_large_string(kind)
            or types.is_dictionary(kind)
        ]
    if dense_columns is None:
        dense_columns = [name for name, kind in rest.items() if types.is_floating(kind)]
    return list(id_columns), list(dense_columns)


def _read_inter_columns(path: Path, max_samples: int) -> tuple[list[str], list[Any]]:
    """Header cells and string columns of a tab separated file."""
    with path.open("rb") as file:
        names = file.readline(1 << 16).decode("utf-8", errors="replace").rstrip("\r\n").split("\t")
    if len(set(names)) != len(names):
        raise BadInput(f"{path}: the header names a column twice: {names}", path=str(path), found=names)
    columns = read_delimited(
        path,
        max_samples,
        parse=csv.ParseOptions(delimiter="\t", quote_char=False),
        read=csv.ReadOptions(column_names=names, skip_rows=1, block_size=1 << 20),
        convert=csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            strings_can_be_null=True,
            null_values=[""],
        ),
    )
    return names, columns


def _delimiter(path: Path) -> str:
    """Tab or comma, whichever the first line has as a Criteo file should."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            first = file.readline(1 << 16)
    except (OSError, EOFError) as error:
        raise BadInput(f"{path} cannot be read: {error}", path=str(path)) from error
    expected = CRITEO_INTEGERS + CRITEO_CATEGORIES
    for delimiter in ("\t", ","):
        if first.count(delimiter.encode()) == expected:
            return delimiter
    raise BadInput(
        f"{path}: a Criteo file has 40 columns (label, 13 integers, 26 categories) set apart by tabs or "
        f"commas: found {first.count(b',')} commas and {first.count(bytes([9]))} tabs in the first line",
        path=str(path),
        expected=expected,
    )


def _click_log(
    path: str | Path,
    *,
    labels: npt.NDArray[np.bool_],
    tables: dict[str, tuple[npt.NDArray[np.int64], int]],
    dense: list[npt.NDArray[np.float64]],
) -> ClickLog:
    if not tables:
        raise BadInput(f"{path} has no id column to make a table of", path=str(path))
    count = labels.size
    return ClickLog(
        ids=np.stack([rows for rows, _ in tables.values()], axis=1),
        dense=np.stack(dense, axis=1).astype(np.float32) if dense else np.empty((count, 0), dtype=np.float32),
        labels=labels.astype(np.float32),
        table_rows=[num_rows for _, num_rows in tables.values()],
        names=table_names(list(tables)),
    )
