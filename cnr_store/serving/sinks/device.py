"""Tables on a device: rows in the memory of a GPU, changed between lookups, so that a lookup makes no trip to the host.

The law is that of the loader's lookups: all rows of one lookup have one version. A device does what it is given in the
order of each stream, so the order in which lookups and updates are *queued* decides: one lock is held while a lookup or
an update is queued, and events order the streams. Nobody waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from cnr_store.errors import BadInput, BadRowIds, MissingDependency, VersionNotFound
from cnr_store.read.id_maps import map_names, read_id_map
from cnr_store.runtime.arguments import check_not_one, checked_choice
from cnr_store.serving.rows.lookups import checked_ids
from cnr_store.serving.sinks.positions import check_batch, check_positions
from cnr_store.serving.sinks.protocol import SinkState, SinkTable
from cnr_store.serving.sinks.stored_rows import check_rows
from cnr_store.types import Float32s, RowIds

if TYPE_CHECKING:
    import torch

    from cnr_store.read.snapshot import Snapshot
    from cnr_store.store import Store

DeviceDtype = Literal["float32", "float16", "bfloat16"]

_NOT_CHECKED = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Rows of one lookup on a device, all of ``version``: table to (n, dim), in the order of the ids.

    ``missing``: of tables that were looked up by raw id, which ids have no row of their own, bool (n,) on the device.
    """

    version: int
    step: int
    rows: Mapping[str, torch.Tensor]
    missing: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceMap:
    """The map of a table on the device, as `IdMap`; ``content``: the table's rows and the digests of both tensors."""

    content: tuple[object, ...]
    raw_ids: torch.Tensor
    row_ids: torch.Tensor


class DeviceTables:
    """A `RowSink` of float tables on a device, with lookups that return tensors there.

    Lookups may come from any thread and any stream, while the feed updates on a thread and a stream of its own. A
    lookup that is queued after an update waits on the device until the changed rows are scattered: a copy within the
    device's memory, to which they were brought before. On a CPU lookups and updates take turns.

    A deleted row of a dense table has its fill, as at the loader. Rows are cast from the float32 values of their
    version.

    Memory on the device: the tables; during a batch its rows; during a full batch over tables that are served already,
    a second copy of them. On the host: the loader's own copy (`LoaderOptions(kept_as="codes")` halves it). Maps of raw
    ids take 16 bytes per row of their tables, twice while a batch is committed.

    Parameters
    ----------
    device
        ``"cuda"``, ``"cuda:1"``, ``"cpu"`` or another device of torch, also as a `torch.device`.
    dtype
        What rows are held in and returned as.
    name
        For messages and metrics.
    by_raw_id
        Tables of a managed-collision module (TorchRec's ZCH) that can be looked up by raw id, too. Each commit reads
        the map of its version from ``store``, the one that the loader follows, unless it is the map before, and raises
        as `read_id_map` does.
    store
        Stays the caller's.

    Raises
    ------
    BadInput
    MissingDependency
        There is no torch.
    """

    def __init__(
        self,
        device: str | torch.device,
        *,
        dtype: DeviceDtype = "float32",
        name: str = "device",
        by_raw_id: Collection[str] = (),
        store: Store | None = None,
    ) -> None:
        checked_choice("dtype", dtype, get_args(DeviceDtype))
        check_not_one("by_raw_id", by_raw_id)
        if by_raw_id and store is None:
            raise BadInput("maps of raw ids are read from a store: give DeviceTables(by_raw_id=, store=loader.store)")
        if find_spec("torch") is None:
            raise MissingDependency('tables on a device need torch; pip install "cnr-store[train]"', found="torch")
        import torch

        try:
            self.device = torch.empty(0, device=device).device  # with its index
        except (RuntimeError, AssertionError) as error:
            raise BadInput(f"device {str(device)!r} cannot be used: {error}", found=str(device)) from error
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.name = name
        self._queue = _Streams(self.device)
        self._tables: dict[str, torch.Tensor] = {}
        self._store, self._by_raw_id = store, tuple(by_raw_id)
        self._maps: dict[str, _DeviceMap] = {}
        self._shapes: Mapping[str, SinkTable] = {}
        self._batch: _Batch | None = None
        self._state: SinkState | None = None

    @property
    def version(self) -> int | None:
        """The version that lookups see; None before the first."""
        return None if self._state is None else self._state.version

    @property
    def nbytes(self) -> int:
        """Bytes of the tables and of their maps on the device."""
        maps = [tensor for one in list(self._maps.values()) for tensor in (one.raw_ids, one.row_ids)]
        return sum(one.nbytes for one in (*list(self._tables.values()), *maps))

    def lookup(self, table: str, row_ids: Any) -> torch.Tensor:
        """Return rows of a table, (n, dim) on the device; see `lookup_many`."""
        return self.lookup_many({table: row_ids}).rows[table]

    def lookup_many(self, row_ids: Mapping[str, Any], *, by_raw_id: Collection[str] = ()) -> DeviceBatch:
        """Return rows of some tables, all of one version, the newest. Queues work on the current stream of the device.

        Blocks for no device, if the ids are on it.

        Parameters
        ----------
        row_ids
            Table to ids (n,), int64: a tensor on the device, or a tensor or array on the host, which is copied there.
            Ids on the host are checked. Ids on a GPU cannot be, because that would wait for it: an id that the table
            does not have gives a row of NaN.
        by_raw_id
            Tables whose ids are raw ids, of those that were named when this was made. As `Loader.lookup_many` does it:
            the map of the same version finds their rows; ids without one have the row that the module gives them, and
            are ``missing``.

        Raises
        ------
        BadInput
            A table of ``by_raw_id`` was not named when this was made, or one name is given where a list is taken.
        VersionNotFound
            Nothing was pushed yet.
        TableNotFound, BadRowIds
        """
        import torch

        check_not_one("by_raw_id", by_raw_id)
        given = {table: _as_tensor(ids, table) for table, ids in row_ids.items()}
        on_device = {table: ids.to(self.device, torch.int64) for table, ids in given.items()}
        with self._queue.lookup():
            state = self._state
            if state is None:
                raise VersionNotFound(f"{self.name} has no version yet: push its feed first")
            for table, ids in given.items():
                is_seen = ids.device.type == "cpu" and table not in by_raw_id
                check_positions(self.name, self._shapes, table, ids.numpy() if is_seen else _NOT_CHECKED)
            missing = {}
            for table in on_device.keys() & set(by_raw_id):
                own = self._map(table)
                on_device[table], missing[table] = rows_of_raw_ids(own.raw_ids, own.row_ids, on_device[table])
            rows = {table: rows_or_nan(self._tables[table], ids) for table, ids in on_device.items()}
        return DeviceBatch(state.version, state.step, rows, missing)

    # ---- what its feed calls

    def open(self) -> SinkState | None:
        """Return what was committed last; an interrupted batch is dropped. No I/O."""
        self._batch = None
        return self._state

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        """Begin a batch; see `RowSink.begin`.

        Raises
        ------
        Unsupported
            A hashed table.
        BadInput
            A batch of changes, where nothing was committed.
        """
        import torch

        check_batch(self.name, tables, full=full, has_rows=self._state is not None)
        whole = {}
        with self._queue.update():
            for table, shape in tables.items() if full else ():
                whole[table] = torch.zeros((shape.num_rows or 0, shape.dim), dtype=self._dtype, device=self.device)
        self._batch = _Batch(dict(tables), whole)

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        """Bring rows to the device, beside the tables; see `RowSink.put`. Blocks for the copy, and delays no lookup.

        Raises
        ------
        BadShape, BadRowIds, TableNotFound
        """
        import torch

        batch = self._writing()
        check_positions(self.name, batch.tables, table, row_ids)
        check_rows(table, row_ids, values, batch.tables[table].dim)
        with self._queue.update():
            ids = torch.from_numpy(row_ids.copy()).to(self.device)
            rows = torch.from_numpy(np.array(values, np.float32, order="C")).to(self.device).to(self._dtype)
            if table in batch.whole:
                batch.whole[table].index_copy_(0, ids, rows)
            else:
                batch.changes.append((table, ids, rows))

    def delete(self, table: str, row_ids: RowIds) -> None:
        """Make rows zeros; see `RowSink.delete`. A loader deletes no row of a dense table: it puts the fill.

        Raises
        ------
        BadRowIds, TableNotFound
        """
        dim = self._writing().tables[table].dim if table in self._writing().tables else 0
        self.put(table, row_ids, np.zeros((len(row_ids), dim), np.float32))

    def commit(self, state: SinkState) -> None:
        """Queue the change of the tables behind all lookups that were queued; later lookups see it.

        Blocks for maps of raw ids that changed, which are read before, and delays no lookup.
        """
        batch, self._batch = self._writing(), None
        maps = self._read_maps(state.version)
        with self._queue.change():
            self._maps = maps
            if batch.whole:
                self._tables, self._shapes = batch.whole, batch.tables
            for table, ids, rows in batch.changes:
                self._tables[table].index_copy_(0, ids, rows)
            self._state = state

    def abort(self) -> None:
        """Drop the batch."""
        self._batch = None

    def _read_maps(self, version: int) -> dict[str, _DeviceMap]:
        """Return the maps of a version by table; brings those to the device that are not there."""
        if self._store is None or not self._by_raw_id:
            return {}
        snapshot = self._store.snapshot(version)
        dense = snapshot.dense
        maps: dict[str, _DeviceMap] = {}
        for table in self._by_raw_id:
            content = (snapshot.table(table).schema.num_rows, *(dense[name].digest for name in map_names(table, dense)))
            known = self._maps.get(table)
            maps[table] = known if known and known.content == content else self._brought(snapshot, table, content)
        return maps

    def _brought(self, snapshot: Snapshot, table: str, content: tuple[object, ...]) -> _DeviceMap:
        import torch

        found = read_id_map(snapshot, table)
        with self._queue.update():
            raw_ids, row_ids = torch.tensor(found.raw_ids), torch.tensor(found.row_ids)
            return _DeviceMap(content, raw_ids.to(self.device), row_ids.to(self.device))

    def _map(self, table: str) -> _DeviceMap:
        if table not in self._maps:
            raise BadInput(
                f"{self.name} has no map of raw ids for table {table!r}: name it in DeviceTables(by_raw_id=), found "
                f"{list(self._by_raw_id)}",
                found=list(self._by_raw_id),
            )
        return self._maps[table]

    def _writing(self) -> _Batch:
        if self._batch is None:
            raise BadInput(f"{self.name} has no batch to write to: begin() one")
        return self._batch


@dataclass(slots=True)
class _Batch:
    """Rows on the device that are no part of the tables yet: whole tables of a full batch, or changed rows in order."""

    tables: dict[str, SinkTable]
    whole: dict[str, torch.Tensor]
    changes: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class _Streams:
    """Orders what lookups and updates queue on a device; on one without streams, as the CPU, the lock alone does.

    The tables' memory belongs to the update's stream: a table that is replaced is freed there, behind the lookups that
    `change` has waited for.
    """

    def __init__(self, device: torch.device) -> None:
        from cnr_store_gpu.streams import streams_of

        self._device = device
        self._streams = streams_of(device)
        self._lock = threading.Lock()
        self._stream = None if self._streams is None else self._streams.Stream(device)
        self._changed = None if self._streams is None else self._streams.Event()
        self._lookups: dict[torch.Stream, torch.Event] = {}

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """While it is entered, a lookup is queued: behind the last change, and before the next one."""
        with self._lock:
            if self._changed is None:
                yield
                return
            stream = self._streams.current_stream(self._device)
            stream.wait_event(self._changed)
            try:
                yield
            finally:
                self._lookups.setdefault(stream, self._streams.Event()).record(stream)

    @contextmanager
    def change(self) -> Iterator[None]:
        """While it is entered, a change is queued on the update's stream: behind all lookups, before later ones."""
        with self._lock, self.update():
            if self._stream is None or self._changed is None:
                yield
                return
            for event in self._lookups.values():
                self._stream.wait_event(event)
            self._lookups.clear()
            try:
                yield
            finally:
                self._changed.record(self._stream)

    def update(self) -> AbstractContextManager[Any]:
        """While it is entered, work goes to the update's stream; no lookup sees it unless it is within `change`."""
        return nullcontext() if self._stream is None else self._streams.stream(self._stream)


def rows_or_nan(table: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """Return rows of a table, and NaN for ids that it does not have, without a look at the ids from the host."""
    count = table.shape[0]
    if count == 0:
        return table.new_full((len(row_ids), table.shape[1]), float("nan"))
    outside = (row_ids < 0) | (row_ids >= count)
    return table.index_select(0, row_ids.clamp(0, count - 1)).masked_fill_(outside[:, None], float("nan"))


def rows_of_raw_ids(
    known: torch.Tensor, row_ids: torch.Tensor, raw_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `IdMap.find` does, on a device: the row of each raw id, and which ids have none of their own."""
    import torch

    at = torch.searchsorted(known[:-1], raw_ids)
    is_missing = known[at] != raw_ids
    return row_ids[at].masked_fill_(is_missing, len(row_ids) - 1), is_missing


def _as_tensor(row_ids: Any, table: str) -> torch.Tensor:
    """Return ids as an integer tensor (n,): a device's own, of what is on the host a copy."""
    import torch

    if not isinstance(row_ids, torch.Tensor) or row_ids.device.type == "cpu":
        return torch.from_numpy(np.array(checked_ids(row_ids, table)))
    if row_ids.ndim != 1 or row_ids.is_floating_point() or row_ids.is_complex() or row_ids.dtype == torch.bool:
        raise BadRowIds(
            f"row ids of table {table!r} are a one-dimensional tensor of integers, found {row_ids.dtype} of shape "
            f"{tuple(row_ids.shape)}",
            table=table,
        )
    return row_ids
