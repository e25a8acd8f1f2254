"""Turn what a user asks of a table into its schema: encodings, scale from a sample, slots. Pure.

An optimizer slot is stored as exactly as its table's ``bits`` need it. Two kinds of slots are known by name. Sums and
means of squared gradients are positive and have a wide range: `FloatBits` of few mantissa bits. Means of gradients have
both signs, and an optimizer forgets them in some ten steps: a `Lattice`, with a share of their root mean square as
step. Any other slot keeps 7 mantissa bits, unless ``slot_bits`` names it. `SLOT_PRECISION` was measured
(``format_spec/decisions/0025``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine, widths
from cnr_store.encodings.choose import REFERENCE_SETTINGS, expected_bits
from cnr_store.encodings.lattice import LARGEST_SCALE, SMALLEST_SCALE
from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import ScaleChoice, choose_scale, measure_scale, measure_scales
from cnr_store.encodings.widths import EXACT_MANTISSA_BITS, to_float32
from cnr_store.errors import BadDtype, BadInput, BadShape
from cnr_store.format.limits import MAX_DIM, MAX_ELEMENTS, MAX_SLOTS
from cnr_store.format.records import SlotSchema, TableSchema
from cnr_store.types import (
    Affine,
    AffineBits,
    Encoding,
    EncodingName,
    FloatBits,
    Lattice,
    Precision,
    Raw,
    SlotEncoding,
    TableDtype,
)
from cnr_store.write.table_options import SlotBits, TableOptions, check_used

_DEFAULT_BITS: AffineBits = 8
_NUMPY_DTYPES: dict[np.dtype[Any], TableDtype] = {
    np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16",
}  # fmt: skip


def table_dtype(array: Any, table: str) -> TableDtype:
    """Return the table dtype of an array: float32, float16, or bfloat16 carried as uint16.

    Raises
    ------
    BadDtype
    """
    dtype = np.dtype(array.dtype)
    found = _NUMPY_DTYPES.get(dtype if dtype.isnative else dtype.newbyteorder("="))
    if found is None:
        raise BadDtype(
            f"table {table!r} has values of dtype {dtype.name}; use float32, float16, or uint16 bits of bfloat16",
            table=table, expected=sorted(one.name for one in _NUMPY_DTYPES), found=dtype.name,
        )  # fmt: skip
    return found


def table_schema(
    table: str,
    options: TableOptions,
    *,
    num_rows: int,
    dim: int,
    dtype: TableDtype,
    sample: RowSample | npt.NDArray[Any],
    slots: Mapping[str, Any],
    keys: str = "dense",
    generation: int = 1,
    choice: ScaleChoice | None = None,
) -> TableSchema:
    """Return the schema of a new table, or of a new generation of one.

    Parameters
    ----------
    sample
        Rows of the table to choose on; an array (n, dim) in the table's dtype counts as the whole table.
    slots
        Slot name to its array; of means of gradients a sample is read.
    choice
        What `choose_table_scale` returned for the same options and sample; None calls it.

    Raises
    ------
    BadInput
        If the options contradict themselves or the sample needs codes beyond the range.
    """
    check_options(table, options, dtype)
    if len(slots) > MAX_SLOTS:
        raise BadInput(
            f"table {table!r} has {len(slots)} slots, at most {MAX_SLOTS} are stored",
            table=table, expected=MAX_SLOTS, found=len(slots),
        )  # fmt: skip
    if not 1 <= dim <= MAX_DIM:
        raise BadShape(
            f"table {table!r} has {dim} columns, 1 to {MAX_DIM} are stored", table=table, expected=MAX_DIM, found=dim
        )
    encoding = choose_encoding(options, dtype, sample, choice)
    return TableSchema(
        num_rows=num_rows if keys == "dense" else 0,
        dim=dim,
        dtype=dtype,
        keys="hashed" if keys == "hashed" else "dense",
        encoding=encoding,
        generation=generation,
        fill=options.fill,
        slots={name: _slot_schema(table, name, array, options, beside=slots) for name, array in slots.items()},
    )


def check_options(table: str, options: TableOptions, dtype: TableDtype) -> None:
    """Return if a table of this dtype can be stored so. No I/O; looks at no values.

    Raises
    ------
    BadInput
        An option that the dtype's encoding does not have, or mantissa bits that the dtype does not have.
    """
    name = encoding_name(options, dtype)
    try:
        check_used(options, (name,))
        if options.mantissa_bits is not None:
            widths.bit_shift(options.mantissa_bits, dtype)
    except BadInput as error:
        meant = "" if options.encoding or dtype == "float32" else ", and so is stored as float_bits by default"
        raise BadInput(
            f"table {table!r} is {dtype}{meant}: {error}. Options by table: options={{table: TableOptions(...)}}",
            table=table, expected=error.expected, found=error.found,
        ) from None  # fmt: skip


def choose_encoding(
    options: TableOptions,
    dtype: TableDtype,
    sample: RowSample | npt.NDArray[Any],
    choice: ScaleChoice | None = None,
) -> Encoding:
    """Return the encoding that the options ask for; a scale is chosen on the sample.

    Parameters are those of `table_schema`.

    Raises
    ------
    BadInput
    """
    name = encoding_name(options, dtype)
    if name == "raw":
        return Raw()
    if name == "float_bits":
        exact = widths.EXACT_MANTISSA_BITS[dtype]
        bits = exact if options.mantissa_bits is None else options.mantissa_bits
        widths.bit_shift(bits, dtype)
        return FloatBits(mantissa_bits=bits)
    if name == "affine":
        width = asked_bits(options)
        param_dtype = options.param_dtype
        rows = to_float32(_sampled(sample, dtype).rows(), dtype)
        if rows.size and not affine.params_fit(rows, param_dtype, bits=width):
            param_dtype = "float32"
        num_bins, ratio = REFERENCE_SETTINGS[width] if options.search == "greedy" else (None, None)
        return Affine(bits=width, search=options.search, param_dtype=param_dtype, num_bins=num_bins, ratio=ratio)
    choice = choice or choose_table_scale(options, dtype, sample)
    assert choice is not None  # it is a lattice
    return Lattice(scale=choice.scale)


def choose_table_scale(
    options: TableOptions, dtype: TableDtype, sample: RowSample | npt.NDArray[Any], *, held: float | None = None
) -> ScaleChoice | None:
    """Return the scale that a lattice gets, None where the options ask for something else. Blocks up to a second.

    ``held``: the scale that the rows had when they were restored, if they were (`cnr_store.encodings.scale`).

    Raises
    ------
    BadInput
    """
    return choose_table_scales(options, dtype, [_sampled(sample, dtype)], held=[held])[0]


def choose_table_scales(
    options: TableOptions, dtype: TableDtype, samples: Sequence[RowSample], *, held: Sequence[float | None]
) -> Sequence[ScaleChoice | None]:
    """Return what `choose_table_scale` does of each of several tables with as many columns. Blocks."""
    if encoding_name(options, dtype) != "lattice":
        return [None] * len(samples)
    may_escape = options.nonfinite == "escape"
    if needs_sample(options, dtype):
        return measure_scales(samples, dtype, asked_bits(options), held=held, may_escape=may_escape)
    return [measure_scale(one, dtype, _given(options), may_escape=may_escape) for one in samples]


def given_scale(options: TableOptions) -> float:
    """Return the lattice scale of options with ``scale=`` or ``max_error=``."""
    return choose_scale(np.empty((0, 1), np.float32), _given(options))


def _given(options: TableOptions) -> Precision:
    return Precision(scale=options.scale, max_error=options.max_error)


def encoding_name(options: TableOptions, dtype: str) -> EncodingName:
    """Return the encoding that the options mean for a table of this dtype."""
    return options.encoding or ("lattice" if dtype == "float32" else "float_bits")


def asked_bits(options: TableOptions) -> AffineBits:
    """Return the width that the options ask for, 8 if they ask for none."""
    if options.bits != "auto":
        return options.bits or _DEFAULT_BITS
    assert options.expected_restores is not None  # refused when they were made
    return expected_bits(options.expected_restores)


def _sampled(sample: RowSample | npt.NDArray[Any], dtype: TableDtype) -> RowSample:
    return sample if isinstance(sample, RowSample) else RowSample(sample, dtype)


def _slot_schema(table: str, name: str, array: Any, options: TableOptions, *, beside: Collection[str]) -> SlotSchema:
    dimensions = len(array.shape)
    if dimensions not in (1, 2):
        raise BadShape(f"slot {name!r} of table {table!r} has {dimensions} dimensions; a slot has 1 or 2", table=table)
    dtype = table_dtype(array, f"{table}, slot {name}")
    bits = slot_bits_of(options, name, asked_bits(options))
    return SlotSchema(
        kind="row" if dimensions == 1 else "element",
        dtype=dtype,
        encoding=choose_slot_encoding(name, array, dtype, bits, beside),
    )


def checked_size(table: str, what: str, size: Any, *, dim: int = 1, least: int = 0) -> int:
    """Return a number of rows, columns or halvings as an int; raises `BadShape` if it is none or out of range."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least or size * dim > MAX_ELEMENTS:
        raise BadShape(f"table {table!r} cannot have {size!r} {what}", table=table, expected=least, found=size)
    return int(size)


def checked_shape(values: Any, table: str) -> tuple[int, int]:
    """Return the rows and columns of all values of a table; raises `BadShape` if it is no matrix or is too large."""
    if len(values.shape) != 2 or values.shape[1] < 1:
        raise BadShape(f"table {table!r} has shape {tuple(values.shape)}; expected (num_rows, dim)", table=table)
    return checked_size(table, "rows", values.shape[0], dim=values.shape[1]), int(values.shape[1])


def needs_sample(options: TableOptions, dtype: str) -> bool:
    """Return whether these options choose a scale on a sample of rows."""
    return encoding_name(options, dtype) == "lattice" and options.scale is None and options.max_error is None


OTHER_MANTISSA_BITS = 7
"""Of slots that are neither squares nor means by their name, unless ``slot_bits`` names them."""

ROW_MANTISSA_BITS = 4
"""Of sums and means with one number per row, whatever the bits: they cost little beside the row."""


@dataclass(frozen=True, slots=True)
class SlotPrecision:
    """How slots are stored beside a table of so many bits.

    Attributes
    ----------
    mantissa_bits
        Of float_bits, 0 to 7.
    step
        Lattice step of a mean of gradients over the root mean square of its elements that are not zero. 0: float_bits
        as well.
    """

    mantissa_bits: int
    step: float


SLOT_PRECISION: dict[AffineBits, SlotPrecision] = {
    2: SlotPrecision(0, 1.0),
    3: SlotPrecision(1, 1.0),
    4: SlotPrecision(2, 0.5),
    8: SlotPrecision(4, 1 / 16),
}
"""Bits of a table to the precision of its slots."""

_SQUARES = frozenset({"sum", "exp_avg_sq", "momentum2"})
_SECOND_MOMENTS = frozenset({"exp_avg_sq", "momentum2"})


def slot_bits_of(options: TableOptions, name: str, bits: AffineBits) -> SlotBits | None:
    """Return the bits of a slot in a table of ``bits``; None if no precision was given."""
    asked = options.slot_bits
    if asked is not None and not isinstance(asked, str | int):
        asked = asked.get(name)
    if asked is not None:
        return asked
    return bits if name in _SQUARES or name in ("exp_avg", "momentum1") else None


def choose_slot_encoding(
    name: str, array: Any, dtype: TableDtype, bits: SlotBits | None, beside: Collection[str]
) -> SlotEncoding:
    """Return the encoding of a slot.

    Parameters
    ----------
    array
        The slot's values, (rows,) or (rows, width); of means a sample is read.
    bits
        What `slot_bits_of` returned.
    beside
        The names of all slots of the table: ``momentum1`` is a mean beside a second moment, else a sum of squares.
    """
    exact = EXACT_MANTISSA_BITS[dtype]
    if dtype != "float32" or bits == "exact":
        return FloatBits(mantissa_bits=exact)
    if bits is None:
        return FloatBits(mantissa_bits=OTHER_MANTISSA_BITS)
    if len(array.shape) == 1:
        return FloatBits(mantissa_bits=ROW_MANTISSA_BITS)
    precision = SLOT_PRECISION[bits]
    if _is_mean(name, beside):
        step = precision.step * root_mean_square(RowSample(array, dtype))
        if step > 0.0:
            return Lattice(scale=float(np.float32(min(max(step, SMALLEST_SCALE), LARGEST_SCALE / 2))))
    return FloatBits(mantissa_bits=precision.mantissa_bits)


def root_mean_square(sample: RowSample) -> float:
    """Return that of the finite elements that are not zero, as in rows that never changed. 0 if there are none."""
    values = sample.rows().astype(np.float64)
    known = values[np.isfinite(values) & (values != 0.0)]
    return math.sqrt(float(np.mean(np.square(known)))) if known.size else 0.0


def keeps_exactness(slot: SlotSchema, bits: SlotBits | None) -> bool:
    """Whether a stored slot is exact just if it is asked to be; how exact it is otherwise stays as it was chosen."""
    encoding = slot.encoding
    is_exact = isinstance(encoding, FloatBits) and encoding.mantissa_bits == EXACT_MANTISSA_BITS[slot.dtype]
    return slot.dtype != "float32" or is_exact == (bits == "exact")


def keeps_slots(schema: TableSchema, before: TableOptions, now: TableOptions) -> bool:
    """Whether the slots of a table, stored by ``before``, are as precise as ``now`` asks; exactness aside. Pure."""
    bits = asked_bits(now)
    for name, slot in schema.slots.items():
        old, new = slot_bits_of(before, name, bits), slot_bits_of(now, name, bits)
        is_same = old == new or (slot.kind == "row" and None not in (old, new))
        if slot.dtype == "float32" and "exact" not in (old, new) and not is_same:
            return False
    return True


def _is_mean(name: str, beside: Collection[str]) -> bool:
    return name == "exp_avg" or (name == "momentum1" and not _SECOND_MOMENTS.isdisjoint(beside))
