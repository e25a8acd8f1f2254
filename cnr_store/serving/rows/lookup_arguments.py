"""Checks the arguments of a lookup: row ids, and arrays to write rows to. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadDtype, BadRowIds, BadShape
from cnr_store.segment.codes import Array
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.types import RowIds

_LARGEST_ID = np.iinfo(np.int64).max


def checked_ids(ids: npt.ArrayLike, table: str) -> RowIds:
    """Return row ids as int64 (n,), C-contiguous; the array itself where it is that already.

    Raises
    ------
    BadRowIds
        They are no integers, beyond int64, or not one-dimensional.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise BadRowIds(
            f"row ids of table {table!r} are a one-dimensional array of integers, "
            f"found {array.dtype} with shape {array.shape}",
            table=table, expected="int64 (n,)", found=f"{array.dtype} {array.shape}",
        )  # fmt: skip
    if array.dtype == np.uint64 and array.size and array.max() > _LARGEST_ID:
        raise BadRowIds(
            f"row ids of table {table!r} are int64, found {int(array.max())}: hash keys to 63 bits, or view as int64",
            table=table, expected="int64", found=int(array.max()),
        )  # fmt: skip
    return np.ascontiguousarray(array, np.int64)


def checked_out(out: Array | None, count: int, kind: RowKind, table: str) -> Array:
    """Return ``out`` if a lookup of ``count`` rows can be written to it, or a new array.

    Raises
    ------
    BadShape, BadDtype
    """
    shape = (count, kind.served_width)
    if out is None:
        return np.empty(shape, kind.served_dtype)
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise BadShape(
            f"rows of table {table!r} need a writable C-contiguous array of shape {shape}, found {out.shape}",
            table=table, expected=shape, found=out.shape,
        )  # fmt: skip
    if out.dtype != kind.served_dtype:
        raise BadDtype(
            f"rows of table {table!r} are served as {kind.served} in {kind.served_dtype}, found {out.dtype}",
            table=table, expected=str(kind.served_dtype), found=str(out.dtype),
        )  # fmt: skip
    return out
