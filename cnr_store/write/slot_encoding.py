"""How an optimizer slot is stored: as exactly as its table's ``bits`` need it, by what the slot is. Pure.

Two kinds of slots are known by name. Sums and means of squared gradients are positive and of wide range: `FloatBits` of
few mantissa bits. Means of gradients have both signs and are forgotten in some ten steps: a `Lattice` whose step is a
share of their root mean square. Any other slot keeps 7 mantissa bits, unless ``slot_bits`` names it. `SLOT_PRECISION`
was measured (``format_spec/decisions/0025``).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnr_store.encodings.float_bits import EXACT_MANTISSA_BITS
from cnr_store.encodings.lattice import LARGEST_SCALE, SMALLEST_SCALE
from cnr_store.encodings.sampling import RowSample
from cnr_store.format.records import SlotSchema
from cnr_store.types import AffineBits, Encoding, FloatBits, Lattice, TableDtype
from cnr_store.write.table_options import SlotBits, TableOptions

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
) -> Encoding:
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
    """Return that of the finite elements that are not zero: rows that no step has touched say nothing. 0 for none."""
    values = sample.rows().astype(np.float64)
    known = values[np.isfinite(values) & (values != 0.0)]
    return math.sqrt(float(np.mean(np.square(known)))) if known.size else 0.0


def keeps_exactness(slot: SlotSchema, bits: SlotBits | None) -> bool:
    """Whether a stored slot is exact just if it is asked to be; how exact it is otherwise stays as it was chosen."""
    is_exact = slot.encoding == FloatBits(mantissa_bits=EXACT_MANTISSA_BITS[slot.dtype])
    return slot.dtype != "float32" or is_exact == (bits == "exact")


def _is_mean(name: str, beside: Collection[str]) -> bool:
    return name == "exp_avg" or (name == "momentum1" and not _SECOND_MOMENTS.isdisjoint(beside))
