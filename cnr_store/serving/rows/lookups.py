"""Looks rows up in the newest view, without locks and without mixing two versions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadDtype, BadInput, BadRowIds, BadShape, CnrStoreError, TableNotFound
from cnr_store.format.records import TableSchema
from cnr_store.read.id_maps import checked_map, map_names
from cnr_store.runtime.arguments import check_not_one, some_of
from cnr_store.segment.codes import Array
from cnr_store.serving.rows.board import Board
from cnr_store.serving.rows.joined_lookups import LEAST_TABLES, JoinedLookups
from cnr_store.serving.rows.served_table import RowKind
from cnr_store.serving.rows.views import View
from cnr_store.types import RowIds

if TYPE_CHECKING:
    import torch

FAILURES_BEFORE_DEFERRAL = 3
"""Number of failed attempts after which a lookup asks the publisher to defer merging."""

_LARGEST_ID = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class LookupBatch:
    """The rows of one lookup, all of one version.

    Attributes
    ----------
    rows
        Table to (n, width) as it is served; absent rows are the fill.
    dense
        The dense tensors that were asked for; not to be written.
    missing
        Table to bool (n,) where ids are absent; None where all are there. Tables whose values are found by position
        have a row for every id. Of raw ids those without a row of their own: they have the row that all such ids share.
    """

    version: int
    step: int
    epoch: int
    rows: Mapping[str, Array]
    dense: Mapping[str, Array]
    missing: Mapping[str, npt.NDArray[np.bool_] | None]


class ViewSource(Protocol):
    """Where the newest view is to be had."""

    def newest_view(self) -> tuple[View, Board]:
        """Return the newest view, and the board that shows whether it was whole."""


class Lookups:
    """Lookups in the newest view of a source: a `Publisher`, or an `AttachedTables`' of another process.

    Any number of threads may look up at once, without locks.

    Attributes
    ----------
    count, retries
        Number of lookups, and of those that began again because their view was merged meanwhile.
    """

    def __init__(self, source: ViewSource) -> None:
        self._source = source
        self._joined: JoinedLookups | None = None
        self.count = 0
        self.retries = 0

    def lookup(
        self,
        ids: Mapping[str, npt.ArrayLike],
        dense: Sequence[str] = (),
        out: Mapping[str, Array] | None = None,
        by_raw_id: Collection[str] = (),
    ) -> LookupBatch:
        """Return rows of some tables and dense tensors, all of one version, the newest.

        Parameters
        ----------
        ids
            Table to row ids (n,), any integers, any order, repeats allowed.
        dense
            Names of dense tensors.
        out
            Table to an array for its rows, C-contiguous; a table that is not named gets a new one.
        by_raw_id
            Tables whose ids are raw ids; the map of the same version finds their rows (`cnr_store.read.id_maps`).

        Raises
        ------
        TableNotFound, BadRowIds, BadShape, BadDtype, NonFiniteValues, VersionNotFound
        """
        self.count += 1
        failures = 0
        while True:
            started = time.monotonic()
            view, board = self._source.newest_view()
            try:
                together = {} if out is not None or by_raw_id else self._together(view, ids)
                batch = lookup_in(view, ids, dense, out, by_raw_id, together)
            except CnrStoreError:
                # Rows that are being merged can look like anything; an error counts if the view was whole.
                if board.is_whole(view.epoch):
                    raise
                batch = None
            self._gathered(view)
            if batch is not None and board.is_whole(view.epoch):
                return batch
            self.retries += 1
            failures += 1
            if failures >= FAILURES_BEFORE_DEFERRAL:
                board.defer_merges(4 * (time.monotonic() - started) + 0.01)

    def _together(self, view: View, ids: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Return the rows of those tables that can be read together."""
        if len(ids) < LEAST_TABLES:
            return {}
        names, joined = [*ids], self._joined
        if joined is None or not joined.are_of(view, names):
            joined = self._joined = JoinedLookups(view, names)
        return joined.read(ids)

    def _gathered(self, view: View) -> None:
        """Between the copy of the rows and the look at the board; tests merge here."""


class TableLookups(ABC):
    """The lookups of an object that serves tables: a `Loader`, or an `AttachedTables`. Subclasses set ``_lookups``."""

    _lookups: Lookups

    @property
    def version(self) -> int:
        """The version that a lookup would read now."""
        return self._view().version

    @property
    def step(self) -> int:
        """The training step of that version."""
        return self._view().step

    @property
    def tables(self) -> dict[str, TableSchema]:
        """Table name to schema, of that version."""
        return {name: table.schema for name, table in self._view().tables.items()}

    @abstractmethod
    def _view(self) -> View:
        """Return the view that a lookup would read now."""

    def lookup(self, table: str, row_ids: npt.ArrayLike, out: Array | torch.Tensor | None = None) -> Any:
        """Return rows of a table: (n, dim), in the order of the ids, in the served dtype; absent rows are the fill.

        Parameters
        ----------
        row_ids
            int64 (n,), repeats allowed; anything that numpy takes for that.
        out
            (n, dim) of the served dtype, an array or a CPU tensor, filled and returned; without, a new array.

        Raises
        ------
        TableNotFound, BadRowIds, BadShape, BadDtype
        VersionNotFound
            It is closed.
        """
        rows = self._lookups.lookup({table: row_ids}, (), None if out is None else {table: as_array(out)}).rows[table]
        return rows if out is None else out

    def lookup_many(
        self,
        row_ids: Mapping[str, npt.ArrayLike],
        dense: Sequence[str] = (),
        out: Mapping[str, Array] | None = None,
        *,
        by_raw_id: Collection[str] = (),
    ) -> LookupBatch:
        """Return rows of several tables, and dense tensors, all of one version: the newest.

        ``by_raw_id``: tables whose ids are raw ids of a managed-collision module (TorchRec's ZCH). Its map of the same
        version finds their rows; ids without one have the row that the module gives them, and are ``missing``.

        Raises
        ------
        BadInput, TableNotFound, BadRowIds, BadShape, BadDtype
        DoesNotApply
            The map of a table is of another number of rows.
        VersionNotFound
            It is closed.
        """
        check_not_one("dense", dense)
        check_not_one("by_raw_id", by_raw_id)
        arrays = None if out is None else {table: as_array(one) for table, one in out.items()}
        if arrays is not None and not arrays.keys() <= row_ids.keys():
            raise BadInput(f"out has {sorted(arrays.keys() - row_ids.keys())}, but there are no row ids of it")
        return self._lookups.lookup(row_ids, dense, arrays, by_raw_id)


def as_array(out: Any) -> Array:
    """Return the memory that a caller gives for rows, an array or a CPU tensor, as numpy carries it.

    Raises
    ------
    BadInput
        It is something else, or on another device.
    """
    if isinstance(out, np.ndarray):
        return out
    if not hasattr(out, "device"):
        raise BadInput(f"out takes a numpy array or a CPU tensor, found {type(out).__name__}", found=str(type(out)))
    from cnr_store.serving.rows.tensors import array_of

    return array_of(out)


def lookup_in(
    view: View,
    ids: Mapping[str, npt.ArrayLike],
    dense: Sequence[str] = (),
    out: Mapping[str, Array] | None = None,
    by_raw_id: Collection[str] = (),
    together: Mapping[str, Array] = MappingProxyType({}),
) -> LookupBatch:
    """Return rows of one given view as `Lookups.lookup` does, unchecked: a candidate's, on the publisher's thread.

    ``together``: what `JoinedLookups.read` returned for these ids.
    """
    rows: dict[str, Any] = {**dict.fromkeys(ids), **together}
    missing: dict[str, npt.NDArray[np.bool_] | None] = dict.fromkeys(ids)
    for name in [name for name in ids if name not in together] if len(together) < len(ids) else ():
        wanted = ids[name]
        table = view.table(name)
        kind = table.base.kind
        keys = checked_ids(wanted, name)
        is_known = None
        if name in by_raw_id:
            names = map_names(name, view.dense)
            keys, is_known = checked_map(name, table.schema.num_rows, names, view.dense).find(keys)
        into = checked_out(None if out is None else out.get(name), len(keys), kind, name)
        can_miss = table.base.index is not None or kind.kept_as == "codes"
        flags = np.empty(len(keys), np.bool_) if can_miss else None
        absent = table.read(keys, into, flags)
        rows[name] = into
        gone = flags if absent else None
        if is_known is not None and not is_known.all():
            gone = ~is_known if gone is None else gone | ~is_known
        missing[name] = gone
    return LookupBatch(
        view.version, view.step, view.epoch, rows, {name: _tensor(view, name) for name in dense}, missing
    )


def _tensor(view: View, name: str) -> Array:
    if name not in view.dense:
        raise TableNotFound(
            f"version {view.version} has no dense tensor {name!r}; it has {some_of(view.dense, name)}",
            table=name, version=view.version,
        )  # fmt: skip
    return view.dense[name]


def checked_ids(ids: npt.ArrayLike, table: str) -> RowIds:
    """Return row ids as int64 (n,), C-contiguous; the array itself where it is that already.

    Raises
    ------
    BadRowIds
        They are no integers, beyond int64, or not one-dimensional.
    """
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of several lengths; a tensor on a device
        raise BadRowIds(f"row ids of table {table!r} are a one-dimensional array: {error}", table=table) from error
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise BadRowIds(
            f"row ids of table {table!r} are a one-dimensional array of integers, "
            f"found {array.dtype} with shape {array.shape}",
            table=table, expected="int64 (n,)", found=f"{array.dtype} {array.shape}",
        )  # fmt: skip
    if array.dtype == np.uint64 and array.size and array.max() > _LARGEST_ID:
        raise BadRowIds(
            f"row ids of table {table!r} are int64, found {int(array.max())}: hash keys to 63 bits, or view as int64",
            table=table, expected="int64", found=int(array.max()),
        )  # fmt: skip
    return np.ascontiguousarray(array, np.int64)


def checked_out(out: Array | None, count: int, kind: RowKind, table: str) -> Array:
    """Return ``out`` if a lookup of ``count`` rows can be written to it, or a new array.

    Raises
    ------
    BadShape, BadDtype
    """
    shape = (count, kind.served_width)
    if out is None:
        return np.empty(shape, kind.served_dtype)
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise BadShape(
            f"rows of table {table!r} need a writable C-contiguous array of shape {shape}, found {out.shape}",
            table=table, expected=shape, found=out.shape,
        )  # fmt: skip
    if out.dtype != kind.served_dtype:
        raise BadDtype(
            f"rows of table {table!r} are served as {kind.served} in {kind.served_dtype}, found {out.dtype}",
            table=table, expected=str(kind.served_dtype), found=str(out.dtype),
        )  # fmt: skip
    return out
