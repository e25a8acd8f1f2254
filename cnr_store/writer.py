"""The writing side of a store: a `Writer` is the one committer and holds the mirrors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from cnr_store.errors import BadInput, CommitStateUnknown, Conflict, DoesNotApply
from cnr_store.log import CommitLog
from cnr_store.mirrors import MirrorMode, Mirrors
from cnr_store.records import (
    LogEntry,
    Manifest,
    WriterInfo,
)
from cnr_store.snapshot import Snapshot
from cnr_store.storage import Storage
from cnr_store.table_codes import Array, array_specs
from cnr_store.transaction import CommitKind, Transaction
from cnr_store.types import MAX_CHAIN, Profile
from cnr_store.workers import Throttle, Workers

Base = Literal["head", "baseline"]

logger = logging.getLogger(__name__)


class Writer:
    """The one committer of a store: opening it has fenced every earlier one.

    Not thread-safe: one thread at a time. Memory: the code mirrors (`mirror_nbytes`), and chunks in flight.

    Attributes
    ----------
    head
        The newest log entry this writer knows.
    """

    def __init__(
        self,
        storage: Storage,
        log: CommitLog,
        head: LogEntry,
        *,
        profile: Profile,
        info: WriterInfo,
        workers: Workers,
        mirror: MirrorMode,
        mirror_folder: str | None,
        throttle: Throttle,
    ) -> None:
        self.head = head
        self.profile = profile
        self.info = info
        self.mirrors = Mirrors(mirror, mirror_folder)
        self._storage = storage
        self._log = log
        self._workers = workers
        self._throttle = throttle
        self._snapshot: Snapshot | None = None
        self._pending: Transaction | None = None
        self._open: Transaction | None = None
        if not head.record.chain:
            self._snapshot = Snapshot(storage, head, workers)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the mirrors. What was not committed is forgotten; a second call is harmless."""
        self.mirrors.clear()
        self._snapshot = None
        self._open = None

    @property
    def is_synced(self) -> bool:
        """Whether the mirrors are the head's state, so that a delta may be written."""
        return self._snapshot is not None and self._pending is None

    @property
    def mirror_nbytes(self) -> int:
        """Bytes the mirrors take now."""
        return self.mirrors.nbytes

    @property
    def snapshot(self) -> Snapshot:
        """The state the mirrors stand for.

        Raises
        ------
        DoesNotApply
            Before `restore`, or after the store moved on without this writer.
        """
        if self._snapshot is None:
            raise DoesNotApply(
                "this writer's mirrors are not the head's state; call restore() first, or commit a full",
                version=self.head.record.v,
            )
        return self._snapshot

    def restore(self, outputs: Mapping[str, Mapping[str, Array]] | None = None) -> Snapshot:
        """Load the head's state: fill ``outputs`` and the mirrors in one pass; returns the snapshot. Blocks.

        Parameters
        ----------
        outputs
            Table to ``{"values": (num_rows, dim) array, slot name: array}``, preallocated, filled in place. Tables that
            are not named only get their mirror.

        Raises
        ------
        TableNotFound, BadShape, BadDtype
            Before anything is written.
        CorruptStore
            Outputs filled so far hold undefined values.
        """
        snapshot = Snapshot(self._storage, self.head, self._workers)
        wanted = outputs or {}
        for table in wanted:
            snapshot.table(table)
        self.mirrors.clear()
        self._snapshot = None
        for table, schema in snapshot.tables.items():
            arrays = {
                "codes" if name == "values" else f"slots/{name}": array for name, array in wanted.get(table, {}).items()
            }
            if schema.keys == "hashed":
                if arrays:
                    raise BadInput(
                        f"table {table!r} has hashed keys; read it with Snapshot.table().read_all()", table=table
                    )
                continue
            view = snapshot.table(table)
            if self.mirrors.mode == "none" or not any(s.is_additive for s in array_specs(schema).values()):
                if arrays:
                    view.read_arrays(arrays)
                continue
            codes = view.read_mirror(arrays, self.mirrors.allocator(table))
            self.mirrors.put(table, codes, _digest_at(snapshot.manifests[-1], table))
        self._snapshot = snapshot
        return snapshot

    def begin(self, step: int, kind: CommitKind = "delta", *, base: Base = "head") -> Transaction:
        """Start a transaction for training step ``step``.

        A ``delta`` on an empty store, or on a chain at its cap, becomes a ``full``: look at `Transaction.kind`.
        ``base="baseline"`` makes a one-shot delta: it replaces the deltas since the baseline, so it must be given every
        row changed since then.

        Raises
        ------
        CommitStateUnknown
            An earlier commit is still unknown: call `settle`.
        DoesNotApply
            A delta without having restored the head.
        """
        if self._pending is not None:
            raise CommitStateUnknown(
                "the outcome of the last commit is not known yet; call settle() before the next save",
                version=self._log.unresolved,
            )
        chain = self.head.record.chain
        keep = 1 if base == "baseline" else len(chain)
        if kind == "delta" and (not chain or keep + 1 > MAX_CHAIN):
            kind = "full"
        if kind == "delta":
            _ = self.snapshot
        self._open = Transaction(self, step, kind, keep if kind == "delta" else 0)
        return self._open

    def settle(self) -> LogEntry | None:
        """Learn the outcome of a commit that ended unknown: its entry if it won, None if it lost. Blocks.

        Raises
        ------
        CommitStateUnknown
            Still unknown.
        """
        if self._pending is None:
            return None
        entry = self._log.resolve()
        pending, self._pending = self._pending, None
        if entry is None:
            self._lost(Conflict("another record took the log position"))
            return None
        self._won(pending, entry)
        return entry

    def _won(self, transaction: Transaction, entry: LogEntry) -> None:
        self.head = entry
        self._open = None
        known = {reader.name: reader for reader in (self._snapshot.readers if self._snapshot else ())}
        known |= transaction.written_reader()
        self._snapshot = Snapshot(self._storage, entry, self._workers, known=known)
        transaction.move_mirrors(self.mirrors)

    def _lost(self, error: BaseException) -> None:
        """A conflict means that the head moved: the mirrors stay, but they are nobody's state until a restore."""
        self._open = None
        if isinstance(error, Conflict):
            self._snapshot = None


def _digest_at(manifest: Manifest, table: str) -> int | None:
    digests = [part.state_digest for part in manifest.parts if part.table == table]
    if any(digest is None for digest in digests):
        return None
    return sum(int(digest or "0", 16) for digest in digests) % (1 << 64)
