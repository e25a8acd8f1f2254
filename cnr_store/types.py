"""Types of the format: dtypes, encodings, ranges of rows and columns. Pure records; this module imports no other.

Manifests contain the encodings, so they are ``msgspec`` structs with a tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

TableDtype = Literal["float32", "float16", "bfloat16"]
EncodingName = Literal["raw", "affine", "lattice", "float_bits"]
AffineBits = Literal[2, 3, 4, 8]
AffineSearch = Literal["grid", "minmax", "greedy"]
ParamDtype = Literal["float16", "float32"]
JsonValue = Any
"""Any value that JSON has."""

RowIds = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int16] | npt.NDArray[np.int32]

MAX_CODE = 1 << 21
"""Largest absolute code of a lattice. Up to it, encoding a decoded value gives the same code (spec, section 5)."""

MAX_CHAIN = 64
"""Most segments of a chain; a writer commits a baseline when it is reached."""


class Raw(msgspec.Struct, frozen=True, tag_field="encoding", tag="raw", forbid_unknown_fields=False):
    """The floats themselves, without a code."""


class Affine(msgspec.Struct, frozen=True, tag_field="encoding", tag="affine"):
    """Check-N-Run's asymmetric n-bit codes, with a scale and a zero_point for each row.

    ``num_bins`` and ``ratio`` are options of the greedy search, None for the others.
    """

    bits: AffineBits
    search: AffineSearch = "grid"
    param_dtype: ParamDtype = "float16"
    num_bins: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None
    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


class Lattice(msgspec.Struct, frozen=True, tag_field="encoding", tag="lattice"):
    """Integer codes ``rint(x / scale)``, one fp32 scale per table and generation."""

    scale: Annotated[float, msgspec.Meta(gt=0)]


class FloatBits(msgspec.Struct, frozen=True, tag_field="encoding", tag="float_bits"):
    """The ordered integer image of the float, rounded to ``mantissa_bits`` (23 is exact fp32)."""

    mantissa_bits: Annotated[int, msgspec.Meta(ge=0, le=23)]


Encoding = Raw | Affine | Lattice | FloatBits
SlotEncoding = Lattice | FloatBits


@dataclass(frozen=True, slots=True)
class Precision:
    """How exact a lattice is to be: one of the three is set.

    Attributes
    ----------
    bits
        As exact as Check-N-Run rows of so many bits, on a sample of the table: 2, 3, 4 or 8.
    max_error
        Largest absolute error of a restored element.
    scale
        The lattice step itself.
    """

    bits: AffineBits | None = None
    max_error: float | None = None
    scale: float | None = None


SlotsRule = Literal["exact", "mean", "drop"]
"""What to do with slots of one value per row, if a table is read in other column shards than the stored ones."""


@dataclass(frozen=True, slots=True, order=True)
class Rectangle:
    """A part of a table: half-open ranges of rows and of columns, (start, stop) each."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def num_rows(self) -> int:
        """Rows in the rectangle."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Columns in the rectangle."""
        return self.columns[1] - self.columns[0]

    @property
    def area(self) -> int:
        """Elements in the rectangle."""
        return self.num_rows * self.width


KeyRule = Literal["modulo", "hash"]
"""Whose of several ranks a key of a hashed table is: ``key mod world``, or ``splitmix64(key) mod world``."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Half-open range of rows [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start
