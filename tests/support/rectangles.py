"""Segments of many parts, written object by object, and what they hold in plain numpy: one state per element.

No transaction takes part: each segment gets any tiling of the table, so a row may be an escape row in some of its
columns and coded in others. Codes are drawn, not encoded, so the model needs no encoder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from cnr_store import Store
from cnr_store.format import layout
from cnr_store.format.records import MAJOR, ChainEntry, PartLine, SegmentDocument, SlotSchema, TableSchema, WriterInfo
from cnr_store.log.rebase import draft_after, rebase_data
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.groups import RowList
from cnr_store.segment.reader import open_chain
from cnr_store.segment.writer import SegmentWriter, merge_receipts, write_manifest
from cnr_store.types import FloatBits, Lattice, Raw, Rectangle

Array = np.ndarray[Any, Any]
CODED, ABSENT, ESCAPED = 0, 1, 2
SCALE, FILL, SLOT_FILL = 0.25, 1.5, -2.0
TABLE = "t/ü"
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def schema_of(num_rows: int, dim: int, *, additive: bool = True, row_slot: bool = False) -> TableSchema:
    """A lattice (or raw) table with a slot per element, and if wished one value per row and column range."""
    slots = {"v": SlotSchema(kind="element", dtype="float32", encoding=FloatBits(23), fill=SLOT_FILL)}
    if row_slot:
        slots["m"] = SlotSchema(kind="row", dtype="float32", encoding=FloatBits(23), fill=SLOT_FILL)
    encoding = Lattice(SCALE) if additive else Raw()
    return TableSchema(num_rows=num_rows, dim=dim, dtype="float32", encoding=encoding, fill=FILL, slots=slots)


@dataclass
class Model:
    """The state of a table, element by element; ``row_slot`` has a column per stored column range."""

    schema: TableSchema
    ranges: tuple[tuple[int, int], ...]
    status: Array = field(init=False)
    codes: Array = field(init=False)
    exact: Array = field(init=False)
    element: Array = field(init=False)
    row_slot: Array = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.schema.num_rows, self.schema.dim)
        self.status = np.full(shape, ABSENT, np.uint8)
        self.codes = np.zeros(shape, np.float32 if self.is_raw else np.int64)
        self.exact = np.zeros(shape, np.float32)
        self.element = np.zeros(shape, np.float32)
        self.row_slot = np.zeros((self.schema.num_rows, len(self.ranges)), np.float32)

    @property
    def is_raw(self) -> bool:
        return isinstance(self.schema.encoding, Raw)

    def resize(self, num_rows: int) -> None:
        old, kept = (self.status, self.codes, self.exact, self.element, self.row_slot), min(num_rows, len(self.status))
        self.schema = msgspec.structs.replace(self.schema, num_rows=num_rows)
        self.__post_init__()
        for new, held in zip((self.status, self.codes, self.exact, self.element, self.row_slot), old, strict=True):
            new[:kept] = held[:kept]

    def values(self) -> Array:
        decoded = self.codes if self.is_raw else np.float32(SCALE) * self.codes.astype(np.float32)
        return self._with_fill(np.where(self.status == ESCAPED, self.exact, decoded).astype(np.float32), FILL)

    def elements(self) -> Array:
        return self._with_fill(self.element.copy(), SLOT_FILL)

    def row_slots(self) -> Array:
        first = [low for low, _ in self.ranges]
        return np.where(self.status[:, first] == ABSENT, np.float32(SLOT_FILL), self.row_slot).astype(np.float32)

    def _with_fill(self, values: Array, fill: float) -> Array:
        values[self.status == ABSENT] = fill
        return values

    def digest(self, part: Rectangle) -> int:
        """The state digest of a rectangle by its definition, in Python integers."""
        return (
            sum(
                self._element_digest(row, column, is_start=column == part.columns[0])
                for row in range(*part.rows)
                for column in range(*part.columns)
            )
            & MASK
        )

    def _element_digest(self, row: int, column: int, *, is_start: bool) -> int:
        status = self.status[row, column]
        if status == ABSENT:
            return 0
        escaped = status == ESCAPED
        code = int(self.exact.view(np.int32)[row, column]) if escaped else int(self.codes[row, column])
        total = (mix((1 << 63) ^ column) | 1) * code
        slots = {"v": self.element[row, column]}
        if "m" in self.schema.slots and is_start:
            slots["m"] = self.row_slot[row, [low for low, _ in self.ranges].index(column)]
        for slot, value in slots.items():  # no slot is negative, so its code is its bits
            name = int.from_bytes(hashlib.sha256(f"slot:{slot}".encode()).digest()[:8], "little")
            total += (mix(name + column) | 1) * int(np.float32(value).view(np.int32))
        presence = mix(row ^ (5 if escaped else 3) * GOLDEN & MASK) if column == 0 else 0
        return presence + (mix(row) | 1) * total


def mix(x: int) -> int:
    """splitmix64."""
    x = (x + GOLDEN) & MASK
    z = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def tiling(
    rng: np.random.Generator, num_rows: int, ranges: tuple[tuple[int, int], ...], *, free: bool
) -> list[Rectangle]:
    """Rectangles that tile a table: within the given column ranges, or (``free``) cut any way."""
    if free:
        return _cut(rng, Rectangle((0, num_rows), (0, ranges[-1][1])), 3)
    tiles = []
    for columns in ranges:
        cuts = sorted({0, num_rows, *rng.integers(0, num_rows + 1, rng.integers(0, 3)).tolist()})
        rows = list(pairwise(cuts)) or [(0, 0)]
        tiles += [Rectangle(one, columns) for one in rows]
    return tiles


def _cut(rng: np.random.Generator, tile: Rectangle, depth: int) -> list[Rectangle]:
    by_rows = rng.random() < 0.5
    low, high = tile.rows if by_rows else tile.columns
    if depth == 0 or high - low < 2 or rng.random() < 0.2:
        return [tile]
    at = int(rng.integers(low + 1, high))
    halves = ((low, at), (at, high))
    tiles = [Rectangle(half, tile.columns) if by_rows else Rectangle(tile.rows, half) for half in halves]
    return [piece for one in tiles for piece in _cut(rng, one, depth - 1)]


class Parts:
    """Appends segments of many parts to a store, and keeps the model of what they lead to."""

    def __init__(self, store: Store, model: Model, seed: int) -> None:
        self.store = store
        self.model = model
        self.random = np.random.default_rng(seed)
        self.tiles: list[Rectangle] = []
        self._head = store.head()
        self._workers = Workers(1)

    def close(self) -> None:
        self._workers.close()

    def save(self, tiles: list[Rectangle], *, full: bool = False, states_digest: bool = True) -> None:
        """Commit a segment: a baseline of everything, or random operations on some rows of each part."""
        chain = () if full else self._head.record.chain
        l0 = 0 if full else self._head.record.checkpoint
        txn = f"{self._head.record.v:032x}"
        name = layout.segment_name(self._head.record.v, txn)
        receipts = []
        for rank, tile in enumerate(tiles):
            out = SegmentWriter(
                self.store.storage, name, writer=layout.writer_name(rank, "0" * 8),
                workers=self._workers, throttle=Throttle(None),
            )  # fmt: skip
            lists = self._write_part(out, tile, full=full)
            known = states_digest and not self.model.is_raw
            digest = f"{self.model.digest(tile):016x}" if known else None
            part = PartLine(table=TABLE, rows=tile.rows, columns=tile.columns, state_digest=digest, **lists)
            receipt = out.finish(
                txn=txn, rank=rank, world=len(tiles), attempt="0" * 8, base=self._head.record.v, l0=l0, parts=(part,)
            )
            receipts.append(receipt)
        base = open_chain(self.store.storage, chain, self._workers)[-1].manifest if chain else None
        self.commit(name, txn, merge_receipts(receipts, base, {TABLE: self.model.schema}, ()), chain, l0, full=full)
        self.tiles = tiles

    def commit(self, name: str, txn: str, merged: dict[str, Any], chain: Any, l0: int, *, full: bool) -> None:
        record = self._head.record
        l1 = record.checkpoint + 1
        document = SegmentDocument(
            format=MAJOR, txn=txn, base=record.v, kind="baseline" if full else "delta",
            l0=l0, l1=l1, step=l1, **merged,
        )  # fmt: skip
        sha, size, manifest = write_manifest(self.store.storage, name, document)
        entry = ChainEntry(
            seg=name, sha256=sha, kind=manifest.kind, l0=l0, l1=l1, rows=manifest.changed_rows,
            size_bytes=size + sum(item.size for item in manifest.objects),
        )  # fmt: skip
        draft = draft_after(
            record, "baseline" if full else "delta", WriterInfo(host="", lib="", run_id=""), chain=(*chain, entry),
            checkpoint=l1, step=l1,
        )  # fmt: skip
        self._head = self.store.internals.log.append(self._head, draft, partial(rebase_data, txn=txn))

    def _write_part(self, out: SegmentWriter, tile: Rectangle, *, full: bool) -> dict[str, Any]:
        """Draw an operation for each row of a part, write the row lists, move the model."""
        count = tile.rows[1] - tile.rows[0]
        fates = np.asarray(["set"] * count if full and self.random.random() < 0.5 else self._fates(count, full=full))
        box = (slice(*tile.rows), slice(*tile.columns))
        can_add = (self.model.status[box] == CODED).all(axis=1) & (not self.model.is_raw)
        fates = np.where((fates == "add") & ~can_add, "set", fates)
        lists: dict[str, Any] = {}
        for operation in ("add", "set", "delete", "escape"):
            rows = np.flatnonzero(fates == operation).astype(np.int64) + tile.rows[0]
            if len(rows) == 0:
                continue
            arrays = {"rows": rows, **self._content(operation, rows, tile)}
            kinds = {n: (a.dtype, None if a.ndim == 1 else a.shape[1]) for n, a in arrays.items()}

            def produce(start: int, stop: int, arrays: dict[str, Array] = arrays) -> dict[str, Array]:
                return {name: array[start:stop].copy() for name, array in arrays.items()}

            row_list = RowList(len(rows), kinds, produce)
            lists[operation] = out.write_row_list(operation, row_list)
        return lists

    def _fates(self, count: int, *, full: bool) -> list[str]:
        operations = (
            ["set", "set", "escape", "keep"] if full else ["add", "add", "set", "delete", "escape", "keep", "keep"]
        )
        return [str(one) for one in self.random.choice(operations, count)]

    def _content(self, operation: str, rows: Array, tile: Rectangle) -> dict[str, Array]:
        """The arrays of a row list, and the model moved by them."""
        model, at = self.model, (rows[:, None], np.arange(*tile.columns)[None, :])
        shape = (len(rows), tile.width)
        model.status[at] = {"delete": ABSENT, "escape": ESCAPED}.get(operation, CODED)
        if operation == "delete":
            return {}
        arrays: dict[str, Array] = {"slots/v": self._slot(operation, model.element, at)}
        if "m" in model.schema.slots:
            arrays["slots/m"] = self._slot(operation, model.row_slot, (rows, model.ranges.index(tile.columns)))
        if operation == "escape":
            arrays["values"] = self.random.standard_normal(shape).astype(np.float32)
            arrays["values"][0, 0] = self.random.choice([np.nan, np.inf, 0.5])
            model.exact[at] = arrays["values"]
        elif model.is_raw:
            arrays["codes"] = self.random.standard_normal(shape).astype(np.float32)
            model.codes[at] = arrays["codes"]
        else:
            large = self.random.random() < 0.2
            codes = self.random.integers(-40_000, 40_000, shape) if large else self.random.integers(-99, 99, shape)
            arrays["codes"] = codes.astype(np.int32 if large else np.int16)
            model.codes[at] = codes + (model.codes[at] if operation == "add" else 0)
        return arrays

    def _slot(self, operation: str, held: Array, at: Any) -> Array:
        old = held[at]
        held[at] = new = self.random.lognormal(0, 2, old.shape).astype(np.float32)
        if operation == "escape":
            return new
        return new.view(np.int32) - (old.view(np.int32) if operation == "add" else 0)
