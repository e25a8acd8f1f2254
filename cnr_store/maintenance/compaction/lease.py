"""The lease of a compaction: it avoids double work, and lets a later one reuse finished tasks.

The lease is advisory, not a lock. Two compactions of one run are safe without it: the second to commit finds that the
run has left the chain. A lost, old or wrong lease only costs work, because finished tasks are verified before reuse.
"""

from __future__ import annotations

import importlib.metadata
import re
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cnr_store.errors import CnrStoreError, StorageFailure
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json, loads
from cnr_store.format.layout import COMPACTION_LEASE, segment_name
from cnr_store.format.limits import MAX_LISTS_BYTES
from cnr_store.format.records import CommitRecord
from cnr_store.log.author import LIBRARY
from cnr_store.log.clock import wall_ms
from cnr_store.log.log_reader import LogReader
from cnr_store.storage import Storage

MAX_RECORDS = 256
"""A compaction is not resumed if the log has more records than this since its base: each of them is read."""

MAX_LEASE_S = 86_400.0
"""Longest time to expiry, in seconds. A lease that claims more was written by a wrong clock and is ignored."""

_WRITERS_OF_BYTES = ("numpy", "zstandard")
_TASK = re.compile("[0-9]{1,9}")


class CompactionLease(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/compact.json``: the run, the segment that it becomes, the holder and the finished tasks.

    ``plan`` is `tasks.plan_digest`; ``done`` maps the number of a task to the sha256 of its receipt.
    """

    txn: str
    segment: str
    base: int
    run: tuple[str, ...]
    plan: str
    libraries: dict[str, str]
    holder: str
    expires_ms: int
    done: dict[str, str] = {}


_DECODER = msgspec.json.Decoder(CompactionLease)


class LeasePlace:
    """Reads and writes the compaction lease of one log: one object that each compaction overwrites."""

    def __init__(self, storage: Storage, log: LogReader, clock_ms: Callable[[], int] = wall_ms) -> None:
        self._storage = storage
        self._key = f"{log.prefix}{COMPACTION_LEASE}"
        self._clock_ms = clock_ms

    def read(self) -> CompactionLease | None:
        """Return the lease; None if it is absent or unreadable. One GET."""
        try:
            data = self._storage.read_document(self._key, MAX_LISTS_BYTES)
            if data is None:
                return None
            lease = loads(data, _DECODER)
            # A resumed compaction reads the records since ``base``, so ``base`` must be the one in the segment's name.
            return lease if lease.segment == segment_name(lease.base, lease.txn) else None
        except (CnrStoreError, msgspec.MsgspecError, UnicodeDecodeError):
            return None  # An unreadable lease only costs repeated work.

    def is_live(self, lease: CompactionLease) -> bool:
        """Return whether the lease has not expired, so its holder may be active."""
        return 0 < self.left_s(lease) <= MAX_LEASE_S

    def left_s(self, lease: CompactionLease) -> float:
        """Return the seconds until the lease expires, unless its holder renews it."""
        return (lease.expires_ms - self._clock_ms()) / 1000

    def put(self, lease: CompactionLease, length_s: float) -> None:
        """Write the lease, to expire in ``length_s`` seconds, at most a day. Ignores storage failures.

        0 ends it for every clock: this machine's may be hours ahead of that of the next holder.
        """
        try:
            expires_ms = self._clock_ms() + int(min(length_s, MAX_LEASE_S) * 1000) if length_s else 0
            self._storage.put(self._key, canonical_json(msgspec.structs.replace(lease, expires_ms=expires_ms)))
        except StorageFailure:
            pass  # Without a lease another compaction may do the same work.


class HeldLease:
    """The lease of a compaction in this process. Making it writes the lease; each method renews it with one PUT."""

    def __init__(self, place: LeasePlace, lease: CompactionLease, length_s: float) -> None:
        self.lease = lease
        self._place = place
        self._length_s = length_s
        place.put(lease, length_s)

    def note_done(self, task: int, receipt: str) -> None:
        """Record a finished task's receipt, and renew."""
        self.lease = msgspec.structs.replace(self.lease, done={**self.lease.done, str(task): receipt})
        self._place.put(self.lease, self._length_s)

    def keep(self) -> None:
        """Renew the lease."""
        self._place.put(self.lease, self._length_s)

    def release(self) -> None:
        """End the lease now; the recorded tasks are kept for a later compaction."""
        self._place.put(self.lease, 0.0)


def new_lease(run: Sequence[str], base: int, plan: str, holder: str) -> CompactionLease:
    """Return the lease of a new compaction: a new transaction, no finished task. Not written yet."""
    txn = uuid.uuid4().hex
    return CompactionLease(
        txn=txn, segment=segment_name(base, txn), base=base, run=tuple(run), plan=plan, libraries=libraries(),
        holder=holder, expires_ms=0,
    )  # fmt: skip


def libraries() -> dict[str, str]:
    """Return the versions of the libraries on which the written bytes depend."""
    return {"cnr-store": LIBRARY, **{name: importlib.metadata.version(name) for name in _WRITERS_OF_BYTES}}


def run_of(lease: CompactionLease, record: CommitRecord) -> tuple[int, int] | None:
    """Return where the lease's run is in a record's chain, half-open; None if it is not there. Pure."""
    names = [entry.seg for entry in record.chain]
    start = names.index(lease.run[0]) if lease.run and lease.run[0] in names else len(names)
    stop = start + len(lease.run)
    return (start, stop) if lease.run and names[start:stop] == list(lease.run) else None


def is_open(lease: CompactionLease, log: LogReader, head: LogEntry) -> bool:
    """Return whether the lease's transaction may still commit after ``head``.

    It may not if a record since its base marks it for deletion or has its segment. One GET per record since its base.

    Raises
    ------
    CorruptStore, StorageFailure
    """
    if not 0 <= head.record.v - lease.base <= MAX_RECORDS:
        return False
    for entry in log.walk(head):
        record = entry.record
        # A record that keeps its lists in a side object may mark the transaction: it counts as marked.
        is_given_up = record.state is not None or lease.txn in record.aborted
        if is_given_up or any(link.seg == lease.segment for link in record.chain):
            return False
        if record.v <= lease.base:
            return True
    return False


def receipts_of(lease: CompactionLease) -> Mapping[int, str]:
    """Return the tasks that the lease records as done, with the sha256 of their receipts. Pure."""
    return {int(task): digest for task, digest in lease.done.items() if _TASK.fullmatch(task)}
