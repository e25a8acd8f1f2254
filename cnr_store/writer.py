"""The writing side of a store: a `Writer` is the one committer and holds the mirrors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np

from cnr_store.errors import BadInput, CommitStateUnknown, Conflict, DoesNotApply, SaveInProgress
from cnr_store.mirrors import Mirrors
from cnr_store.records import (
    LogEntry,
    Manifest,
)
from cnr_store.session import Session
from cnr_store.snapshot import Snapshot
from cnr_store.table_codes import Array, array_specs
from cnr_store.transaction import CommitKind, Transaction
from cnr_store.types import MAX_CHAIN

Base = Literal["head", "baseline"]

logger = logging.getLogger(__name__)


class Writer:
    """The one committer of a store: opening it has fenced every earlier one.

    Not thread-safe: one thread at a time. Memory: the code mirrors (`mirror_nbytes`), and chunks in flight.

    """

    def __init__(self, session: Session) -> None:
        self._session = session
        if not session.head.record.chain:
            session.snapshot = Snapshot(session.storage, session.head, session.workers)

    @property
    def head(self) -> LogEntry:
        """The newest log entry this writer knows."""
        return self._session.head

    @property
    def mirrors(self) -> Mirrors:
        """The code mirrors, by table."""
        return self._session.mirrors

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the mirrors. What was not committed is forgotten; a second call is harmless."""
        self.mirrors.clear()
        self._session.snapshot = None
        self._session.open = None

    @property
    def is_synced(self) -> bool:
        """Whether the mirrors are the head's state, so that a delta may be written."""
        return self._session.is_synced

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
        if self._session.snapshot is None:
            raise DoesNotApply(
                "this writer's mirrors are not the head's state; call restore() first, or commit a full",
                version=self.head.record.v,
            )
        return self._session.snapshot

    def restore(self, outputs: Mapping[str, Mapping[str, Array]] | None = None) -> Snapshot:
        """Load the head's state: fill ``outputs`` and the mirrors in one pass; returns the snapshot. Blocks.

        The head is what the log says now, so this also follows a rollback. An open transaction ends.

        Parameters
        ----------
        outputs
            Table to ``{"values": (num_rows, dim) array, slot name: array}``, preallocated, filled in place. Tables that
            are not named only get their mirror.

        Raises
        ------
        TableNotFound, BadShape, BadDtype, BadInput
            Before anything is written.
        Fenced
            Another writer took over.
        CommitStateUnknown
            The last commit is still unknown: call `settle`.
        CorruptStore
            Outputs filled so far hold undefined values.
        """
        self._refuse_unsettled()
        self._session.catch_up()
        snapshot = Snapshot(self._session.storage, self.head, self._session.workers)
        wanted = {
            table: snapshot.table(table).check_outputs(
                {"codes" if name == "values" else f"slots/{name}": array for name, array in arrays.items()}
            )
            for table, arrays in (outputs or {}).items()
        }
        self.mirrors.clear()
        self._session.snapshot = None
        self._session.open = None
        for table, schema in snapshot.tables.items():
            if schema.keys == "hashed":
                continue
            arrays = wanted.get(table, {})
            view = snapshot.table(table)
            if self.mirrors.mode == "none" or not any(s.is_additive for s in array_specs(schema).values()):
                if arrays:
                    view.read_arrays(arrays)
                continue
            codes = view.read_mirror(arrays, self.mirrors.allocator())
            digest = _digest_at(snapshot.manifests[-1], table)
            # Parts that a writer without a mirror wrote name none; this one keeps it from here on.
            self.mirrors.put(table, codes, codes.digest(self._session.workers) if digest is None else digest)
        self._session.snapshot = snapshot
        self._session.is_restored = True
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
        SaveInProgress
            The transaction before has neither been committed nor aborted.
        BadInput
            ``step`` is no integer of 0 or more.
        """
        self._refuse_unsettled()
        step = _checked_step(step)
        if self._session.open is not None:
            raise SaveInProgress("a transaction of this writer is still open; commit or abort it before the next")
        if kind == "full" and self._session.snapshot is None:
            self._session.catch_up()
        chain = self.head.record.chain
        keep = 1 if base == "baseline" else len(chain)
        if kind == "delta" and (not chain or keep + 1 > MAX_CHAIN):
            kind = "full"
        if kind == "delta":
            _ = self.snapshot
        transaction = Transaction(self._session, step, kind, keep if kind == "delta" else 0)
        self._session.open = transaction
        return transaction

    def settle(self) -> LogEntry | None:
        """Learn the outcome of a commit that ended unknown: its entry if it won, None if it lost. Blocks.

        None as well if no commit of this writer is unknown.

        Raises
        ------
        CommitStateUnknown, CorruptStore, StorageFailure
            Still unknown.
        """
        pending = self._session.pending
        if not isinstance(pending, Transaction):
            return None
        # By the record it sent: a tag or another append of this store may have settled it, or be unknown itself.
        entry = self._session.log.resolve(pending.undecided)
        self._session.pending = None
        if entry is None:
            self._session.lost(Conflict("another record took the log position"))
            return None
        pending.version = entry.record.v
        self._session.won(pending, entry)
        return entry

    def _refuse_unsettled(self) -> None:
        pending = self._session.pending
        if isinstance(pending, Transaction):
            raise CommitStateUnknown(
                "the outcome of the last commit is not known yet; call settle() first",
                version=None if pending.undecided is None else pending.undecided.record.v,
            )


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise BadInput(f"a training step is an integer of 0 or more, found {step!r}", found=step)
    return int(step)


def _digest_at(manifest: Manifest, table: str) -> int | None:
    digests = [part.state_digest for part in manifest.parts if part.table == table]
    if any(digest is None for digest in digests):
        return None
    return sum(int(digest or "0", 16) for digest in digests) % (1 << 64)
