"""Converts rows to the bytes that a sink stores: little-endian floats, or fused codes. Pure."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadInput, BadShape, NonFiniteValues
from cnr_store.serving.rows.fused_kernels import fuse_rows_4bit, fuse_rows_8bit, fused_row_bytes, values_of_rows
from cnr_store.types import Float32s, RowIds

StoredAs = Literal["float32", "float16", "bfloat16", "int8", "int4"]
"""Floats as they are (bfloat16 rounded to nearest even), or fused row-wise codes of 8 or 4 bits."""

_FUSED_BITS = {"int8": 8, "int4": 4}
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_stored_as(stored_as: str) -> None:
    """Refuse what is none of `StoredAs`.

    Raises
    ------
    BadInput
    """
    if stored_as not in get_args(StoredAs):
        raise BadInput(
            f"rows are stored as one of {', '.join(get_args(StoredAs))}; found {stored_as!r}",
            expected=get_args(StoredAs), found=stored_as,
        )  # fmt: skip


def row_width(stored_as: StoredAs, dim: int) -> int:
    """Return the bytes of one row of `dim` values."""
    if stored_as in _FUSED_BITS:
        return fused_row_bytes(dim, _FUSED_BITS[stored_as])
    return dim * _ITEM_BYTES[stored_as]


def check_rows(table: str, row_ids: RowIds, values: Float32s, dim: int) -> None:
    """Refuse values that are not (len(row_ids), dim) float32.

    Raises
    ------
    BadShape
    """
    if values.shape != (len(row_ids), dim) or values.dtype != np.float32:
        raise BadShape(
            f"values of table {table!r} are float32 of shape {(len(row_ids), dim)}, found {values.dtype} of shape "
            f"{values.shape}",
            table=table, expected=(len(row_ids), dim), found=values.shape,
        )  # fmt: skip


def rows_to_bytes(stored_as: StoredAs, table: str, row_ids: RowIds, values: Float32s) -> npt.NDArray[np.uint8]:
    """Return rows (n, dim) as stored bytes (n, width) uint8; `table` and `row_ids` are for the message.

    Raises
    ------
    NonFiniteValues
        A row that a stored form of finite numbers cannot be: fused rows must be finite, and finite values must not
        overflow float16 or bfloat16. As float32 any row is stored bit for bit.
    """
    values = np.ascontiguousarray(values)
    out = np.empty((len(values), row_width(stored_as, values.shape[1])), np.uint8)
    if stored_as in _FUSED_BITS:
        bad = int((fuse_rows_8bit if stored_as == "int8" else fuse_rows_4bit)(values, out))
    else:
        narrow = _narrowed(stored_as, values)
        out[...] = narrow.view(np.uint8).reshape(out.shape)
        bad = -1
        if stored_as != "float32":
            lost = np.isfinite(values) & ~np.isfinite(_widened(stored_as, narrow))
            bad = int(np.argmax(lost.any(axis=1))) if lost.any() else -1
    if bad >= 0:
        raise NonFiniteValues(
            f"row {row_ids[bad]} of table {table!r} cannot be stored as {stored_as}: its values are not finite, or "
            "leave the range; store this table as float32, or correct the row",
            table=table, found=int(row_ids[bad]),
        )  # fmt: skip
    return out


def rows_from_bytes(stored_as: StoredAs, stored: npt.NDArray[np.uint8], dim: int) -> Float32s:
    """Return the float32 values (n, dim) of stored bytes (n, width)."""
    if stored_as in _FUSED_BITS:
        return values_of_rows(stored, dim, _FUSED_BITS[stored_as])
    kind = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[stored_as]
    return _widened(stored_as, np.ascontiguousarray(stored).view(kind))


def _narrowed(stored_as: StoredAs, values: Float32s) -> npt.NDArray[np.generic]:
    if stored_as == "float32":
        return values.astype("<f4", copy=False)
    if stored_as == "float16":
        with np.errstate(over="ignore"):
            return values.astype("<f2")
    bits = values.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # A NaN whose fraction lies in the low half alone would round to Inf, or beyond the sign.
    rounded = np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype("<u2")


def _widened(stored_as: StoredAs, narrow: npt.NDArray[np.generic]) -> Float32s:
    if stored_as == "bfloat16":
        return (narrow.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return narrow.astype(np.float32)
