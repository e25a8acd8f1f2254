"""Converts rows to the bytes that a sink stores: little-endian floats, or fused codes. Pure."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.widths import FloatBlock, carrier, from_float32, to_float32
from cnr_store.errors import BadInput, BadShape, NonFiniteValues
from cnr_store.serving.rows.fused_kernels import fuse_rows_4bit, fuse_rows_8bit, fused_row_bytes, values_of_rows
from cnr_store.types import Float32s, RowIds

StoredAs = Literal["float32", "float16", "bfloat16", "int8", "int4"]
"""Floats as they are (bfloat16 rounded to nearest even), or fused row-wise codes of 8 or 4 bits."""

_FUSED_BITS = {"int8": 8, "int4": 4}
_LITTLE_ENDIAN: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
_TOO_LARGE = {"float32": np.inf, "float16": 65520.0, "bfloat16": 255.5 * 2.0**120}
"""From here on a value rounds to Inf."""


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
    if stored_as == "int8" or stored_as == "int4":
        return fused_row_bytes(dim, _FUSED_BITS[stored_as])
    return dim * _LITTLE_ENDIAN[stored_as].itemsize


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
    if stored_as == "int8" or stored_as == "int4":
        bad = int((fuse_rows_8bit if stored_as == "int8" else fuse_rows_4bit)(values, out))
    else:
        narrow = from_float32(values, stored_as)
        out[...] = narrow.astype(_LITTLE_ENDIAN[stored_as], copy=False).view(np.uint8).reshape(out.shape)
        lost = np.isfinite(values) & (np.abs(values) >= _TOO_LARGE[stored_as])
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
    if stored_as == "int8" or stored_as == "int4":
        return values_of_rows(stored, dim, _FUSED_BITS[stored_as])
    narrow: FloatBlock = np.ascontiguousarray(stored).view(_LITTLE_ENDIAN[stored_as]).astype(carrier(stored_as))
    return to_float32(narrow, stored_as)
