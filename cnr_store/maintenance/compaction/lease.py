"""The note of a compaction in progress: it saves double work, and what a killed one had done is taken up again.

Advisory, never a lock: two compactions of one run are safe without it, the second one to commit finds the run gone. A
note that is lost, old or wrong costs work and nothing else, because nothing is reused that was not verified.
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
"""A compaction is not taken up behind more records than this: each of them is read."""

MAX_LEASE_S = 86_400.0
"""A note that claims to hold for longer is of a wrong clock, or of nobody: it must not keep all others away."""

_WRITERS_OF_BYTES = ("numpy", "zstandard")
_TASK = re.compile("[0-9]{1,9}")


class CompactionLease(msgspec.Struct, frozen=True, kw_only=True):
    """``leases/compact.json``: which run is compacted into which segment, by whom, and what is done of it.

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
    """Where the note of one log lies: one object, overwritten by whoever works."""

    def __init__(self, storage: Storage, log: LogReader, clock_ms: Callable[[], int] = wall_ms) -> None:
        self._storage = storage
        self._key = f"{log.prefix}{COMPACTION_LEASE}"
        self._clock_ms = clock_ms

    def read(self) -> CompactionLease | None:
        """Return the note; None if there is none that can be read."""
        try:
            data = self._storage.read_document(self._key, MAX_LISTS_BYTES)
            if data is None:
                return None
            lease = loads(data, _DECODER)
            # By its whole name: whoever goes on reads the records since ``base``, so that must be the segment's own.
            return lease if lease.segment == segment_name(lease.base, lease.txn) else None
        except (CnrStoreError, msgspec.MsgspecError, UnicodeDecodeError):
            return None  # what a note that cannot be read would have saved is done again

    def is_live(self, lease: CompactionLease) -> bool:
        """Whether its holder is believed to be at work."""
        return 0 < lease.expires_ms - self._clock_ms() <= MAX_LEASE_S * 1000

    def hold(self, lease: CompactionLease, length_s: float) -> HeldLease:
        """Put the note, as the note of this call."""
        return HeldLease(self, lease, length_s)

    def put(self, lease: CompactionLease, length_s: float) -> None:
        """Put the note with ``length_s`` to go, a day at most. The work goes on without it if it cannot be put."""
        try:
            expires_ms = self._clock_ms() + int(min(length_s, MAX_LEASE_S) * 1000)
            self._storage.put(self._key, canonical_json(msgspec.structs.replace(lease, expires_ms=expires_ms)))
        except StorageFailure:
            pass  # others may then do the same work, and one of them for nothing


class HeldLease:
    """The note of the compaction that is at work here; each change of it is a sign of life, and one PUT."""

    def __init__(self, place: LeasePlace, lease: CompactionLease, length_s: float) -> None:
        self.lease = lease
        self._place = place
        self._length_s = length_s
        place.put(lease, length_s)

    def note_done(self, task: int, receipt: str) -> None:
        """Note the receipt of a task."""
        self.lease = msgspec.structs.replace(self.lease, done={**self.lease.done, str(task): receipt})
        self._place.put(self.lease, self._length_s)

    def keep(self) -> None:
        """Give a sign of life."""
        self._place.put(self.lease, self._length_s)

    def release(self) -> None:
        """Say that nobody is at work any more; what was noted stays for whoever goes on."""
        self._place.put(self.lease, 0.0)


def new_lease(run: Sequence[str], base: int, plan: str, holder: str) -> CompactionLease:
    """Return the note of a compaction that begins: a transaction of its own, nothing done."""
    txn = uuid.uuid4().hex
    return CompactionLease(
        txn=txn, segment=segment_name(base, txn), base=base, run=tuple(run), plan=plan, libraries=libraries(),
        holder=holder, expires_ms=0,
    )  # fmt: skip


def libraries() -> dict[str, str]:
    """Return the versions of what decides about the bytes that are written."""
    return {"cnr-store": LIBRARY, **{name: importlib.metadata.version(name) for name in _WRITERS_OF_BYTES}}


def run_of(lease: CompactionLease, record: CommitRecord) -> tuple[int, int] | None:
    """Return where the lease's run is in a record's chain, half-open; None if it is not there. Pure."""
    names = [entry.seg for entry in record.chain]
    start = names.index(lease.run[0]) if lease.run and lease.run[0] in names else len(names)
    stop = start + len(lease.run)
    return (start, stop) if lease.run and names[start:stop] == list(lease.run) else None


def is_open(lease: CompactionLease, log: LogReader, head: LogEntry) -> bool:
    """Whether the lease's transaction may still commit behind ``head``: no record since its base says otherwise.

    One GET per record since then.

    Raises
    ------
    CorruptStore, StorageFailure
    """
    if not 0 <= head.record.v - lease.base <= MAX_RECORDS:
        return False
    for entry in log.walk(head):
        record = entry.record
        # What lists that were collected gave up is not known.
        is_given_up = record.state is not None or lease.txn in record.aborted
        if is_given_up or any(link.seg == lease.segment for link in record.chain):
            return False
        if record.v <= lease.base:
            return True
    return False


def receipts_of(lease: CompactionLease) -> Mapping[int, str]:
    """Return the tasks that the note calls done, and the sha256 of their receipts. Pure."""
    return {int(task): digest for task, digest in lease.done.items() if _TASK.fullmatch(task)}
