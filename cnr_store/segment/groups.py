"""Which arrays a row list is stored in, and in which order: small lists of one shape share a group, large ones do not.

Cost belongs to the bytes that changed: a delta of a few rows in each of a thousand tables puts as many objects as one
of a table (`format_spec/decisions/0022`).

Codes may be stored in the order of a slot: rows that moved alike lie together, and the entropy coder sees it. A slot
such as Adagrad's accumulator grows by about what its row moved, so its difference, which every delta stores, shows how
large the row's differences are. Codes in its order are several percent smaller, and no order need be stored
(`format_spec/decisions/0016`). Row ids and slots stay ascending by row id. The order is that of a stable counting sort
of int16 keys. Nothing is put here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.encodings import row_kernels
from cnr_store.format import arrays
from cnr_store.format.layout import array_path
from cnr_store.format.records import ArrayEntry, ListLine
from cnr_store.segment.codes import Array, ArraySpec

Blocks = dict[str, npt.NDArray[Any]]
"""Array name (``rows``, ``codes``, ``slots/momentum1`` ...) to the block of one chunk."""

LEAST_CODES = 1 << 16
"""Arrays with fewer codes stay as they are: there is little to gain from an order, and one more object to read."""


@dataclass(frozen=True, slots=True)
class RowList:
    """The content of a row list, produced chunk by chunk on worker threads.

    Attributes
    ----------
    count
        Rows in the list.
    widths
        Array name to (dtype, width); width None is a 1-d array. ``rows`` is among them.
    produce
        Positions [start, stop) of the list to a block of each array: C-contiguous, owned by the caller until the
        chunk is encoded.
    order
        The array in whose order each chunk of ``codes`` may be stored (`order_of`); None for that of the row ids.
    is_fixed
        Whether nobody writes into the memory of the blocks before the segment is put: small lists need no copy.
    """

    count: int
    widths: Mapping[str, tuple[np.dtype[Any], int | None]]
    produce: Callable[[int, int], Blocks]
    order: str | None = None
    is_fixed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, as codes or exact: they give a chunk its size."""
        name = next(name for name in ("codes", "values", "rows") if name in self.widths)
        dtype, width = self.widths[name]
        return dtype.itemsize * (width or 1)

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk of arrays of its own."""
        return arrays.chunk_rows_for(self.count, self.row_bytes)

    @property
    def full_chunk_rows(self) -> int:
        """Rows that fill a chunk: a list of as many has arrays of its own."""
        return arrays.full_chunk_rows(self.row_bytes)

    @property
    def is_large(self) -> bool:
        """Whether it fills a chunk by itself."""
        return self.count >= self.full_chunk_rows


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Operation, array dtypes and widths, and order: row lists with equal shapes may share arrays."""

    operation: str
    widths: tuple[tuple[str, np.dtype[Any], int | None], ...]
    order: str | None

    @classmethod
    def of(cls, operation: str, row_list: RowList) -> GroupShape:
        """Return the shape of a list."""
        return _shape_of(operation, tuple(row_list.widths.items()), row_list.order)

    def arrays_at(self, path: str, rows: int, chunk_rows: int) -> dict[str, ArrayEntry]:
        """Return the arrays of a group at ``path`` by name. ``rows``: how many they have, or have at least."""
        entries = {
            name: arrays.describe(
                array_path(path, name), (rows,) if width is None else (rows, width), dtype, chunk_rows
            )
            for name, dtype, width in self.widths
        }
        if self.order is not None and rows * entries["codes"].shape[1] >= LEAST_CODES:
            entries["codes"] = msgspec.structs.replace(entries["codes"], order=entries[self.order].path)
        return entries

    def stored(self, produced: Blocks, entries: Mapping[str, ArrayEntry]) -> Blocks:
        """Return the blocks of a chunk with its codes in their order."""
        if self.order is None or entries["codes"].order is msgspec.UNSET:
            return produced
        return {**produced, "codes": into_order(produced["codes"], produced[self.order])}


@lru_cache(maxsize=1 << 10)
def _shape_of(
    operation: str, given: tuple[tuple[str, tuple[np.dtype[Any], int | None]], ...], order: str | None
) -> GroupShape:
    """The same object for lists that are alike, in whatever order their arrays are given."""
    widths = tuple((name, dtype, width) for name, (dtype, width) in sorted(given, key=itemgetter(0)))
    return GroupShape(operation, widths, order)


@dataclass(slots=True)
class _Waiting:
    """Row lists end to end that are not in a chunk yet, and how many rows each has left."""

    lists: list[ListLine]
    counts: npt.NDArray[np.int64]
    blocks: Blocks

    def take(self, most: int) -> Blocks:
        """Remove at most so many rows, and set the id ranges of their lists."""
        rows = self.blocks["rows"]
        taken = min(most, len(rows))
        ends = np.cumsum(self.counts)
        starts = ends - self.counts
        begun = int(np.searchsorted(starts, taken))
        first = rows[starts[:begun]].tolist()
        last = rows[np.minimum(ends[:begun], taken) - 1].tolist()
        for written, low, high in zip(self.lists, first, last, strict=False):
            written.first += (low,)
            written.last += (high,)
        piece = {name: block[:taken] for name, block in self.blocks.items()}
        over = int(np.searchsorted(ends, taken, side="right"))
        self.lists, self.counts = self.lists[over:], np.minimum(self.counts, ends - taken)[over:]
        self.blocks = {name: block[taken:] for name, block in self.blocks.items()}
        return piece


class SharedGroup:
    """Buffers small row lists until their rows fill a chunk of the shared arrays. Memory: one chunk and one call.

    ``entries`` are the arrays, from the first chunk on; they have more rows in the end.
    """

    def __init__(self, path: str, shape: GroupShape, row_bytes: int) -> None:
        self.path = path
        self.shape = shape
        self.rows = 0
        self.waiting_rows = 0
        self.entries: dict[str, ArrayEntry] | None = None
        self._full = arrays.full_chunk_rows(row_bytes)
        self._waiting: list[_Waiting] = []
        self._taken = 0

    @property
    def is_full(self) -> bool:
        """Whether the rows that wait fill a chunk."""
        return self.waiting_rows >= self._full

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk: of a full one, or all rows where they fill none."""
        return min(self._full, self.rows)

    def append(self, joined: RowList, counts: Sequence[int]) -> list[ListLine]:
        """Take small lists, which stand end to end in ``joined`` with ``counts`` rows each, into the buffer."""
        produced = joined.produce(0, joined.count)
        if not joined.is_fixed:
            produced = {name: block.copy() for name, block in produced.items()}
        written = [ListLine(group=self.path, count=count, first=(), last=()) for count in counts]
        self._waiting.append(_Waiting(written, np.array(counts, np.int64), produced))
        self.waiting_rows += joined.count
        self.rows += joined.count
        return written

    def take(self) -> tuple[int, Blocks]:
        """Remove the next chunk from the buffer; returns its number and blocks. Sets the id ranges of its lists."""
        left = min(self._full, self.waiting_rows)
        self.waiting_rows -= left
        self._taken += 1
        pieces: list[Blocks] = []
        while left:
            pieces.append(self._waiting[0].take(left))
            if not self._waiting[0].lists:
                del self._waiting[0]
            left -= len(pieces[-1]["rows"])
        return self._taken - 1, {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def order_of(operation: str, specs: Mapping[str, ArraySpec], dtypes: Mapping[str, np.dtype[Any]]) -> str | None:
    """Return the name of the array in whose order the codes of a row list may be stored, or None. Pure.

    The first one-dimensional slot whose differences fit int16, for differences of codes. ``dtypes`` are those that the
    list is stored in.
    """
    codes = specs.get("codes")
    if operation != "add" or codes is None or not codes.is_additive:
        return None
    if codes.width < 2:
        return None
    slots = (name for name, spec in specs.items() if name != "codes" and spec.is_vector and spec.is_additive)
    return next((name for name in slots if dtypes[name] == np.int16), None)


def into_order(block: Array, keys: Array) -> Array:
    """Return the rows of ``block`` (n, width) in the stable order of the int16 ``keys`` (n,); copied."""
    ordered = np.empty(block.shape, block.dtype)
    row_kernels.sort_rows(_words(block), keys, _words(ordered))
    return ordered


def out_of_order(ordered: Array, keys: Array, out: Array) -> None:
    """Write rows that `into_order` moved back where they were, to ``out`` (n, width), which is other memory."""
    row_kernels.unsort_rows(_words(ordered), keys, _words(out))


def _words(block: Array) -> Array:
    """The same rows as 8-byte words where they are whole ones: a quarter as many elements to move."""
    is_whole = block.flags.c_contiguous and block.shape[1] * block.itemsize % 8 == 0
    return block.view(np.int64) if is_whole else block
