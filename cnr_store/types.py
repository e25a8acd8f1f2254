"""Words of the format as types: encodings, table schemas, options. Pure records; this module knows no other.

The encodings are documents (they stand in manifests), so they are ``msgspec`` structs with a tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NewType

import msgspec
import numpy as np
import numpy.typing as npt

RowId = NewType("RowId", int)
VersionId = NewType("VersionId", int)

Profile = Literal["compact", "portable"]
TableDtype = Literal["float32", "float16", "bfloat16"]
EncodingName = Literal["raw", "affine", "lattice", "float_bits"]
AffineBits = Literal[2, 3, 4, 8]
AffineSearch = Literal["grid", "minmax", "greedy"]
ParamDtype = Literal["float16", "float32"]
JsonValue = Any
"""Anything JSON can hold."""

RowIds = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int16] | npt.NDArray[np.int32]

MAX_CODE = 1 << 21
"""Largest |code| of the lattice: up to here encoding a decoded value gives the same code (spec, section 5)."""

MAX_CHAIN = 64
"""Longest chain a record may carry; a writer commits a ``full`` when it is reached."""


class Raw(msgspec.Struct, frozen=True, tag_field="encoding", tag="raw", forbid_unknown_fields=False):
    """The floats as they are."""


class Affine(msgspec.Struct, frozen=True, tag_field="encoding", tag="affine"):
    """Check-N-Run's per-row asymmetric n-bit codes with scale and zero_point per row.

    ``num_bins`` and ``ratio`` belong to the greedy search and are None for the others.
    """

    bits: AffineBits
    search: AffineSearch = "grid"
    param_dtype: ParamDtype = "float16"
    num_bins: int | None = None
    ratio: float | None = None


class Lattice(msgspec.Struct, frozen=True, tag_field="encoding", tag="lattice"):
    """Integer codes ``rint(x / scale)``, one fp32 scale per table and generation."""

    scale: float


class FloatBits(msgspec.Struct, frozen=True, tag_field="encoding", tag="float_bits"):
    """The ordered integer image of the float, rounded to ``mantissa_bits`` (23 is exact fp32)."""

    mantissa_bits: int


Encoding = Raw | Affine | Lattice | FloatBits


@dataclass(frozen=True, slots=True)
class Precision:
    """How exact a lattice should be: exactly one of the three is set.

    Attributes
    ----------
    bits
        "As exact as b-bit Check-N-Run rows on a sample of this table" (2, 3, 4 or 8).
    max_error
        Largest absolute error of a restored element.
    scale
        The lattice step itself.
    """

    bits: AffineBits | None = None
    max_error: float | None = None
    scale: float | None = None


SlotsRule = Literal["exact", "mean", "drop"]
"""What becomes of one-dimensional slots when a table is read in other column shards than it was stored in."""


@dataclass(frozen=True, slots=True, order=True)
class Rectangle:
    """What one writer holds of a table: half-open ranges of rows and of columns, (start, stop) each."""

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


@dataclass(frozen=True, slots=True)
class RowRange:
    """Half-open range of rows [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Threshold:
    """Rows that changed little wait for a later save: how many go out, and how far and how long the others wait.

    A row's change is the sum of its squared differences, in codes, to what the store holds; slots do not count and
    wait with their row. Rows at or above a threshold go out. It is a quantile of the changes of one save, and used
    until it is chosen anew, so the share floats in between (after DCT, Gupta et al., KDD 2021). What waits is not
    lost: its next difference is to what the store holds, too.

    Attributes
    ----------
    keep
        Share of the changed rows that go out in a save that chooses the threshold: above 0, at most 1.
    refresh_every
        Saves that use one threshold.
    max_error
        A row waits only while every element is within this of what the store holds, the half step of rounding
        included; absolute. None: 4.5 steps of the lattice, little at 8 bits and most of a row's range at 2 to 4. As
        with ``max_error`` of a table, what floats round comes on top: 2^-23 of the element in float32, half a unit in
        its last place in 16-bit tables. No row waits where this is less than half a step.
    max_wait
        Saves that a row may wait in a row; the next one has it.
    """

    keep: float
    refresh_every: int = 8
    max_error: float | None = None
    max_wait: int = 4


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How a table is stored; what a user states, before a scale is chosen.

    Attributes
    ----------
    encoding
        None chooses ``lattice`` for float32 tables and exact ``float_bits`` for float16 and bfloat16 tables.
    bits
        For ``lattice``: as exact as b-bit Check-N-Run rows (2, 3, 4, 8; default 8). For ``affine``: the width.
        ``"auto"`` follows the expected number of restores (2 bits up to 1, 3 up to 3, 4 up to 20, else 8).
    max_error, scale
        For ``lattice``, instead of ``bits``: largest absolute error of an element, or the step itself.
    expected_restores
        How often the run will be restored; used by ``bits="auto"``. A `CheckpointManager` counts, and takes the number
        of restores that there were once it is larger.
    search, param_dtype
        For ``affine``: the parameter search, and the dtype scale and zero_point are stored in.
    mantissa_bits
        For ``float_bits``: 23 is exact fp32 (default: exact for the dtype).
    slot_mantissa_bits
        float_bits mantissa of optimizer slots (7 by default, 23 exact).
    nonfinite
        What to do with rows that hold NaN, Inf or values beyond the code range: refuse the save, or keep them exactly
        as escape rows.
    fill
        Value of rows that were never set or were deleted.
    threshold
        For ``lattice`` with a mirror: rows that changed little wait for a later save. None: every changed row goes out.
    """

    encoding: EncodingName | None = None
    bits: AffineBits | Literal["auto"] | None = None
    max_error: float | None = None
    scale: float | None = None
    expected_restores: float | None = None
    search: AffineSearch = "grid"
    param_dtype: ParamDtype = "float16"
    mantissa_bits: int | None = None
    slot_mantissa_bits: int = 7
    nonfinite: Literal["refuse", "escape"] = "refuse"
    fill: float = 0.0
    threshold: Threshold | None = None

    @classmethod
    def exact(cls, *, nonfinite: Literal["refuse", "escape"] = "refuse") -> TableOptions:
        """Bit-exact tables and slots: float_bits with every mantissa bit."""
        return cls(encoding="float_bits", slot_mantissa_bits=23, nonfinite=nonfinite)
