"""Codes of a row range: status, escape rows, digest, decoding, widening."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from cnr_store.encodings.digest import PRESENCE_CODED, PRESENCE_ESCAPE
from cnr_store.format.records import SlotSchema, TableSchema
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import ABSENT, CODED, ESCAPED, TableCodes, array_specs, fill_value
from cnr_store.types import Affine, FloatBits, Lattice, Raw
from tests.support import encoding_reference as reference

LATTICE = Lattice(scale=0.5)


def schema(encoding: Any = LATTICE, rows: int = 5, dtype: Any = "float32", **fields: Any) -> TableSchema:
    slots = {
        "m": SlotSchema(kind="row", dtype="float32", encoding=FloatBits(mantissa_bits=7)),
        "v": SlotSchema(kind="element", dtype="float32", encoding=FloatBits(mantissa_bits=7)),
    }
    return TableSchema(num_rows=rows, dim=2, dtype=dtype, encoding=encoding, slots=slots, **fields)


def codes(start: int = 10) -> TableCodes:
    arrays = {
        "codes": np.asarray([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], np.int16),
        "slots/m": np.asarray([[1], [2], [3], [4], [5]], np.int16),
    }
    return TableCodes(schema(), start, start + 5, arrays)


def test_codes_can_be_copied_and_pickled() -> None:
    """Arrays of a schema are kept and shared, which once made them a view that neither takes."""
    again = pickle.loads(pickle.dumps(copy.deepcopy(codes())))

    assert again.specs == codes().specs
    assert again.digest() == codes().digest()


def test_which_arrays_add_and_are_mirrored() -> None:
    for keys in ("dense", "hashed"):
        assert all(spec.is_additive for spec in array_specs(schema(keys=keys)).values())
    for encoding in (Affine(bits=4), Raw()):
        assert not any(spec.is_additive for spec in array_specs(schema(encoding)).values())


def test_a_shift_halves_the_scale() -> None:
    assert array_specs(schema(shift=3))["codes"].scale == np.float32(0.0625)


def test_status_and_escape_rows_follow_what_happens_to_a_row() -> None:
    held = codes()
    assert held.is_coded(np.asarray([10, 14])).all()
    held.mark(np.asarray([11]), ABSENT)
    held.mark(np.asarray([12, 13]), ESCAPED)
    rows = {"codes": np.full((2, 2), np.nan, np.float32), "slots/m": np.ones((2, 1), np.float32)}
    held.escapes.put(np.asarray([12, 13]), rows)
    assert held.is_coded(np.arange(10, 15)).tolist() == [True, False, False, False, True]
    held.escapes.put(np.asarray([12]), {name: np.full_like(array[:1], 5) for name, array in rows.items()})
    held.mark(np.asarray([13]), CODED)
    assert held.escapes.rows.tolist() == [12]
    assert held.escapes.values["codes"].tolist() == [[5, 5]]
    out = np.zeros((5, 2), np.float32)
    held.overlay("codes", out)
    assert out.tolist() == [[0, 0], [0, 0], [5, 5], [0, 0], [0, 0]]


@pytest.mark.parametrize("threads", [None, 2])
def test_the_digest_is_that_of_the_reference(threads: int | None) -> None:
    held = codes()
    held.mark(np.asarray([11]), ABSENT)
    held.mark(np.asarray([13]), ESCAPED)
    values = {"codes": np.asarray([[np.inf, -0.0]], np.float32), "slots/m": np.asarray([[2.5]], np.float32)}
    held.escapes.put(np.asarray([13]), values)
    coded = np.asarray([10, 12, 14])
    expected = 0
    for name, presence in (("codes", int(PRESENCE_CODED)), ("slots/m", 0)):
        multipliers = held.specs[name].multipliers
        expected += reference.digest(held.arrays[name][coded - 10], coded, multipliers, presence)
        escape = int(PRESENCE_ESCAPE) if name == "codes" else 0
        expected += reference.digest(values[name].view(np.int32), np.asarray([13]), multipliers, escape)
    if threads is None:
        assert held.digest() == expected % 2**64
    else:
        with Workers(threads) as workers:
            assert held.digest(workers) == expected % 2**64


def test_widening_keeps_the_codes_and_takes_memory_from_the_same_place() -> None:
    taken: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> Any:
        taken.append(shape)
        return np.zeros(shape, dtype)

    held = TableCodes.allocate(schema(), 0, 5, names=("codes", "slots/m"), mirror=True, allocate=allocate)
    held.arrays["codes"][:] = -7
    before = held.digest()
    held.widen("codes")
    held.widen("codes")
    assert taken == [(5, 2), (5, 1), (5, 2)]
    assert held.arrays["codes"].dtype == np.int32
    assert held.digest() == before


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 2.5), ("float16", 2.5), ("bfloat16", 0x4020)])
def test_a_fill_has_the_dtype_of_its_table(dtype: Any, expected: float) -> None:
    encoding = Lattice(scale=0.5) if dtype == "float32" else FloatBits(mantissa_bits=10 if dtype == "float16" else 7)
    assert fill_value(array_specs(schema(encoding, dtype=dtype, fill=2.5))["codes"]) == expected
