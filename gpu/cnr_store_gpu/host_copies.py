"""Copies of rows of many tables in host memory, into one piece of memory: by one kernel, on several threads.

Why this module exists: a save copies while the training waits, and a call of torch per tensor takes longer than the
rows of a small table. Here Python collects addresses, and one kernel copies. What is not in host memory or not
contiguous is copied by torch, tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray  # type: ignore[attr-defined]

from cnr_store.runtime.addresses import address_of, int32s_at, int64s_at
from cnr_store.runtime.jit import njit
from cnr_store.runtime.threads import Workers
from cnr_store.types import RowIds
from cnr_store_gpu.bitmap import RowLists
from cnr_store_gpu.gather import RowRequest, check_range, index_of

SMALL_BYTES = 1 << 18
"""Copies of one table above it do not lie end to end with those of others: they are encoded by themselves."""

TASK_BYTES = 1 << 19
"""What a thread copies at a time."""

_UNIT = 4
_ALIGNMENT = 16

_INT64 = np.dtype(np.int64)
_MOST_DIMS = 2
"""Of a plain tensor: number of rows and bytes then give its shape."""


def _kinds(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """What decides whether tensors can be plain.

    In lists of numbers and singletons: an object for each of thousands of tensors would set off the garbage collector.
    """
    getters = (attrgetter("dtype"), attrgetter("layout"), attrgetter("is_cpu"), torch.Tensor.dim)
    return [[*map(getter, tensors)] for getter in getters]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Rows and bytes of plain tensors."""
    return [_rows_of(tensors), [*map(attrgetter("nbytes"), tensors)]]


def _rows_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    # Of `torch.Tensor` it is a function of Python, which takes six times as long.
    return [*map(torch._C.TensorBase.__len__, tensors)]  # type: ignore[attr-defined]


def _chosen(tensors: Sequence[torch.Tensor], numbers: list[int]) -> Sequence[torch.Tensor]:
    """Return tensors by their ascending numbers."""
    return tensors if len(numbers) == len(tensors) else [*map(tensors.__getitem__, numbers)]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLists:
    """Names and numbers of the tensors of tables, table by table: what requests share that are made again and again.

    Attributes
    ----------
    tables
        Their names.
    names, lengths
        Names of all tensors, one table after the other, and how many each table has.
    """

    tables: list[str]
    names: list[str]
    lengths: list[int]
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def are(self, known: TensorLists) -> bool:
        """Whether ``known`` has the same."""
        if self is known:
            return True
        return (self.tables, self.names, self.lengths) == (known.tables, known.names, known.lengths)

    def place(self, table: str) -> tuple[int, int]:
        """Return where the tensors of a table begin and end among all; raises KeyError."""
        if not self._places:
            ends = np.cumsum(self.lengths).tolist()
            self._places.update(zip(self.tables, zip([0, *ends], ends, strict=False), strict=True))
        return self._places[table]


@dataclass(frozen=True, slots=True, eq=False)
class RowRequests(Mapping[str, RowRequest]):
    """Requests for rows of many tables, end to end: that of a table is made where it is looked up.

    Attributes
    ----------
    lists
        Which tensors each table has.
    tensors
        All of them, in the order of `lists`.
    rows
        Row ids of the same tables in the same order, on the host.
    addresses
        int64, by tensor: where it begins, if the caller knows that it is contiguous and has its rows; else 0. None:
        nothing is known. To ask a thousand tensors takes longer than their rows.
    """

    lists: TensorLists
    tensors: Sequence[torch.Tensor]
    rows: RowLists
    addresses: npt.NDArray[np.int64] | None = None

    def __getitem__(self, table: str) -> RowRequest:
        start, stop = self.lists.place(table)
        return RowRequest(
            self.rows[table], dict(zip(self.lists.names[start:stop], self.tensors[start:stop], strict=True))
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.lists.tables)

    def __len__(self) -> int:
        return len(self.lists.tables)


def tensors_of(requests: Mapping[str, RowRequest]) -> tuple[TensorLists, Sequence[torch.Tensor]]:
    """Return the tensors of requests, one table after the other."""
    if isinstance(requests, RowRequests):
        return requests.lists, requests.tensors
    named = [*map(attrgetter("tensors"), requests.values())]
    tensors = [*chain.from_iterable(map(methodcaller("values"), named))]
    return TensorLists([*requests], [*chain.from_iterable(named)], [*map(len, named)]), tensors


@dataclass(frozen=True, slots=True, eq=False)
class HostLayout:
    """What of the requests of a gather follows from the names, kinds and sizes of their tensors: kept between gathers.

    Attributes
    ----------
    lists, kinds, candidates, sizes
        What it was made of: which tensors each table has, their kinds, which of them can be plain, and their sizes.
    is_plain
        By table: in host memory, with rows of equal numbers that can be copied in units of 4 bytes.
    plain, owners
        Numbers of the tensors of plain tables, and of their tables.
    num_rows, row_bytes
        By tensor of a plain table.
    shapes
        Of a row, by tensor of a plain table.
    alike
        By table: a number that plain tables with equal names, dtypes and shapes of rows share.
    order, groups
        By tensor of a plain table: in which order they are copied, and the number of its group. Tensors of one group
        have the same name in tables that are alike, and are copied end to end.
    """

    lists: TensorLists
    kinds: list[list[Any]]
    candidates: npt.NDArray[np.int64]
    sizes: list[list[int]]
    is_plain: npt.NDArray[np.bool_]
    plain: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    num_rows: npt.NDArray[np.int64]
    row_bytes: npt.NDArray[np.int64]
    shapes: list[tuple[int, ...]]
    alike: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]

    def fits(
        self, lists: TensorLists, tensors: Sequence[torch.Tensor], addresses: npt.NDArray[np.int64], *, is_like: bool
    ) -> bool:  # fmt: skip
        """Whether these tensors have this layout; ``is_like``: kinds and sizes in bytes are known to be its.

        ``addresses`` as in `RowRequests`.
        """
        if not lists.are(self.lists):
            return False
        if is_like:  # then their dtypes and numbers of elements are those of the layout, too
            asked = (addresses[self.candidates] == 0).nonzero()[0]
            found = _rows_of(_chosen(tensors, self.candidates[asked].tolist()))
            return found == [*map(self.sizes[0].__getitem__, asked.tolist())]
        return _kinds(tensors) == self.kinds and _sizes(_chosen(tensors, self.candidates.tolist())) == self.sizes


def _layout(lists: TensorLists, tensors: Sequence[torch.Tensor]) -> HostLayout:
    names, lengths = lists.names, lists.lengths
    kinds = _kinds(tensors)
    can_be = [
        layout is torch.strided and is_cpu and 1 <= dims <= _MOST_DIMS
        for _, layout, is_cpu, dims in zip(*kinds, strict=True)
    ]
    candidates = np.flatnonzero(np.array(can_be, bool))
    sizes = _sizes(_chosen(tensors, candidates.tolist()))
    num_rows, row_bytes = np.zeros(len(tensors), np.int64), np.zeros(len(tensors), np.int64)
    num_rows[candidates] = sizes[0]
    row_bytes[candidates] = np.array(sizes[1], np.int64) // np.maximum(sizes[0], 1)
    good = (num_rows > 0) & (row_bytes > 0) & (row_bytes % _UNIT == 0)
    ends = np.cumsum(np.array(lengths, np.int64))
    is_plain = np.array([
        stop > start and bool(good[start:stop].all()) and len({*num_rows[start:stop].tolist()}) == 1
        for start, stop in zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    ], bool)  # fmt: skip
    plain = np.flatnonzero(np.repeat(is_plain, lengths))
    owners = np.repeat(np.arange(len(lengths)), lengths)[plain]
    shapes = [tuple(tensors[at].shape[1:]) for at in plain.tolist()]
    forms: dict[int, list[object]] = {}
    for at, owner, shape in zip(plain.tolist(), owners.tolist(), shapes, strict=True):
        forms.setdefault(owner, []).append((names[at], kinds[0][at], shape))
    numbers: dict[tuple[object, ...], int] = {}
    alike = np.zeros(len(lengths), np.int64)
    for owner, form in forms.items():
        alike[owner] = numbers.setdefault(tuple(form), len(numbers))
    groups = alike[owners] * (max(lengths, default=0) + 1) + plain - (ends - lengths)[owners]
    return HostLayout(
        lists, kinds, candidates, sizes, is_plain, plain, owners, num_rows[plain], row_bytes[plain], shapes,
        alike, np.argsort(groups, kind="stable"), groups,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class JoinedCopies:
    """Copied rows of tables that are alike, end to end.

    Attributes
    ----------
    tables, counts
        Which, and int64: how many rows of each.
    arrays
        By name ``(n, ...)``, contiguous.
    """

    tables: list[str]
    counts: npt.NDArray[np.int64]
    arrays: dict[str, npt.NDArray[Any]]


_Place = tuple[str, torch.dtype, int, tuple[int, ...], int]


@dataclass(slots=True, eq=False)
class HostCopies:
    """The plain ones among the requests of a gather, of any number of tables: copied by `copy`.

    Attributes
    ----------
    row_ids, rest
        Of all tables, as they were asked for, and the tables whose rows are not copied here.
    size_bytes
        Bytes of their copies.
    layout
        To be given to the next `host_copies`.
    end, most
        Bytes of the memory that `copy` is given, and of that for all rows of these tables.
    """

    row_ids: Mapping[str, Any]
    rest: frozenset[str]
    size_bytes: int
    layout: HostLayout
    end: int
    most: int
    _chosen: npt.NDArray[np.int64]
    """Of each copy: where its tensor is among the plain ones of the layout; those of small tables first."""
    _num_small: int
    _parts: npt.NDArray[np.int64]
    _ids: RowIds
    """What the parts have addresses of."""
    _flat: torch.Tensor | None = None
    _typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _arrays: dict[torch.dtype, npt.NDArray[Any]] = field(default_factory=dict)
    _places: dict[str, list[_Place]] = field(default_factory=dict)

    def __contains__(self, table: str) -> bool:
        return table in self.row_ids and table not in self.rest

    def copy(self, requests: Mapping[str, RowRequest], memory: torch.Tensor, workers: Workers) -> None:
        """Copy the rows as they are now into ``memory``, uint8 (end,) of the host. Blocks until it is done.

        Raises
        ------
        BadRowIds
            Ids outside of a table; what is in ``memory`` makes no sense then.
        """
        self._flat = memory
        parts = self._parts.copy()
        parts[:, 4] += memory.data_ptr()
        owners, cuts = np.arange(len(parts)), [0, len(parts)]
        if self.size_bytes > 2 * TASK_BYTES and workers.threads > 1:
            parts, owners, cuts = _cut(parts)
        found = workers.run(partial(gather_parts, parts[a:b]) for a, b in pairwise(cuts))
        outside = [a + at for a, at in zip(cuts, found, strict=False) if at >= 0]
        if outside:
            at = self._chosen[owners[outside[0]]]
            check_range(
                index_of(requests[self.layout.lists.tables[self.layout.owners[at]]].row_ids), self.layout.num_rows[at]
            )

    def tensors_of(self, table: str) -> dict[str, torch.Tensor]:
        """Return the copies of a table by name, as tensors that share the memory they are in; made anew by each call.

        Raises
        ------
        KeyError
            Nothing of this table was copied here.
        """
        return {
            name: self._typed_as(dtype).as_strided((count, *shape), (*shape, 1), start)
            for name, dtype, count, shape, start in self._places_of(table)
        }

    def arrays_of(self, table: str, as_array: Callable[[torch.Tensor], npt.NDArray[Any]]) -> dict[str, Any]:
        """Return `tensors_of` as ``as_array`` would convert them, without a tensor for each: it is asked once a dtype.

        ``as_array`` returns an array that shares the tensor's memory, with as many elements.
        """
        found = {}
        for name, dtype, count, shape, start in self._places_of(table):
            flat = self._array_of(dtype, as_array)
            found[name] = flat[start : start + count * math.prod(shape)].reshape(count, *shape)
        return found

    def joined(self, as_array: Callable[[torch.Tensor], npt.NDArray[Any]]) -> list[JoinedCopies]:
        """Return the copies of small tables, those that are alike together; ``as_array`` as in `arrays_of`."""
        layout, chosen = self.layout, self._chosen[: self._num_small]
        owners, tensors = layout.owners[chosen], layout.plain[chosen].tolist()
        starts = _are_first(layout.groups[chosen]).nonzero()[0]
        found: dict[int, JoinedCopies] = {}
        for first, stop in pairwise([*starts.tolist(), len(chosen)]):
            number, counts = int(layout.alike[owners[first]]), self._parts[first:stop, 1]
            if number not in found:
                tables = [*map(layout.lists.tables.__getitem__, owners[first:stop].tolist())]
                found[number] = JoinedCopies(tables, counts, {})
            dtype, shape, total = layout.kinds[0][tensors[first]], layout.shapes[chosen[first]], int(counts.sum())
            start = int(self._parts[first, 4]) // dtype.itemsize
            flat = self._array_of(dtype, as_array)[start : start + total * math.prod(shape)]
            found[number].arrays[layout.lists.names[tensors[first]]] = flat.reshape(total, *shape)
        return [*found.values()]

    def _array_of(self, dtype: torch.dtype, as_array: Callable[[torch.Tensor], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        if dtype not in self._arrays:
            self._arrays[dtype] = as_array(self._typed_as(dtype))
        return self._arrays[dtype]

    def _typed_as(self, dtype: torch.dtype) -> torch.Tensor:
        """All copies as elements of a dtype; those of others make no sense then."""
        assert self._flat is not None  # copied
        if dtype not in self._typed:
            self._typed[dtype] = self._flat[: self.end // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._typed[dtype]

    def _places_of(self, table: str) -> list[_Place]:
        """Of each copy of a table: name, dtype, rows, shape of a row, and the element that it begins at."""
        if not self._places:
            layout = self.layout
            for at, tensor, owner, count, begin in zip(
                self._chosen.tolist(), layout.plain[self._chosen].tolist(), layout.owners[self._chosen].tolist(),
                self._parts[:, 1].tolist(), self._parts[:, 4].tolist(), strict=True,
            ):  # fmt: skip
                dtype = layout.kinds[0][tensor]
                place = layout.lists.names[tensor], dtype, count, layout.shapes[at], begin // dtype.itemsize
                self._places.setdefault(layout.lists.tables[owner], []).append(place)
        return self._places[table]


def host_copies(
    requests: Mapping[str, RowRequest], *, without: Collection[str] = (), known: HostLayout | None = None,
    is_like: bool = False,
) -> HostCopies:  # fmt: skip
    """Return the plain ones of the requests. Reads no row; what it takes for a table is a few calls of C.

    Parameters
    ----------
    without
        Tables that are not to be copied here.
    known, is_like
        The layout of an earlier call, and whether names and kinds of tensors are known to be as they were in that.
    """
    lists, tensors = tensors_of(requests)
    given = requests.addresses if isinstance(requests, RowRequests) else None
    addresses = np.zeros(len(tensors), np.int64) if given is None else given
    layout = known
    if layout is None or not layout.fits(lists, tensors, addresses, is_like=is_like):
        layout = _layout(lists, tensors)
    tables = lists.tables
    all_ids: Mapping[str, RowIds | torch.Tensor]
    if isinstance(requests, RowRequests):
        all_ids, counts, fits = requests.rows, requests.rows.counts, layout.is_plain.copy()
    else:
        ids = [one.row_ids for one in requests.values()]
        all_ids, counts = dict(zip(tables, ids, strict=True)), np.fromiter(map(len, ids), np.int64, len(ids))
        fits = layout.is_plain & _are_plain(ids)
    if without:
        fits &= np.array([table not in without for table in tables], bool)
    starts = addresses[layout.plain]
    asked = (starts == 0).nonzero()[0]
    others = _chosen(tensors, layout.plain[asked].tolist())
    starts[asked] = np.array([*map(torch.Tensor.data_ptr, others)], np.int64)
    starts[asked] *= np.array([*map(torch.Tensor.is_contiguous, others)], bool)
    sizes = counts[layout.owners] * layout.row_bytes
    # An address of 0: not contiguous, or the storage was freed.
    fits &= np.bincount(layout.owners, (starts == 0) | (starts % _UNIT != 0), len(tables)) == 0
    is_small = np.bincount(layout.owners, sizes, len(tables)) <= SMALL_BYTES
    small, large = (layout.order[one[layout.owners[layout.order]]] for one in (fits & is_small, fits & ~is_small))
    chosen = np.concatenate([small, large])
    owners, rows, row_bytes, sizes = (one[chosen] for one in (layout.owners, layout.num_rows, layout.row_bytes, sizes))
    rest = frozenset(tables[at] for at in np.flatnonzero(~fits).tolist())
    joined, lengths = np.empty(0, np.int64), counts
    if isinstance(all_ids, RowLists):
        joined = all_ids.row_ids
    elif len(rest) < len(tables):
        joined = np.concatenate([own for table, own in all_ids.items() if table not in rest])
        lengths = counts * fits
    ids_at = address_of(joined) + 8 * (np.cumsum(lengths) - lengths)
    begins = _begins(sizes, layout.groups[chosen])
    parts = np.empty((len(chosen), PART_FIELDS), np.int64)
    for column, own in enumerate((ids_at[owners], counts[owners], rows, starts[chosen], begins, row_bytes // _UNIT)):
        parts[:, column] = own
    end = most = 0
    if len(chosen):
        whole = rows * row_bytes
        end, most = int(begins[-1] + sizes[-1]), int(_begins(whole, layout.groups[chosen])[-1] + whole[-1])
    return HostCopies(all_ids, rest, int(sizes.sum()), layout, end, most, chosen, len(small), parts, joined)


def _are_plain(ids: Sequence[RowIds | torch.Tensor]) -> npt.NDArray[np.bool_]:
    """Return by table whether its ids are int64 of one dimension in an array of numpy; told at once where all are."""
    if {*map(type, ids)} == {np.ndarray} and {*map(attrgetter("dtype", "ndim"), ids)} == {(_INT64, 1)}:
        return np.ones(len(ids), bool)
    return np.array([isinstance(one, np.ndarray) and one.dtype == _INT64 and one.ndim == 1 for one in ids], bool)


def _are_first(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of equal numbers are the first ones."""
    found = np.ones(len(groups), bool)
    found[1:] = groups[1:] != groups[:-1]
    return found


def _begins(sizes: npt.NDArray[np.int64], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where each copy begins: right behind the one before it in its group; groups are aligned."""
    if not len(sizes):
        return sizes
    are_first = _are_first(groups)
    first = are_first.nonzero()[0]
    totals = _aligned(np.add.reduceat(sizes, first))
    before = sizes.cumsum() - sizes
    moved = totals.cumsum() - totals - before[first]
    begins: npt.NDArray[np.int64] = before + moved[are_first.cumsum() - 1]
    return begins


def _aligned(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-sizes // _ALIGNMENT) * _ALIGNMENT


PART_FIELDS = 6
"""Numbers of a part of `gather_parts`."""


def _cut(
    parts: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]]:
    """Cut parts into such of at most `TASK_BYTES`; returns them, whose each is, and where tasks of about that begin."""
    row_bytes = parts[:, 5] * _UNIT
    most = np.maximum(TASK_BYTES // row_bytes, 1)
    counts = -(-parts[:, 1] // most)
    owners = np.repeat(np.arange(len(parts)), counts)
    first = (np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)) * most[owners]
    cut = parts[owners]
    cut[:, 0] += 8 * first
    cut[:, 1] = np.minimum(cut[:, 1] - first, most[owners])
    cut[:, 4] += first * row_bytes[owners]
    tasks = (cut[:, 1] * row_bytes[owners]).cumsum() // TASK_BYTES
    return cut, owners, [0, *(np.flatnonzero(np.diff(tasks)) + 1).tolist(), len(cut)]


@njit(nogil=True)
def _gather_parts(parts: Any) -> int:
    for k in range(parts.shape[0]):
        count, end, size = parts[k, 1], np.uint64(parts[k, 2]), parts[k, 5]
        ids = carray(int64s_at(parts[k, 0]), (count,))
        rows = carray(int32s_at(parts[k, 3]), (parts[k, 2], size))
        out = carray(int32s_at(parts[k, 4]), (count, size))
        for i in range(count):
            row = ids[i]
            if np.uint64(row) >= end:  # a negative id is a huge one
                return k
            for j in range(size):
                out[i, j] = rows[row, j]
    return -1


def gather_parts(parts: npt.NDArray[np.int64]) -> int:
    """Copy rows of many tensors: ``index_select`` of each, in one call. Reads and writes by address.

    Parameters
    ----------
    parts
        int64 ``(num_parts, 6)``: address of the ids (int64), how many, rows of the source, its address, that of the
        copy, and the size of a row in units of 4 bytes, to which addresses are aligned. All is contiguous, and the
        caller keeps it alive.

    Returns
    -------
    int
        -1, or the first part with an id outside of its source: what follows that id was not copied.
    """
    return int(_gather_parts(parts))
