"""Reads the changes from a loader's state to another version. Publishes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cnr_store.errors import CorruptStore, TableNotFound
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import DenseEntry, TableSchema
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import some_of
from cnr_store.runtime.threads import Workers
from cnr_store.segment.codes import Array
from cnr_store.serving.loader_options import LoaderOptions
from cnr_store.serving.rows.memory import Memory
from cnr_store.serving.rows.views import View
from cnr_store.serving.update.update_plan import Compare, UpdatePlan
from cnr_store.serving.update.update_tables import ServeAs, TableUpdates, update_tables
from cnr_store.serving.version_queue import VersionState
from cnr_store.store import Store


@dataclass(frozen=True, slots=True)
class BuiltVersion:
    """What `VersionQueue.stage` takes.

    Attributes
    ----------
    dense
        All dense tensors that are served, or None where they are those of the state before.
    """

    state: VersionState
    tables: TableUpdates
    dense: Mapping[str, Array] | None


class StateBuilder:
    """Builds the states of a loader, each from the one before.

    Parameters
    ----------
    tables
        The tables to serve; None is all.
    memory
        Allocates the rows.
    """

    def __init__(
        self,
        store: Store,
        workers: Workers | None,
        tables: Sequence[str] | None,
        options: LoaderOptions,
        memory: Memory,
    ) -> None:
        """Without ``workers`` it reads on those of the store."""
        self._store = store
        self._own_workers = workers
        self._tables = tables
        self._options = options
        self._names = None if options.dense is None else frozenset(options.dense)
        self._memory = memory
        choices = (options.served, options.kept_as, options.shard)
        self._same_for_all = None if any(isinstance(one, Mapping) for one in choices) else self._served_as("")

    def open(self, entry: LogEntry, last: VersionState | None) -> Snapshot:
        """Return the snapshot of a version; opens the segments that ``last`` does not have.

        Raises
        ------
        TableNotFound
            It lacks a table that was asked for. A version before anything was saved lacks none.
        VersionExpired, CorruptStore, StorageFailure
        """
        workers = self._store.internals.workers if self._own_workers is None else self._own_workers
        snapshot = Snapshot(
            self._store.storage, entry, workers, known={} if last is None else last.readers,
            if_missing=partial(self._store.internals.tell_of_expiry, entry.record.v),
        )  # fmt: skip
        missing = [] if snapshot.is_empty else [name for name in self._tables or () if name not in snapshot.tables]
        if missing:
            raise TableNotFound(
                f"version {snapshot.version} has no table {missing[0]!r}; it has "
                f"{some_of(snapshot.tables, missing[0])}",
                table=missing[0], version=snapshot.version,
            )  # fmt: skip
        return snapshot

    def build(
        self, entry: LogEntry, snapshot: Snapshot, plan: UpdatePlan, last: VersionState | None, view: View | None
    ) -> BuiltVersion:
        """Read what makes ``last``, shown by ``view``, the snapshot; everything where they are None. Blocks.

        Raises
        ------
        CorruptStore, MissingObject, StorageFailure, NonFiniteValues, BadInput
            As `update_tables`; what is served is as it was.
        """
        dense, changed_dense = self._read_dense(snapshot, last, view)
        update = partial(
            update_tables, snapshot, tables={} if view is None else view.tables, serve_as=self._serve_as,
            recorded=None if last is None else last.recorded, memory=self._memory,
        )  # fmt: skip
        try:
            tables = update(plan)
        except CorruptStore as error:
            if isinstance(plan, Compare) or type(error) is not CorruptStore:
                raise
            tables = update(Compare())  # the segments continue from another state than the present one
        entries = self._dense_of(snapshot)
        state = VersionState(entry, snapshot.known_readers, entries, tables.recorded, changed_dense=changed_dense)
        return BuiltVersion(state, tables, dense)

    def _serve_as(self, table: str, schema: TableSchema) -> ServeAs | None:
        del schema
        if self._tables is not None and table not in self._tables:
            return None
        return self._same_for_all or self._served_as(table)

    def _served_as(self, table: str) -> ServeAs:
        served, kept_as, shard = self._options.served, self._options.kept_as, self._options.shard
        return ServeAs(
            served.get(table) if isinstance(served, Mapping) else served,
            kept_as.get(table, "auto") if isinstance(kept_as, Mapping) else kept_as,
            shard.get(table) if isinstance(shard, Mapping) else shard,
            is_named=self._tables is not None,
        )

    def _dense_of(self, snapshot: Snapshot) -> dict[str, DenseEntry]:
        return {name: entry for name, entry in snapshot.dense.items() if self._names is None or name in self._names}

    def _read_dense(
        self, snapshot: Snapshot, last: VersionState | None, view: View | None
    ) -> tuple[dict[str, Array] | None, frozenset[str]]:
        """All dense tensors, of which those that changed are read, or None if none did; and which changed."""
        entries = self._dense_of(snapshot)
        before = {} if last is None else last.dense
        changed = frozenset(name for name, entry in entries.items() if not _is_same(entry, before.get(name)))
        if view is not None and not changed and entries.keys() == before.keys():
            return None, changed
        return {n: snapshot.read_dense(n) if n in changed or view is None else view.dense[n] for n in entries}, changed


def _is_same(entry: DenseEntry, before: DenseEntry | None) -> bool:
    return before is not None and (entry.digest, entry.dtype, entry.shape) == (
        before.digest,
        before.dtype,
        before.shape,
    )
