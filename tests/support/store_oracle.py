"""What a store must give back, from the training values alone, in plain numpy.

No kernel and no array that the writer made takes part: a table's expected content is ``decode(encode(values))`` by
the definitions of the format, its escape rows as they are, its absent rows as the fill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cnr_store import TableOptions
from cnr_store.encodings import affine
from cnr_store.types import MAX_CODE
from tests.support import affine_reference
from tests.support import encoding_reference as reference

Array = np.ndarray[Any, Any]
CODED, ABSENT, ESCAPED = 0, 1, 2


@dataclass(frozen=True)
class Kind:
    """One way to store a table, and the training values it is tried with."""

    options: TableOptions
    dtype: str = "float32"
    scale: float | None = None
    slots: tuple[str, ...] = ()
    spread: float = 1.0

    @property
    def carrier(self) -> Any:
        return np.dtype({"bfloat16": "uint16"}.get(self.dtype, self.dtype))


KINDS: dict[str, Kind] = {
    "lattice": Kind(TableOptions(scale=0.0625, nonfinite="escape"), scale=0.0625, slots=("row", "element")),
    "lattice_wide": Kind(TableOptions(scale=0.01, nonfinite="escape", fill=2.5), scale=0.01, spread=400.0),
    "lattice_half": Kind(
        TableOptions(encoding="lattice", scale=0.125, nonfinite="escape"), dtype="float16", scale=0.125, slots=("row",)
    ),
    "exact": Kind(TableOptions.exact(nonfinite="escape"), slots=("row",)),
    "exact_element": Kind(TableOptions.exact(nonfinite="escape"), slots=("row", "element")),
    "affine": Kind(TableOptions(encoding="affine", bits=4, nonfinite="escape"), slots=("row", "element")),
    "raw": Kind(TableOptions(encoding="raw", nonfinite="escape"), slots=("row",)),
    "float16": Kind(TableOptions(nonfinite="escape", fill=-1.0), dtype="float16", slots=("row",)),
    "bfloat16": Kind(TableOptions(nonfinite="escape"), dtype="bfloat16", slots=("element",)),
    "coarse_bits": Kind(TableOptions(encoding="float_bits", mantissa_bits=7, nonfinite="escape")),
}


@dataclass
class TableModel:
    """A dense table as the training has it: values, slots, and what became of each row."""

    kind: str
    values: Array
    slots: dict[str, Array]
    status: Array
    param_dtype: str = "float16"
    scale: float | None = None

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def step(self) -> float:
        """The lattice step now."""
        scale = KINDS[self.kind].scale if self.scale is None else self.scale
        assert scale is not None
        return scale

    def copy(self) -> TableModel:
        slots = {name: slot.copy() for name, slot in self.slots.items()}
        return TableModel(self.kind, self.values.copy(), slots, self.status.copy(), self.param_dtype, self.scale)

    def write(self, rows: Array, values: Array, slots: dict[str, Array]) -> None:
        """The rows were saved with these values."""
        self.values[rows] = values
        bad = self.unencodable(values)
        for name, slot in slots.items():
            self.slots[name][rows] = slot
            bad |= ~np.isfinite(columns(slot)).all(axis=1)
        self.status[rows] = np.where(bad, ESCAPED, CODED)

    def unencodable(self, values: Array) -> Array:
        wide = widened(values, KINDS[self.kind].dtype)
        bad = ~np.isfinite(wide).all(axis=1)
        if KINDS[self.kind].scale is not None:
            with np.errstate(all="ignore"):
                bad |= ~(np.abs(np.rint(wide / np.float32(self.step))) <= MAX_CODE).all(axis=1)
        return bad

    def resize(self, num_rows: int) -> None:
        kept = min(num_rows, self.num_rows)

        def grown(array: Array) -> Array:
            out = np.zeros((num_rows, *array.shape[1:]), array.dtype)
            out[:kept] = array[:kept]
            return out

        self.values = grown(self.values)
        self.slots = {name: grown(slot) for name, slot in self.slots.items()}
        status = np.full(num_rows, ABSENT, np.uint8)
        status[:kept] = self.status[:kept]
        self.status = status

    def expected(self) -> dict[str, Array]:
        """What a reader sees: ``values`` and each slot."""
        kind = KINDS[self.kind]
        out = {"values": decoded_values(self)}
        for name, slot in self.slots.items():
            is_exact = kind.options.slot_bits == "exact"
            out[name] = slot.copy() if is_exact else rounded_bits(columns(slot), 7).reshape(slot.shape)
        exact = {"values": self.values, **self.slots}
        for name, array in out.items():
            array[self.status == ESCAPED] = exact[name][self.status == ESCAPED]
            fill = kind.options.fill if name == "values" else 0.0
            array[self.status == ABSENT] = narrowed(
                np.full(1, fill, np.float32), kind.dtype if name == "values" else "float32"
            )
        return out


@dataclass
class HashedModel:
    """A hashed table: key to (row, slot)."""

    rows: dict[int, tuple[Array, np.float32]] = field(default_factory=dict)

    def copy(self) -> HashedModel:
        return HashedModel(dict(self.rows))


def decoded_values(table: TableModel) -> Array:
    """``decode(encode(values))`` of every row, whatever its status; rows that cannot be encoded are undefined."""
    kind = KINDS[table.kind]
    finite = np.where(table.unencodable(table.values)[:, None], np.zeros_like(table.values), table.values)
    wide = widened(finite, kind.dtype)
    if kind.scale is not None:
        steps = np.rint(wide / np.float32(table.step)) + np.float32(0)  # codes have no -0.0
        return narrowed(np.float32(table.step) * steps, kind.dtype)
    if kind.options.encoding == "affine":
        return narrowed(affine_values(wide, table.param_dtype), kind.dtype)
    if kind.options.mantissa_bits == 7:
        return rounded_bits(finite, 7)
    return finite.copy()


def affine_values(values: Array, param_dtype: str) -> Array:
    if len(values) == 0:
        return values.copy()
    points, step, fit_steps, relax = affine.GRIDS[4]
    scale, zero_point = affine_reference.grid_params(
        values, 4, points=points, step=step, fit_steps=fit_steps, relax=relax
    )
    stored_scale, stored_zero = np.empty(len(values), param_dtype), np.empty(len(values), param_dtype)
    affine.store_params(scale, zero_point, out_scale=stored_scale, out_zero_point=stored_zero)
    scale, zero_point = stored_scale.astype(np.float32), stored_zero.astype(np.float32)
    codes = affine_reference.codes_from_params(values, scale, zero_point, 4)
    return affine_reference.values_from_codes(codes, scale, zero_point)


def rounded_bits(values: Array, mantissa_bits: int) -> Array:
    """float_bits of float32 values, by the reference."""
    shift = 23 - mantissa_bits
    codes, _ = reference.float_codes(np.ascontiguousarray(values).view(np.int32), shift)
    return reference.float_patterns(codes, shift, 32).view(np.float32)


def widened(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def narrowed(values: Array, dtype: str) -> Array:
    """Round float32 to nearest even in the table's dtype; finite values stay finite."""
    if dtype == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    if dtype == "bfloat16":
        return (rounded_bits(columns(values), 7).view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)
    return values.astype(np.float32)


def columns(array: Array) -> Array:
    return array.reshape(-1, 1) if array.ndim == 1 else array


def same_bits(left: Array, right: Array) -> bool:
    """Equal to the bit: NaN payloads and signs of zero count."""
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def training_values(kind: str, rng: np.random.Generator, rows: int, dim: int) -> Array:
    """Values as a training makes them, in the carrier dtype of the table."""
    values = (rng.standard_normal((rows, dim)) * KINDS[kind].spread).astype(np.float32)
    values[rng.random((rows, dim)) < 0.1] *= 0
    return narrowed(values, KINDS[kind].dtype)


def training_slots(kind: str, rng: np.random.Generator, rows: int, dim: int) -> dict[str, Array]:
    shapes = {"row": (rows,), "element": (rows, dim)}
    return {name: rng.lognormal(-2, 3, shapes[name]).astype(np.float32) for name in KINDS[kind].slots}
