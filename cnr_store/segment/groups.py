"""Which arrays a row list is stored in, and in which order: small lists of one shape share a group, large ones do not.

Cost belongs to the bytes that changed: a delta of a few rows in each of a thousand tables puts as many objects as one
of a table (`format_spec/decisions/0022`).

Differences may be stored in the order of another array: rows that moved alike lie together, and the entropy coder sees
it. A slot such as row-wise Adagrad's accumulator grows by about what its row moved, so its difference, which every
delta stores, shows how large the row's differences are (`format_spec/decisions/0016`). Where every slot has a value per
element, a class of each row is stored for it, two bits a row (`format_spec/decisions/0056`). Row ids and arrays of one
value per row stay ascending by row id. The order is that of a stable counting sort of int16 keys. Nothing is put here.
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

CLASSES = "classes"
"""The array with the class of each row, where that gives the order."""

_LOGS = np.log2(1 + np.arange(256, dtype=np.float64)).astype(np.float32)
"""log2(1 + n) by n."""

_CLASS_OF_QUARTER = np.array([0, 1, 3, 2], np.int16)
"""The class of each quarter of the rows, from the smallest differences to the largest."""

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
        The array in whose order each chunk of differences may be stored (`order_of`); None for that of the row ids.
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
        if self.order is None or rows * entries["codes"].shape[1] < LEAST_CODES:
            return entries
        if self.order == CLASSES:
            path = array_path(path, CLASSES)
            entries[CLASSES] = arrays.describe(path, (rows,), np.dtype(np.int16), chunk_rows)
        by = entries[self.order].path
        return {
            name: msgspec.structs.replace(one, order=by) if one.codec == "digits" and len(one.shape) == 2 else one
            for name, one in entries.items()
        }

    def with_classes(self, produced: Blocks, entries: Mapping[str, ArrayEntry]) -> Blocks:
        """Return the blocks of a chunk, with the classes of the rows if these give the order."""
        if CLASSES not in entries:
            return produced
        ordered = [produced[name] for name, one in entries.items() if one.order is not msgspec.UNSET]
        return {**produced, CLASSES: classes_of(ordered)}

    def stored(self, name: str, blocks: Blocks, entries: Mapping[str, ArrayEntry]) -> Array:
        """Return one block of a chunk as it is stored, in its order: copied then. ``blocks``: `with_classes`."""
        if self.order is None or entries[name].order is msgspec.UNSET:
            return blocks[name]
        return into_order(blocks[name], blocks[self.order])


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
        if len(pieces) == 1:
            return self._taken - 1, pieces[0]
        return self._taken - 1, {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def order_of(operation: str, specs: Mapping[str, ArraySpec], dtypes: Mapping[str, np.dtype[Any]]) -> str | None:
    """Return the name of the array in whose order the differences of a row list may be stored, or None. Pure.

    The first one-dimensional slot whose differences fit int16; without one, classes of the rows, if a slot has
    differences for each element. ``dtypes`` are those that the list is stored in.
    """
    codes = specs.get("codes")
    if operation != "add" or codes is None or not codes.is_additive:
        return None
    if codes.width < 2:
        return None
    slots = [(name, spec.is_vector) for name, spec in specs.items() if name != "codes"]
    found = next((name for name, is_vector in slots if is_vector and dtypes[name] == np.int16), None)
    return CLASSES if found is None and not all(is_vector for _, is_vector in slots) else found


def classes_of(blocks: Sequence[Array]) -> Array:
    """Return the class of each row by the size of its differences: int16 (n,). Pure.

    The size is the sum of log2 of 1 + the absolute difference, over each array in units of its mean, so that all count
    alike. Classes are quarters of the rows, the largest before the second largest: digits of the first and the second
    half of a chunk share bytes, and a Huffman code wastes least where no byte has small digits alone.

    Parameters
    ----------
    blocks
        int16 or int32 (n, width) each.
    """
    sizes = np.zeros(len(blocks[0]), np.float32)
    for block in blocks:
        sums = np.zeros(len(block), np.float32)
        row_kernels.add_log_sizes(block, _LOGS, sums)
        sizes += sums / np.float32(max(sums.mean(dtype=np.float64), 1e-9))
    places = [len(sizes) * quarter // 4 for quarter in range(1, 4)]
    bounds = np.partition(sizes, places)[places]
    return _CLASS_OF_QUARTER[np.searchsorted(bounds, sizes, side="right")]


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
