"""The codes of a row range of one table: what a replay yields, and what a writer's mirror is.

Arrays are named as in a segment: ``codes``, ``slots/<name>``. Integer encodings (lattice, float_bits) are held as
codes, so that differences add; affine and raw rows are held as floats, because nothing is ever added to them. Pure
numpy and kernels, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import digest, kernels, packing, widths
from cnr_store.format.records import TableSchema
from cnr_store.runtime.addresses import address_of
from cnr_store.runtime.threads import Inline, Workers
from cnr_store.types import Affine, Encoding, FloatBits, Lattice, Raw, RowIds, TableDtype

CODED = 0
ABSENT = 1
ESCAPED = 2
UNTOUCHED = 3
"""While a run of deltas is replayed on a state that is not known: no segment lists the row."""
ADDED = 4
"""The same: the row's codes moved by a difference, and it stays what it was."""

BLOCK_ROWS = 1024
"""Rows per kernel call where digest and decode share the cache."""

TASK_ROWS = 64 * BLOCK_ROWS
Array = npt.NDArray[Any]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a table, or of some of its columns: the weights (``codes``) or a slot.

    ``is_additive``: codes are integers, an ``add`` row holds a difference, and they count in the state digest.
    ``columns``: those of the table that the array is of; a one-dimensional slot belongs to its whole column range.
    ``is_difference``: it holds differences, which of 16-bit floats too may need int32. ``packed_bits``: it holds
    affine codes as they are stored, ``width`` bytes per row; 0 everywhere else.
    """

    name: str
    encoding: Encoding
    dtype: TableDtype
    width: int
    is_vector: bool
    is_additive: bool
    fill: float
    columns: tuple[int, int]
    is_difference: bool = False
    packed_bits: int = 0

    @property
    def is_integer(self) -> bool:
        """Whether the array is held as integer codes rather than floats."""
        return isinstance(self.encoding, Lattice | FloatBits)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as floats of the array's dtype."""
        return self.width * widths.carrier(self.dtype).itemsize

    @property
    def scale(self) -> np.float32:
        """The lattice step; only for a lattice."""
        assert isinstance(self.encoding, Lattice)
        return np.float32(self.encoding.scale)

    @property
    def bit_shift(self) -> int:
        """Low bits that float_bits drops; only for float_bits."""
        assert isinstance(self.encoding, FloatBits)
        return widths.bit_shift(self.encoding.mantissa_bits, self.dtype)

    @property
    def wraps(self) -> bool:
        """Whether differences are added modulo 2^32: to int32 codes of float_bits."""
        return isinstance(self.encoding, FloatBits) and self.memory_dtype == np.int32

    @property
    def memory_dtype(self) -> np.dtype[Any]:
        """The dtype that holds every value: int32 or int16 codes, else floats, or the bytes of packed codes."""
        if isinstance(self.encoding, Lattice) or self.is_difference:
            return np.dtype(np.int32)
        if self.packed_bits:
            return np.dtype(np.uint8)
        if isinstance(self.encoding, FloatBits):
            return widths.code_dtype(self.encoding.mantissa_bits, self.dtype)
        return np.dtype(np.float32) if isinstance(self.encoding, Affine) else widths.carrier(self.dtype)

    @property
    def mirror_dtype(self) -> np.dtype[Any]:
        """The dtype a mirror starts with: lattice codes fit int16 unless a table has extreme outliers."""
        return np.dtype(np.int16) if isinstance(self.encoding, Lattice) else self.memory_dtype

    @property
    def multipliers(self) -> npt.NDArray[np.uint64]:
        """The digest multipliers of this array."""
        start, stop = self.columns
        if self.name == "codes":
            return digest.column_multipliers(start, stop)
        return digest.slot_multipliers(self.name.removeprefix("slots/"), start, start + 1 if self.is_vector else stop)

    def presence(self, *, escape: bool = False) -> np.uint64:
        """The presence constant that a row of this array brings into the digest."""
        return digest.presence(self.columns[0], escape=escape) if self.name == "codes" else digest.NO_PRESENCE


class Differences(NamedTuple):
    """A float32 array that differences are taken of: ``shift`` of float_bits, None of a lattice."""

    name: str
    width: int
    is_vector: bool
    shift: int | None
    columns: tuple[int, int]


class ArraySpecs(dict[str, ArraySpec]):
    """The arrays of a table, or of some of its columns, by name, weights first. Not to be changed."""

    @property
    def are_additive(self) -> bool:
        """Whether ``add`` rows hold differences to a mirror: of all arrays, or of none."""
        return self["codes"].is_additive

    @cached_property
    def differences(self) -> tuple[Differences, ...] | None:
        """What tables whose rows can be encoded by one call have as one object.

        None where an array has no differences, or not of float32.
        """
        if not self.are_additive or any(spec.dtype != "float32" for spec in self.values()):
            return None
        return _one_of_equal(tuple(
            Differences(
                name, spec.width, spec.is_vector,
                spec.bit_shift if isinstance(spec.encoding, FloatBits) else None, spec.columns,
            )
            for name, spec in self.items()
        ))  # fmt: skip


@lru_cache(maxsize=1 << 10)
def _one_of_equal(found: tuple[Differences, ...]) -> tuple[Differences, ...]:
    return found


def array_specs(schema: TableSchema, columns: tuple[int, int] | None = None) -> ArraySpecs:
    """Return the arrays of a table, or of a column range of it. Pure; what is returned is kept."""
    return _specs_of(schema_key(schema), columns or (0, schema.dim))


def schema_key(schema: TableSchema) -> bytes:
    """Return what is equal for schemas that are the same in every bit: 0.0 and -0.0, which are equal, are not."""
    return msgspec.msgpack.encode(schema)


schema_of = msgspec.msgpack.Decoder(TableSchema).decode
"""The schema of a key."""


@lru_cache(maxsize=1 << 14)
def _specs_of(key: bytes, columns: tuple[int, int]) -> ArraySpecs:
    schema = schema_of(key)
    width = columns[1] - columns[0]
    scale_shift = 0.5**schema.shift
    encoding = schema.encoding
    if isinstance(encoding, Lattice):
        encoding = Lattice(scale=encoding.scale * scale_shift)
    additive = isinstance(encoding, Lattice | FloatBits)
    specs = ArraySpecs(codes=ArraySpec("codes", encoding, schema.dtype, width, False, additive, schema.fill, columns))
    for name, slot in schema.slots.items():
        vector = slot.kind == "row"
        specs[f"slots/{name}"] = ArraySpec(
            f"slots/{name}", slot.encoding, slot.dtype, 1 if vector else width, vector,
            additive, slot.fill, columns,
        )  # fmt: skip
    return specs


def stored_specs(
    schema: TableSchema, columns: tuple[int, int], operation: Literal["add", "set", "escape"]
) -> Mapping[str, ArraySpec]:
    """Return the arrays of a row list as it stores them: what is copied from list to list without decoding. Pure.

    The weights of an ``escape`` list are named ``codes`` here too, and are floats like its slots.
    """
    specs = dict(array_specs(schema, columns))
    if operation == "escape":
        return {name: replace(spec, encoding=Raw(), is_additive=False) for name, spec in specs.items()}
    if operation == "add":
        specs = {name: replace(spec, is_difference=spec.is_additive) for name, spec in specs.items()}
    encoding, codes = schema.encoding, specs["codes"]
    if isinstance(encoding, Affine):
        width = packing.packed_width(codes.width, encoding.bits)
        param = replace(codes, encoding=Raw(), dtype=encoding.param_dtype, width=1, is_vector=True)
        specs["codes"] = replace(codes, width=width, packed_bits=encoding.bits)
        specs |= {name: replace(param, name=name) for name in ("scale", "zero_point")}
    return specs


@dataclass(slots=True)
class ExactRows:
    """Rows kept as exact floats: sorted ids and, per array, their values (n, width) in the array's float dtype."""

    rows: RowIds = field(default_factory=lambda: np.empty(0, np.int64))
    values: dict[str, Array] = field(default_factory=dict)

    def drop(self, rows: RowIds) -> None:
        """Forget ``rows`` (sorted)."""
        if len(self.rows):
            keep = ~np.isin(self.rows, rows, assume_unique=True)
            self.rows = self.rows[keep]
            self.values = {name: values[keep] for name, values in self.values.items()}

    def put(self, rows: RowIds, values: Mapping[str, Array]) -> None:
        """Set ``rows`` (sorted, unique), replacing what they held."""
        self.drop(rows)
        merged = np.concatenate([self.rows, rows])
        order = np.argsort(merged, kind="stable")
        self.rows = merged[order]
        self.values = {
            name: (np.concatenate([self.values[name], new]) if name in self.values else new.copy())[order]
            for name, new in values.items()
        }


class TableCodes:
    """The state of rows [start, stop) of a dense table, or of some of its columns: codes, row status, escape rows.

    ``status`` is None while every row is coded; else uint8 per row: `CODED`, `ABSENT` (never set, or deleted) or
    `ESCAPED`. ``specs``: what the arrays are, if they differ from `array_specs`.
    """

    def __init__(
        self,
        schema: TableSchema,
        start: int,
        stop: int,
        arrays: dict[str, Array],
        allocate: Allocate = np.zeros,
        columns: tuple[int, int] | None = None,
        specs: Mapping[str, ArraySpec] | None = None,
    ) -> None:
        self.schema = schema
        self.start = start
        self.stop = stop
        self.columns = columns or (0, schema.dim)
        self.specs = array_specs(schema, self.columns) if specs is None else specs
        self.arrays = arrays
        self._allocate = allocate
        self.status: npt.NDArray[np.uint8] | None = None
        self.escapes = ExactRows()
        self._places: dict[str, tuple[Array, tuple[int, int, int, int]]] = {}
        self._asked: tuple[TableSchema | None, ArraySpecs] = None, ArraySpecs()

    @classmethod
    def allocate(
        cls,
        schema: TableSchema,
        start: int,
        stop: int,
        *,
        names: tuple[str, ...],
        mirror: bool,
        allocate: Allocate,
        columns: tuple[int, int] | None = None,
    ) -> TableCodes:
        """Return codes for a row range in fresh memory from ``allocate(shape, dtype)``."""
        specs = array_specs(schema, columns)
        arrays = {
            name: allocate(
                (stop - start, specs[name].width), specs[name].mirror_dtype if mirror else specs[name].memory_dtype
            )
            for name in names
        }
        return cls(schema, start, stop, arrays, allocate, columns)

    @property
    def num_rows(self) -> int:
        """Rows in the range."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Memory held: codes and status."""
        return sum(a.nbytes for a in self.arrays.values()) + (0 if self.status is None else self.status.nbytes)

    def track_status(self, initial: int) -> npt.NDArray[np.uint8]:
        """Start to keep a status per row (1 byte each), all rows at ``initial``; returns it."""
        if self.status is None:
            self.status = np.full(self.num_rows, initial, np.uint8)
        return self.status

    def place_of(self, name: str) -> tuple[int, int, int, int]:
        """Return address, bytes of a code, rows and first row of an array: what `table_kernels` need of it."""
        held = self.arrays[name]
        known = self._places.get(name)
        if known is None or known[0] is not held:
            known = self._places[name] = held, (address_of(held), held.itemsize, len(held), self.start)
        return known[1]

    def specs_in(self, schema: TableSchema) -> ArraySpecs:
        """Return `array_specs` of these columns in a schema: kept as long as the same object is asked for."""
        if self._asked[0] is not schema:
            self._asked = schema, array_specs(schema, self.columns)
        return self._asked[1]

    def is_coded(self, rows: RowIds) -> npt.NDArray[np.bool_]:
        """Return which of the global ``rows`` have codes that a difference can be taken to."""
        if self.status is None:
            return np.ones(len(rows), np.bool_)
        return np.asarray(self.status[rows - self.start] == CODED)

    def mark(self, rows: RowIds, status: int) -> None:
        """Set the status of global ``rows``; what an escape row held is forgotten unless it stays one."""
        if status != CODED or self.status is not None:
            self.track_status(CODED)[rows - self.start] = status
        if status != ESCAPED:
            self.escapes.drop(rows)

    def can_widen(self, name: str) -> bool:
        """Whether the array is narrower than int32 only because that was not needed so far."""
        held = self.specs[name].memory_dtype
        return held == np.int32 and self.arrays[name].itemsize < held.itemsize

    def widen(self, name: str) -> None:
        """Replace a narrower array by int32, because a code beyond its range is about to be stored."""
        if self.arrays[name].itemsize < np.dtype(np.int32).itemsize:
            narrow = self.arrays[name]
            wide = self._allocate(narrow.shape, np.dtype(np.int32))
            wide[...] = narrow
            self.arrays[name] = wide
            self._places.pop(name, None)  # it holds the narrow array

    def digest(self, workers: Workers | None = None) -> int:
        """Return the state digest of the whole range (spec, section 4.5), recomputed from the codes."""
        names = [name for name, spec in self.specs.items() if spec.is_additive and name in self.arrays]
        multipliers = {name: self.specs[name].multipliers for name in names}

        def of_range(low: int, high: int) -> int:
            return sum(self.block_digest(name, low, high, multipliers[name]) for name in names)

        totals = (Inline() if workers is None else workers).run_blocks(of_range, self.num_rows, TASK_ROWS)
        return digest.add_digests(*totals, self.escape_digest(self.escapes, multipliers))

    def digest_by_key(
        self, keys: RowIds, workers: Workers, places: RowIds | None = None, exact: ExactRows | None = None
    ) -> int:
        """Return the state digest of rows by key (spec, CNR-DIG-6).

        The row of ``keys[i]`` is at ``places[i]``, or at i. ``exact``: escape rows by key; None for those held here.
        """
        status = self.track_status(CODED)
        names = [name for name, spec in self.specs.items() if spec.is_additive and name in self.arrays]
        multipliers = {name: self.specs[name].multipliers for name in names}

        def of_range(low: int, high: int) -> int:
            at = np.arange(low, high) if places is None else places[low:high]
            coded = status[at] == CODED
            rows, ids = at[coded], keys[low:high][coded]
            return sum(
                digest.digest_of_rows(self.arrays[name][rows], ids, multipliers[name], self.specs[name].presence())
                for name in names
            )

        totals = workers.run_blocks(of_range, len(keys), TASK_ROWS)
        escapes = ExactRows(keys[self.escapes.rows], self.escapes.values) if exact is None else exact
        return digest.add_digests(*totals, self.escape_digest(escapes, multipliers))

    def block_digest(self, name: str, low: int, high: int, multipliers: npt.NDArray[np.uint64]) -> int:
        """Return what the coded rows at positions [low, high) of one array add to the digest."""
        presence = self.specs[name].presence()
        held = self.arrays[name]
        if self.status is None:
            return int(kernels.digest_block(held[low:high], self.start + low, multipliers, presence))
        rows = np.flatnonzero(self.status[low:high] == CODED).astype(np.int64) + (self.start + low)
        return int(kernels.digest_gathered(held, rows, self.start, multipliers, presence))

    def escape_digest(self, escapes: ExactRows, multipliers: Mapping[str, npt.NDArray[np.uint64]]) -> int:
        """Return what escape rows add to the digest: their float32 bits under the escape presence."""
        total = 0
        for name, factors in multipliers.items():
            if len(escapes.rows):
                bits = escape_bits(escapes.values[name], self.specs[name].dtype)
                presence = self.specs[name].presence(escape=True)
                total += digest.digest_of_rows(bits, escapes.rows, factors, presence)
        return digest.add_digests(total)

    def overlay(self, name: str, out: Array) -> None:
        """Write the fill of absent rows and the values of escape rows over decoded values."""
        if self.status is not None:
            out[self.status == ABSENT] = fill_value(self.specs[name])
        if len(self.escapes.rows):
            out[self.escapes.rows - self.start] = self.escapes.values[name]


def decode_block(spec: ArraySpec, codes: Array, out: Array) -> None:
    """Decode a block (n, width) of held values into floats of the array's dtype; releases the GIL."""
    if isinstance(spec.encoding, Lattice):
        if spec.dtype != "float32":
            values = np.empty(codes.shape, np.float32)
            kernels.lattice_decode(codes, spec.scale, values)
            widths.from_float32(values, spec.dtype, out)
        elif _same_memory(codes, out):
            kernels.lattice_decode_in_place(out, spec.scale)
        else:
            kernels.lattice_decode(codes, spec.scale, out)
    elif isinstance(spec.encoding, FloatBits):
        kernels.float_bits_decode(codes, spec.bit_shift, widths.as_bits(out, spec.dtype))
    elif not _same_memory(codes, out):
        if isinstance(spec.encoding, Raw):
            out[...] = codes
        else:
            widths.from_float32(codes, spec.dtype, out)


def fill_value(spec: ArraySpec) -> Any:
    """Return the fill of absent rows in the array's float carrier."""
    return widths.from_float32(np.asarray([spec.fill], np.float32), spec.dtype)[0]


def escape_bits(values: Array, dtype: TableDtype) -> npt.NDArray[np.int32]:
    """Return the bits of exact float rows, widened to float32, as int32 (n, width)."""
    block = np.ascontiguousarray(values)
    return np.ascontiguousarray(widths.to_float32(block, dtype)).view(np.int32)


def _same_memory(a: Array, b: Array) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
