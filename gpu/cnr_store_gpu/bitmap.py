"""Which rows changed since the last save: one bit per row, in one bitmap for all tables of a device.

Why this module exists: the rows of a delta must be known exactly, at a cost that does not slow training down. All
tables of a device share one tensor of packed words, so the marks of an interval are one small array, for any number of
lookups. Between two ``take`` calls bits only change from 0 to 1.

It must never lose a mark: an id outside its table sets nothing, and taken words can be given back after a
failed save. Marking twice, or too much, is always safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cnr_store.errors import BadInput, BadRowIds, BadShape, TableNotFound
from cnr_store.runtime.arguments import some_of
from cnr_store.types import RowIds
from cnr_store_gpu import words as packed
from cnr_store_gpu.operators import mark_here
from cnr_store_gpu.words import Words

OutOfRange = Literal["raise", "ignore"]
Ids = torch.Tensor | npt.NDArray[Any] | Sequence[int]


class Taken(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The rows of one table that were marked when they were taken, and the words to give them back.

    Attributes
    ----------
    table
        The table's name.
    num_rows
        Rows of the whole table.
    row_ids
        int64, sorted, unique: the marked rows.
    words
        uint32 ``(ceil(num_rows / 32),)``: the same rows as bits; a copy, which is never written.
    device_rows
        ``row_ids`` on the device of a bitmap that is not on the CPU, so that a gather there needs no copy of
        them; None on the CPU.
    """

    table: str
    num_rows: int
    row_ids: RowIds
    words: Words
    device_rows: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is in a bitmap's words."""

    first_word: int
    num_words: int
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class RowLists(Mapping[str, RowIds]):
    """Row ids of many tables, end to end: those of a table are cut out where it is looked up.

    Attributes
    ----------
    tables
        Their names, each once.
    row_ids
        int64: of all tables, in their order.
    counts
        int64 ``(num_tables,)``: how many each has.
    """

    tables: Collection[str]
    row_ids: RowIds
    counts: npt.NDArray[np.int64]
    _cut: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, table: str) -> RowIds:
        start, stop = self._bounds()[table]
        return self.row_ids[start:stop]

    def __contains__(self, table: object) -> bool:
        return table in self._bounds()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def joined(self, tables: Sequence[str]) -> RowIds:
        """Return the row ids of some tables, end to end; copied."""
        bounds = self._bounds()
        starts, stops = np.array([*map(bounds.__getitem__, tables)], np.int64).reshape(-1, 2).T
        counts = stops - starts
        begins = counts.cumsum() - counts
        found: RowIds = self.row_ids[np.arange(counts.sum()) + np.repeat(starts - begins, counts)]
        return found

    def _bounds(self) -> dict[str, tuple[int, int]]:
        if not self._cut:
            ends = self.counts.cumsum().tolist()
            self._cut.update(zip(self.tables, zip([0, *ends], ends, strict=False), strict=True))
        return self._cut


@dataclass(frozen=True, slots=True, eq=False)
class TakenRows(Mapping[str, Taken]):
    """The taken rows of the tables of a bitmap on the host: what is taken of a table is made where it is looked up.

    Attributes
    ----------
    rows
        Of all tables.
    words
        uint32: those of all tables, which lie apart; a copy, which is never written.
    places
        Where each table is among the bitmap's words; the same object as long as all tables are taken.
    first_word
        The first of ``words`` in the bitmap.
    """

    rows: RowLists
    words: Words
    places: Mapping[str, Place]
    first_word: int

    def __getitem__(self, table: str) -> Taken:
        return Taken(table, self.places[table].num_rows, self.rows[table], self.words_in(table, self.words))

    def words_in(self, table: str, words: Words) -> Words:
        """Return the words of a table in an array that has those of all as `words` does, not copied."""
        place = self.places[table]
        first = place.first_word - self.first_word
        return words[first : first + place.num_words]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _spans_of(places: Mapping[str, Place]) -> npt.NDArray[np.int64]:
    spans = [(place.first_word, place.num_words) for place in places.values()]
    return np.array(spans, np.int64).reshape(-1, 2)


def check_words(table: str, words: npt.NDArray[Any] | torch.Tensor, num_rows: int) -> Words:
    """Return words of a table as uint32, or raise BadShape or BadRowIds."""
    array = words.detach().cpu().numpy() if isinstance(words, torch.Tensor) else np.asarray(words)
    if array.dtype not in (np.dtype(np.uint32), np.dtype(np.int32)) or array.shape != (packed.words_of_rows(num_rows),):
        raise BadShape(
            f"words of table {table!r}: expected ({packed.words_of_rows(num_rows)},) of uint32 or int32 "
            f"for {num_rows} rows, found {array.shape} of {array.dtype}; give the words as they were taken "
            f"from a bitmap of this table",
            table=table,
            expected=(packed.words_of_rows(num_rows),),
            found=array.shape,
        )
    bits: Words = np.ascontiguousarray(array).view(np.uint32)
    if num_rows % packed.BITS and int(bits[-1]) >> (num_rows % packed.BITS):
        raise BadRowIds(
            f"words of table {table!r}: a bit past its last row ({num_rows - 1}) is set; they belong to a larger table",
            table=table,
        )
    return bits


def flat_ids(table: str, ids: Ids) -> torch.Tensor | npt.NDArray[Any]:
    """Return the ids one-dimensional, int32 or int64, where they are; a view when they are contiguous."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise _not_integers(table, str(ids.dtype))
        flat = ids.detach().reshape(-1)
        return flat if flat.dtype in (torch.int32, torch.int64) else flat.to(torch.int64)
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise _not_integers(table, str(array.dtype))
    array = np.ascontiguousarray(array.reshape(-1))
    return array if array.dtype in (np.dtype(np.int32), np.dtype(np.int64)) else array.astype(np.int64)


def _not_integers(table: str, found: str) -> BadRowIds:
    return BadRowIds(
        f"row ids of table {table!r}: expected integers, found {found}; pass row numbers, not a mask or values",
        table=table,
        expected="int64",
        found=found,
    )


def _kernels() -> ModuleType:
    # Only where a bitmap is not on the CPU: it needs kernels that a training on the CPU does not.
    from cnr_store_gpu import kernels

    return kernels


class RowBitmap:
    """One bit per row of every table, in one tensor of packed int32 words on ``device``.

    Parameters
    ----------
    table_rows
        Rows of each table, by name. Memory is one bit per row, rounded up to 1024 rows (128 bytes) per table.
    device
        Where the words live. On the CPU marking is a numba kernel, elsewhere a launcher of
        ``cnr_store_gpu.kernels``: Triton on a GPU.
    on_host
        Whether the CPU's path is taken. None: if ``device`` is the CPU. False there runs the path of the other
        devices on CPU tensors, which is how it is tested without one.

    Every method may be called from any thread; a mark and a take never overlap on the CPU, and follow the
    order of the stream elsewhere. ``words`` is the live tensor: its storage is fixed for the life of the bitmap,
    so a CUDA graph may hold its address. ``mark`` with ``out_of_range="ignore"`` may be captured; a take may not.

    Examples
    --------
    >>> bitmap = RowBitmap({"user": 100, "item": 10})
    >>> bitmap.mark("user", torch.tensor([7, 3, 7]))
    >>> bitmap.take("user")
    array([3, 7])
    >>> bitmap.any()
    False
    """

    def __init__(
        self, table_rows: Mapping[str, int], device: torch.device | str = "cpu", *, on_host: bool | None = None
    ) -> None:
        self._places: dict[str, Place] = {}
        first_word = 0
        for table, num_rows in table_rows.items():
            if num_rows < 0:
                raise BadInput(f"table {table!r} has {num_rows} rows; expected 0 or more", table=table, found=num_rows)
            self._places[table] = Place(first_word, packed.words_of_rows(num_rows), int(num_rows))
            first_word += packed.aligned_words(num_rows)
        self._spans = _spans_of(self._places)
        self.words = torch.zeros(first_word, dtype=torch.int32, device=device)
        self.device = self.words.device  # with its number, as tensors there have it
        uses_host = self.device.type == "cpu" if on_host is None else on_host
        # The view shares the tensor's memory; None where the host cannot see it.
        self._host: Words | None = self.words.numpy().view(np.uint32) if uses_host else None

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table, by name, in the order of the words."""
        return {table: place.num_rows for table, place in self._places.items()}

    @property
    def is_on_host(self) -> bool:
        """Whether marking runs on the CPU's path."""
        return self._host is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of the words."""
        return self.words.numel() * 4

    def mark(self, table: str, ids: Ids, *, skip_row: int | None = None, out_of_range: OutOfRange = "raise") -> None:
        """Mark rows as changed.

        Parameters
        ----------
        table
            A table of this bitmap.
        ids
            Integers of any shape and order, repeats allowed; read only, not kept. Ids on another device
            are copied.
        skip_row
            A row that is not marked (``padding_idx``: its gradient is always zero).
        out_of_range
            What an id outside ``[0, num_rows)`` does. It never marks anything. ``"raise"`` costs a wait
            for the device where the bitmap is not on the CPU.

        Raises
        ------
        BadRowIds
            Ids that are no integers, or outside the table; the ids inside it are marked all the same.
        """
        place = self._place(table)
        flat = flat_ids(table, ids)
        skip = packed.NO_ROW if skip_row is None else skip_row
        if self._host is not None:
            array = flat.cpu().numpy() if isinstance(flat, torch.Tensor) else flat
            with packed.LOCK:
                outside = packed.mark_words(self._host, array, place.first_word, place.num_rows, skip)
            if outside and out_of_range == "raise":
                raise self._outside(table, outside, int(array.min()), int(array.max()))
            return
        tensor = (flat if isinstance(flat, torch.Tensor) else torch.from_numpy(flat)).to(self.device).contiguous()
        if tensor.numel() == 0:
            return
        with packed.LOCK:
            _kernels().mark(self.words, tensor, place.first_word, place.num_rows, skip)
        if out_of_range == "raise":
            outside = int(((tensor < 0) | (tensor >= place.num_rows)).sum())
            if outside:
                raise self._outside(table, outside, int(tensor.min()), int(tensor.max()))

    def mark_looked_up(self, first_word: int, num_rows: int, ids: torch.Tensor, skip_row: int = packed.NO_ROW) -> None:
        """Mark row ids of the table at ``first_word`` (``span``): ``mark`` without checks, for each lookup.

        ``ids`` is int32 or int64 of any shape; those outside the table mark nothing. Waits for nothing if they are on
        the device of the words.
        """
        if self._host is None or not (ids.is_cpu and ids.dtype is torch.int64 and ids.is_contiguous()):
            mark_here(self.words, ids, first_word, num_rows, skip_row)
            return
        with packed.LOCK:
            packed.mark_at(self._host, ids.data_ptr(), ids.numel(), first_word, num_rows, skip_row)

    def mark_parts(self, parts: npt.NDArray[np.int64]) -> None:
        """Mark ids that lie in several places of the host's memory: ``packed.mark_parts_words``.

        Only where ``is_on_host``. Ids outside their table mark nothing.
        """
        assert self._host is not None
        with packed.LOCK:
            packed.mark_parts_words(self._host, parts)

    def mark_gradients(self, parts: npt.NDArray[np.int64]) -> None:
        """Mark rows of dense gradients in memory: ``packed.mark_gradients``. Only where ``is_on_host``."""
        assert self._host is not None
        with packed.LOCK:
            packed.mark_gradients(self._host, parts)

    def mark_mask(self, table: str, mask: torch.Tensor) -> None:
        """Mark the rows where ``mask``, bool ``(num_rows,)``, is true; waits for no device but the mask's own.

        Raises
        ------
        BadShape
            A mask of another length or dtype; nothing was marked.
        """
        place = self._place(table)
        if mask.dtype != torch.bool or tuple(mask.shape) != (place.num_rows,):
            raise BadShape(
                f"mask of table {table!r}: expected ({place.num_rows},) of bool, found {tuple(mask.shape)} of "
                f"{mask.dtype}",
                table=table,
                expected=(place.num_rows,),
                found=tuple(mask.shape),
            )
        bits = packed.pack_mask(mask).to(self.device)
        with packed.LOCK:
            self._slice(place).bitwise_or_(bits)

    def mark_all(self, table: str) -> None:
        """Mark every row of the table."""
        self.or_words(table, packed.words_full(self._place(table).num_rows))

    def or_words(self, table: str, words: npt.NDArray[Any] | torch.Tensor) -> None:
        """Mark the rows whose bits are set in ``words`` (int32 or uint32, ``(ceil(num_rows / 32),)``).

        Raises
        ------
        BadShape, BadRowIds
            Words of another shape, or with a bit past the last row; nothing was marked.
        """
        place = self._place(table)
        bits = check_words(table, words, place.num_rows)
        with packed.LOCK:
            if self._host is not None:
                self._host[place.first_word : place.first_word + place.num_words] |= bits
            else:
                self._slice(place).bitwise_or_(torch.from_numpy(bits.view(np.int32).copy()).to(self.device))

    def copy_words(self, table: str) -> Words:
        """Return a copy of the table's words, uint32 ``(ceil(num_rows / 32),)`` on the host; marks stay."""
        with packed.LOCK:
            return self._copy(self._place(table))

    def row_ids(self, table: str) -> RowIds:
        """Return the marked rows, int64, sorted; the marks stay."""
        return packed.rows_of(self.copy_words(table))

    def take(self, table: str) -> RowIds:
        """Return the marked rows, int64, sorted, and clear them. Waits for a device other than the CPU."""
        return self.take_all([table])[table].row_ids

    def take_all(self, tables: Iterable[str] | None = None) -> Mapping[str, Taken]:
        """Return the marked rows of every table (or of ``tables``), none too, and clear them.

        Keep the result until the save has won, and ``give_back`` what it held when it has not. On a device other
        than the CPU it waits for the counts of all tables at once, and for the copies of rows and words.
        """
        places = self._places if tables is None else {table: self._place(table) for table in tables}
        if self._host is None:
            return self._take_from_device(places)
        return self._take_from_host(places)

    def give_back(self, taken: Taken | Mapping[str, Taken]) -> None:
        """Mark taken rows again. Marks made since then stay, and a second call changes nothing."""
        for one in (taken,) if isinstance(taken, Taken) else taken.values():
            self.or_words(one.table, one.words)

    def count(self, table: str) -> int:
        """Return how many rows of the table are marked."""
        return int(packed.count_bits(self.copy_words(table)))

    def any(self) -> bool:
        """Return whether any row of any table is marked."""
        return bool(self.words.any())

    def clear(self, table: str | None = None) -> None:
        """Forget the marks of a table, or of all."""
        with packed.LOCK:
            (self.words if table is None else self._slice(self._place(table))).zero_()

    def _take_from_host(self, places: Mapping[str, Place]) -> Mapping[str, Taken]:
        assert self._host is not None
        if not places:
            return {}
        spans = self._spans if places is self._places else _spans_of(places)
        first, stop = int(spans[:, 0].min()), int(spans.sum(axis=1).max())
        with packed.LOCK:
            words = self._copy(Place(first, stop - first, 0))
            if len(places) == len(self._places):
                self._host[first:stop] = 0
            else:
                for place in places.values():
                    self._slice(place).zero_()
        spans = spans - (first, 0)
        return TakenRows(RowLists(places.keys(), *packed.rows_of_spans(words, spans)), words, places, first)

    def _take_from_device(self, places: Mapping[str, Place]) -> dict[str, Taken]:
        in_order = sorted(places, key=lambda table: places[table].first_word)
        with packed.LOCK:
            rows, before = _kernels().take_rows(
                self.words, [(places[table].first_word, places[table].num_words) for table in in_order]
            )
        # Two copies, however many tables there are.
        all_rows = torch.cat(rows).cpu().numpy() if rows else np.empty(0, np.int64)
        all_words: Words = before.cpu().numpy().view(np.uint32)
        taken: dict[str, Taken] = {}
        start = 0
        for table, on_device in zip(in_order, rows, strict=True):
            place, stop = places[table], start + len(on_device)
            words = all_words[place.first_word : place.first_word + place.num_words]
            taken[table] = Taken(table, place.num_rows, all_rows[start:stop], words, on_device)
            start = stop
        return {table: taken[table] for table in places}

    def _copy(self, place: Place) -> Words:
        # clone first: .cpu() of a CPU tensor is the tensor itself, and the marks are about to be cleared.
        words: Words = self._slice(place).clone().cpu().numpy().view(np.uint32)
        return words

    def _slice(self, place: Place) -> torch.Tensor:
        return self.words[place.first_word : place.first_word + place.num_words]

    def span(self, table: str) -> tuple[int, int]:
        """Return (first word, number of rows) of a table: what a marking operator needs beside ``words``."""
        place = self._place(table)
        return place.first_word, place.num_rows

    def _place(self, table: str) -> Place:
        try:
            return self._places[table]
        except KeyError:
            raise TableNotFound(
                f"no table {table!r} in this bitmap; it has {some_of(self._places, table)}", table=table
            ) from None

    def _outside(self, table: str, outside: int, smallest: int, largest: int) -> BadRowIds:
        num_rows = self._places[table].num_rows
        return BadRowIds(
            f"table {table!r} has rows 0 to {num_rows - 1}, but {outside} of the ids to mark are outside "
            f"(ids from {smallest} to {largest}); they were not marked, the others were",
            table=table,
            expected=num_rows,
            found=outside,
        )


class DeviceBitmaps:
    """One ``RowBitmap`` per device. Its methods are those that look at all devices; for one table ask `of`.

    Parameters
    ----------
    tables
        (rows, device) of each table, by name. Tables of one device share one bitmap, in this order.
    """

    def __init__(self, tables: Mapping[str, tuple[int, torch.device]]) -> None:
        rows: dict[torch.device, dict[str, int]] = {}
        for table, (num_rows, device) in tables.items():
            rows.setdefault(device, {})[table] = num_rows
        self._bitmaps = {device: RowBitmap(own, device) for device, own in rows.items()}
        self._by_table = {table: self._bitmaps[device] for table, (_, device) in tables.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all words."""
        return sum(bitmap.size_bytes for bitmap in self._bitmaps.values())

    def of(self, table: str) -> RowBitmap:
        """Return the bitmap that has the table; raises TableNotFound."""
        try:
            return self._by_table[table]
        except KeyError:
            raise TableNotFound(
                f"no table {table!r} here; there are {some_of(self._by_table, table)}", table=table
            ) from None

    def any(self) -> bool:
        """Return whether any row of any table is marked; waits for the devices."""
        return any(bitmap.any() for bitmap in self._bitmaps.values())

    def take_all(self, tables: Iterable[str] | None = None) -> Mapping[str, Taken]:
        """Return the marked rows of every table and clear them; one wait per device."""
        if tables is None and len(self._bitmaps) == 1:
            return next(iter(self._bitmaps.values())).take_all()  # it has all tables, in this order
        wanted = list(self._by_table if tables is None else tables)
        taken: dict[str, Taken] = {}
        for bitmap in dict.fromkeys(self.of(table) for table in wanted):
            taken.update(bitmap.take_all([table for table in wanted if self._by_table[table] is bitmap]))
        return {table: taken[table] for table in wanted}

    def clear(self) -> None:
        """Forget all marks."""
        for bitmap in self._bitmaps.values():
            bitmap.clear()
