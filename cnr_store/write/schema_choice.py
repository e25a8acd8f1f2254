"""Turn what a user asks of a table into its schema: encodings, scale from a sample, slots. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cnr_store.encodings import affine, float_bits
from cnr_store.encodings.choose import choose_greedy, expected_bits
from cnr_store.encodings.sampling import RowSample
from cnr_store.encodings.scale import ScaleChoice, measure_scale
from cnr_store.encodings.widths import to_float32
from cnr_store.errors import BadDtype, BadInput, BadShape
from cnr_store.format.limits import MAX_DIM, MAX_SLOTS
from cnr_store.format.records import SlotSchema, TableSchema
from cnr_store.types import Affine, AffineBits, Encoding, EncodingName, FloatBits, Lattice, Precision, Raw, TableDtype
from cnr_store.write.slot_encoding import choose_slot_encoding, slot_bits_of
from cnr_store.write.table_options import TableOptions, check_used

_DEFAULT_BITS: AffineBits = 8
_NUMPY_DTYPES: dict[str, TableDtype] = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}


def table_dtype(array: Any, table: str) -> TableDtype:
    """Return the table dtype of an array: float32, float16, or bfloat16 carried as uint16.

    Raises
    ------
    BadDtype
    """
    name = np.dtype(array.dtype).name
    if name not in _NUMPY_DTYPES:
        raise BadDtype(
            f"table {table!r} has values of dtype {name}; use float32, float16, or uint16 bits of bfloat16",
            table=table, expected=sorted(_NUMPY_DTYPES), found=name,
        )  # fmt: skip
    return _NUMPY_DTYPES[name]


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
    has_mirror: bool = True,
    choice: ScaleChoice | None = None,
) -> TableSchema:
    """Return the schema of a new table, or of a new generation of one.

    Parameters
    ----------
    sample
        Rows of the table to choose on; an array (n, dim) in the table's dtype counts as the whole table.
    slots
        Slot name to its array; of means of gradients a sample is read.
    has_mirror
        Whether the writer keeps a code mirror; without one every row is ``set``.
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
    if dim > MAX_DIM:
        raise BadShape(
            f"table {table!r} has {dim} columns, at most {MAX_DIM} are stored", table=table, expected=MAX_DIM, found=dim
        )
    encoding = choose_encoding(options, dtype, sample, choice)
    additive = has_mirror and keys == "dense" and isinstance(encoding, Lattice | FloatBits)
    return TableSchema(
        num_rows=num_rows if keys == "dense" else 0,
        dim=dim,
        dtype=dtype,
        keys="hashed" if keys == "hashed" else "dense",
        encoding=encoding,
        generation=generation,
        fill=options.fill,
        slots={
            name: _slot_schema(table, name, array, options, beside=slots, mirror=additive)
            for name, array in slots.items()
        },
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
            float_bits.bit_shift(options.mantissa_bits, dtype)
    except BadInput as error:
        raise BadInput(f"table {table!r} is {dtype}: {error}", table=table, found=error.found) from None


def choose_encoding(
    options: TableOptions,
    dtype: TableDtype,
    sample: RowSample | npt.NDArray[Any],
    choice: ScaleChoice | None = None,
) -> Encoding:
    """Return the encoding that the options ask for; a scale or search settings are chosen on the sample.

    Parameters are those of `table_schema`.

    Raises
    ------
    BadInput
    """
    name = encoding_name(options, dtype)
    if name == "raw":
        return Raw()
    if name == "float_bits":
        exact = float_bits.EXACT_MANTISSA_BITS[dtype]
        bits = exact if options.mantissa_bits is None else options.mantissa_bits
        float_bits.bit_shift(bits, dtype)
        return FloatBits(mantissa_bits=bits)
    if name == "affine":
        width = asked_bits(options)
        param_dtype = options.param_dtype
        rows = to_float32(_sampled(sample, dtype).rows(), dtype)
        if rows.size and not affine.params_fit(rows, param_dtype, bits=width):
            param_dtype = "float32"
        num_bins, ratio = choose_greedy(rows, width) if options.search == "greedy" else (None, None)
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
    if encoding_name(options, dtype) != "lattice":
        return None
    given = options.scale is not None or options.max_error is not None
    precision = (
        Precision(scale=options.scale, max_error=options.max_error) if given else Precision(bits=asked_bits(options))
    )
    may_escape = options.nonfinite == "escape"
    return measure_scale(_sampled(sample, dtype), dtype, precision, held=held, may_escape=may_escape)


def encoding_name(options: TableOptions, dtype: TableDtype) -> EncodingName:
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


def _slot_schema(
    table: str, name: str, array: Any, options: TableOptions, *, beside: Collection[str], mirror: bool
) -> SlotSchema:
    dimensions = len(array.shape)
    if dimensions not in (1, 2):
        raise BadShape(f"slot {name!r} of table {table!r} has {dimensions} dimensions; a slot has 1 or 2", table=table)
    dtype = table_dtype(array, f"{table}, slot {name}")
    bits = slot_bits_of(options, name, asked_bits(options))
    return SlotSchema(
        kind="row" if dimensions == 1 else "element",
        dtype=dtype,
        encoding=choose_slot_encoding(name, array, dtype, bits, beside),
        mirror=mirror,
    )
