"""Ways to store a chunk of a delta in fewer bytes, with codecs that numcodecs has: `bench_entropy` compares them.

Each coding gives the bytes of a chunk by kind and takes them back to the same arrays, row for row. What a reader needs
to undo an order (a class per row, a permutation) is among the bytes, unless it follows from another array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from cnr_store.format import arrays, digit_chunks
from cnr_store.types import RowIds

Codes = npt.NDArray[np.int16]
Order = npt.NDArray[np.int64]
Stored = dict[str, list[bytes]]
"""Kind (``rows``, ``codes``, ``slots``, ``classes``) to what is stored of it."""

GROUP_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of ``add`` rows.

    Attributes
    ----------
    rows
        int64 (n,), ascending.
    codes
        int16 (n, dim): differences of lattice codes.
    slots
        int16 (n,): differences of float_bits codes.
    slots_now
        int16 (n,): the codes themselves, low bits alone where they are larger.
    """

    rows: RowIds
    codes: Codes
    slots: Codes
    slots_now: Codes

    def is_same(self, other: Chunk) -> bool:
        """Whether ids, codes and slot differences are the same."""
        pairs = ((self.rows, other.rows), (self.codes, other.codes), (self.slots, other.slots))
        return all(np.array_equal(a, b) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Coding:
    """A way to store a chunk.

    ``decode`` gets what ``encode`` gave and the shape of the codes. Where it does not fit, the first
    coding takes its place.
    """

    name: str
    encode: Callable[[Chunk], Stored]
    decode: Callable[[Stored, tuple[int, int]], Chunk]
    fits: Callable[[Chunk], bool] = lambda chunk: True


def cut(rows: RowIds, codes: Codes, slots: Codes, slots_now: Codes) -> list[Chunk]:
    """Return the chunks that a store makes of a row list."""
    size = arrays.chunk_rows_for(len(rows), 2 * codes.shape[1])
    starts = range(0, len(rows), size)
    return [Chunk(*(array[start : start + size] for array in (rows, codes, slots, slots_now))) for start in starts]


def codings() -> list[Coding]:
    """Return the plain coding first, by row id, then what may be better; the store's is the order of slots."""
    made = [
        Coding("by row id", by_id, from_ids),
        Coding("columns one after the other", by_columns, from_columns),
        Coding("bytes under zstd level 1", as_bytes, from_bytes),
        Coding("row ids as a bitmap under zstd", with_bitmap, from_bitmap),
        Coding("slots in the order of the rows' energy", slots_by_energy, slots_from_energy),
        Coding("order of slots", in_slot_order, from_slot_order),
        Coding("order of slots, columns of 8,192 rows", partial(in_slot_order, by_column=True),
               partial(from_slot_order, by_column=True)),
        Coding("order of energy, permutation stored", in_energy_order, from_energy_order),
        Coding("order of the accumulators, absolute", in_accumulator_order, from_accumulator_order),
    ]  # fmt: skip
    for count in (2, 4, 8):
        made.append(Coding(f"{count} energy classes, class per row", partial(in_classes, count=count), from_classes))
        made.append(Coding(f"{count} energy classes, a list each", partial(in_lists, count=count), from_lists))
    return made


def by_id(chunk: Chunk) -> Stored:
    """All three by ascending row id."""
    return _with_codes(chunk, [pack(chunk.codes)], [pack(chunk.slots)])


def from_ids(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    rows, slots = _ids(stored, shape), _unpack(stored["slots"][0], (shape[0],))
    return _chunk(rows, _unpack(stored["codes"][0], shape), slots)


def by_columns(chunk: Chunk) -> Stored:
    """Column after column: Zarr's ``transpose`` codec."""
    return _with_codes(chunk, [pack(chunk.codes.T)])


def from_columns(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    codes = np.ascontiguousarray(_unpack(stored["codes"][0], shape[::-1]).T)
    return _chunk(_ids(stored, shape), codes, _unpack(stored["slots"][0], (shape[0],)))


def as_bytes(chunk: Chunk) -> Stored:
    """The low bytes of the codes, then the high ones, as any library compresses them."""
    planes = np.ascontiguousarray(chunk.codes.reshape(-1).view(np.uint8).reshape(-1, 2).T)
    return _with_codes(chunk, [bytes(Zstd(level=1).encode(planes))])


def from_bytes(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    planes = np.frombuffer(Zstd().decode(stored["codes"][0]), np.uint8).reshape(2, -1)
    codes = np.ascontiguousarray(planes.T).view(np.int16).reshape(shape)
    return _chunk(_ids(stored, shape), codes, _unpack(stored["slots"][0], (shape[0],)))


def with_bitmap(chunk: Chunk) -> Stored:
    """A bit for each row between the first and the last."""
    first = chunk.rows[0]
    bits = np.zeros(int(chunk.rows[-1] - first) + 1, np.uint8)
    bits[chunk.rows - first] = 1
    rows = [int(first).to_bytes(8, "little"), bytes(Zstd(level=3).encode(np.packbits(bits)))]
    return {"rows": rows, "codes": [pack(chunk.codes)], "slots": [pack(chunk.slots)]}


def from_bitmap(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    first, packed = int.from_bytes(stored["rows"][0], "little"), Zstd().decode(stored["rows"][1])
    rows = np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8))).astype(np.int64) + first
    return _chunk(rows, _unpack(stored["codes"][0], shape), _unpack(stored["slots"][0], (shape[0],)))


def slots_by_energy(chunk: Chunk) -> Stored:
    """Slots in the order of their rows' energy, which the codes tell."""
    return _with_codes(chunk, [pack(chunk.codes)], [pack(chunk.slots[_by_energy(chunk.codes)])])


def slots_from_energy(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    codes = _unpack(stored["codes"][0], shape)
    return _chunk(_ids(stored, shape), codes, _back(_unpack(stored["slots"][0], (shape[0],)), _by_energy(codes)))


def in_slot_order(chunk: Chunk, *, by_column: bool = False) -> Stored:
    """Codes in the order of their rows' slot differences, which a reader has: ids and slots stay as they are."""
    codes = np.take(chunk.codes, _stable(chunk.slots), axis=0)
    if not by_column:
        return _with_codes(chunk, [pack(codes)])
    groups = [codes[start : start + GROUP_ROWS] for start in range(0, len(codes), GROUP_ROWS)]
    return _with_codes(chunk, [pack(group.T) for group in groups])


def from_slot_order(stored: Stored, shape: tuple[int, int], *, by_column: bool = False) -> Chunk:
    """See `Coding`."""
    slots = _unpack(stored["slots"][0], (shape[0],))
    if by_column:
        codes = np.empty(shape, np.int16)
        for at, data in enumerate(stored["codes"]):
            group = codes[at * GROUP_ROWS : (at + 1) * GROUP_ROWS]
            group[...] = _unpack(data, group.shape[::-1]).T
    else:
        codes = _unpack(stored["codes"][0], shape)
    return _chunk(_ids(stored, shape), _back(codes, _stable(slots)), slots)


def in_energy_order(chunk: Chunk) -> Stored:
    """All three arrays in the order of energy: what the ids cost then."""
    order = _by_energy(chunk.codes)
    rows = pack_ids(chunk.rows[order])
    return {"rows": [rows], "codes": [pack(chunk.codes[order])], "slots": [pack(chunk.slots[order])]}


def from_energy_order(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    rows = _ids(stored, shape)
    order = np.argsort(rows)
    codes, slots = _unpack(stored["codes"][0], shape), _unpack(stored["slots"][0], (shape[0],))
    return _chunk(rows[order], codes[order], slots[order])


def in_accumulator_order(chunk: Chunk) -> Stored:
    """Codes in the order of the accumulators themselves; a reader of one delta has them only if they are stored."""
    codes = [pack(np.take(chunk.codes, _stable(chunk.slots_now), axis=0))]
    return _with_codes(chunk, codes, [pack(chunk.slots), pack(chunk.slots_now)])


def from_accumulator_order(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    slots, now = (_unpack(data, (shape[0],)) for data in stored["slots"])
    return _chunk(_ids(stored, shape), _back(_unpack(stored["codes"][0], shape), _stable(now)), slots)


def in_classes(chunk: Chunk, *, count: int) -> Stored:
    """Codes and slots class by class, each with a histogram of its own; the class of each row is stored."""
    classes = _classes(chunk.codes, count)
    order = _stable(classes)
    found = [order[classes[order] == one] for one in range(count)]
    return {
        "rows": [pack_ids(chunk.rows)],
        "classes": [pack(classes)],
        "codes": [pack(chunk.codes[rows]) for rows in found if len(rows)],
        "slots": [pack(chunk.slots[rows]) for rows in found if len(rows)],
    }


def from_classes(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    classes = _unpack(stored["classes"][0], (shape[0],))
    sizes = [size for size in np.bincount(classes) if size]
    codes = np.concatenate([_unpack(data, (n, shape[1])) for data, n in zip(stored["codes"], sizes, strict=True)])
    slots = np.concatenate([_unpack(data, (n,)) for data, n in zip(stored["slots"], sizes, strict=True)])
    order = _stable(classes)
    return _chunk(_ids(stored, shape), _back(codes, order), _back(slots, order))


def in_lists(chunk: Chunk, *, count: int) -> Stored:
    """A row list for each class, its ids ascending."""
    classes = _classes(chunk.codes, count)
    found = [np.flatnonzero(classes == one) for one in range(count)]
    made = [by_id(Chunk(chunk.rows[r], chunk.codes[r], chunk.slots[r], chunk.slots_now[r])) for r in found if len(r)]
    sizes = [len(r).to_bytes(8, "little") for r in found if len(r)]
    return {kind: [one[kind][0] for one in made] for kind in made[0]} | {"classes": sizes}


def from_lists(stored: Stored, shape: tuple[int, int]) -> Chunk:
    """See `Coding`."""
    sizes = [int.from_bytes(size, "little") for size in stored["classes"]]
    each = [
        from_ids({kind: [stored[kind][at]] for kind in ("rows", "codes", "slots")}, (size, shape[1]))
        for at, size in enumerate(sizes)
    ]
    order = np.argsort(np.concatenate([one.rows for one in each]))
    return _chunk(*(np.concatenate([getattr(o, n) for o in each])[order] for n in ("rows", "codes", "slots")))


def stored_bytes(stored: Stored) -> dict[str, int]:
    """Return kind to bytes."""
    return {kind: sum(len(data) for data in pieces) for kind, pieces in stored.items()}


def total_bytes(coding: Coding, chunks: Sequence[Chunk]) -> dict[str, int]:
    """Return kind to bytes of all chunks.

    Raises
    ------
    ValueError
        The coding does not give a chunk back.
    """
    found: dict[str, int] = {}
    for chunk in chunks:
        stored = coding.encode(chunk)
        if not coding.decode(stored, (len(chunk.codes), chunk.codes.shape[1])).is_same(chunk):
            raise ValueError(f"{coding.name}: the chunk does not come back")
        for kind, size in stored_bytes(stored).items():
            found[kind] = found.get(kind, 0) + size
    return found


def _with_codes(chunk: Chunk, codes: list[bytes], slots: list[bytes] | None = None) -> Stored:
    return {"rows": [pack_ids(chunk.rows)], "codes": codes, "slots": slots or [pack(chunk.slots)]}


def _classes(codes: Codes, count: int) -> Codes:
    """Energy classes of equal numbers of rows, int16 (n,)."""
    energy = _energy(codes)
    return np.searchsorted(np.quantile(energy, np.arange(1, count) / count), energy, side="right").astype(np.int16)


def _energy(codes: Codes) -> npt.NDArray[np.int64]:
    return np.square(codes, dtype=np.int64).sum(axis=1)


def _by_energy(codes: Codes) -> Order:
    return np.argsort(_energy(codes), kind="stable")


def _stable(keys: npt.NDArray[Any]) -> Order:
    return np.argsort(keys, kind="stable")


def _back(ordered: Codes, order: Order) -> Codes:
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return np.take(ordered, places, axis=0)


def _chunk(rows: RowIds, codes: Codes, slots: Codes) -> Chunk:
    return Chunk(rows, codes, slots, slots)


def _ids(stored: Stored, shape: tuple[int, int]) -> RowIds:
    rows = np.empty(shape[0], np.int64)
    _decode(stored["rows"][0], rows)
    return np.cumsum(rows)


def pack(array: npt.NDArray[Any]) -> bytes:
    """Return what a store makes of a chunk."""
    return digit_chunks.encode(np.ascontiguousarray(array).reshape(-1))


def pack_ids(rows: RowIds) -> bytes:
    """Return what a store makes of a chunk of row ids."""
    return pack(np.diff(rows, prepend=np.int64(0)))


def _unpack(data: bytes, shape: tuple[int, ...]) -> Codes:
    out = np.empty(shape, np.int16)
    _decode(data, out.reshape(-1))
    return out


def _decode(data: bytes, out: npt.NDArray[Any]) -> None:
    digit_chunks.decode(memoryview(data), out.size, out.itemsize, "coding").unpack(0, out)
