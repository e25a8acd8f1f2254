"""Leases of readers on single versions, and cursors of consumers (spec, annex D). Advisory, not locks.

A holder writes its object, then reads the head. Garbage collection commits the expiry, then reads these objects. So one
sees the other: either the holder learns that the version has expired, or the version's objects are kept. A reader
without write access depends on the grace period before deletions.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable
from types import TracebackType

from cnr_store.errors import (
    BadInput,
    BadName,
    CorruptStore,
    NotFound,
    StorageFailure,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format.commit_record import is_live
from cnr_store.format.documents import canonical_json, decode_document
from cnr_store.format.layout import CURSORS, READER_LEASES, branch_of, check_name, cursor_key, reader_lease_key
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import Cursor, ReaderLease
from cnr_store.log.clock import wall_ms
from cnr_store.log.expiry import version_expired
from cnr_store.log.log_reader import LogReader
from cnr_store.log.retention import Holds
from cnr_store.runtime.arguments import checked_number
from cnr_store.storage import Storage

CLOCK_TOLERANCE_MS = 300_000
"""Allowed difference between the clocks of holders and of maintenance: a lease counts this long after its end."""

HOLD_KEPT_MS = 86_400_000
"""How long after its end the object of a lease or cursor is deleted."""

_ATTEMPTS = 5


class Lease:
    """A lease keeps one version readable until it is released or expires; renew it before that.

    Created by `Store.lease`. A context manager that releases at its end. Not thread-safe.

    Attributes
    ----------
    version
        The leased version.
    expires_ms
        When the lease expires (ms since 1970, this machine's clock).
    """

    def __init__(
        self, storage: Storage, log: LogReader, version: int, ttl_s: float, holder: str, clock_ms: Callable[[], int]
    ) -> None:
        _check_ttl(ttl_s)
        self.version = version
        self.expires_ms = 0
        self._storage, self._log, self._holder, self._clock_ms = storage, log, holder, clock_ms
        self._ttl_s = ttl_s
        self._key = reader_lease_key(uuid.uuid4().hex)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If this fails the lease expires later; its error must not replace one of the body.
        with contextlib.suppress(StorageFailure):
            self.release()

    def renew(self, ttl_s: float | None = None) -> None:
        """Extend the lease to ``ttl_s`` seconds from now (None: the initial length). Blocks; one PUT.

        Raises
        ------
        VersionExpired
            The lease had expired, and so has the version since.
        AccessDenied, StorageFailure
        """
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        _check_ttl(ttl_s)
        expires_ms = self._clock_ms() + int(ttl_s * 1000)
        document = ReaderLease(
            version=self.version, branch=branch_of(self._log.prefix), expires_ms=expires_ms, holder=self._holder
        )
        self._storage.put_document(self._key, canonical_json(document), MAX_SMALL_BYTES)
        had_ended = self._clock_ms() >= self.expires_ms  # after the put, which may have taken long
        self.expires_ms = expires_ms
        if had_ended:
            self._check_live()

    def release(self) -> None:
        """Release the lease. Idempotent; `renew` acquires it again. One DELETE.

        Raises
        ------
        AccessDenied, StorageFailure
        """
        self.expires_ms = 0
        self._storage.delete([self._key])

    def _check_live(self) -> None:
        """Raise if the version is not live. Call after the put: garbage collection uses the opposite order."""
        try:
            _check_version(self._log, self.version)
        except BaseException:
            with contextlib.suppress(StorageFailure):
                self.release()
            raise


def take_lease(
    storage: Storage,
    log: LogReader,
    version: int | None,
    *,
    ttl_s: float,
    holder: str,
    clock_ms: Callable[[], int] = wall_ms,
) -> Lease:
    """Lease a version, the head if None, for ``ttl_s`` seconds. Blocks; one PUT and a few GETs.

    Raises
    ------
    VersionNotFound, VersionExpired, BadInput, AccessDenied, StorageFailure, CorruptStore
    """
    for _ in range(_ATTEMPTS - 1):
        chosen = log.latest().record.v if version is None else version
        lease = Lease(storage, log, chosen, ttl_s, holder, clock_ms)
        try:
            lease.renew()
        except VersionExpired:
            if version is not None:
                raise
            continue  # Between two requests a newer head was committed, and the old one expired.
        return lease
    lease = Lease(storage, log, log.latest().record.v, ttl_s, holder, clock_ms)
    lease.renew()
    return lease


def put_cursor(
    storage: Storage, log: LogReader, name: str, version: int, *, ttl_s: float | None, holder: str
) -> Cursor:
    """Create or move a consumer's cursor: it keeps ``version`` and all later ones. Blocks.

    Raises
    ------
    BadName, BadInput
        The name or ``ttl_s`` is invalid, or another log of the store has a cursor of this name.
    VersionExpired
        The version has expired; an existing cursor is not changed.
    VersionNotFound, AccessDenied, StorageFailure, CorruptStore
    """
    check_name(name)
    if ttl_s is not None:
        _check_ttl(ttl_s)
    key, now_ms, branch = cursor_key(name), wall_ms(), branch_of(log.prefix)
    before = storage.read_document(key, MAX_SMALL_BYTES)
    if before is not None and (other := _decode_cursor(before, key)).branch != branch:
        raise BadInput(f"cursor {name!r} is used on another branch ({other.branch or 'none'}); choose another name")
    expires_ms = None if ttl_s is None else now_ms + int(ttl_s * 1000)
    cursor = Cursor(
        name=name, version=version, branch=branch, moved_ms=now_ms, expires_ms=expires_ms, holder=holder
    )  # fmt: skip
    storage.put_document(key, canonical_json(cursor), MAX_SMALL_BYTES)
    storage.sync_folders([key])
    try:
        _check_version(log, version)
    except BaseException:
        with contextlib.suppress(StorageFailure):
            if before is None:
                storage.delete([key])
            else:
                storage.put(key, before)
        raise
    return cursor


def drop_cursor(storage: Storage, name: str) -> None:
    """Delete a cursor.

    Raises
    ------
    NotFound
        No cursor has this name.
    BadName, AccessDenied, StorageFailure
    """
    key = cursor_key(name)
    if storage.read(key, stop=1) is None:
        raise NotFound(f"no cursor {name!r}; the cursors are {sorted(read_cursors(storage))}", found=name)
    storage.delete([key])


def read_leases(storage: Storage) -> dict[str, ReaderLease]:
    """Return every reader lease by key, including ended ones. One listing, and one GET each.

    Raises
    ------
    CorruptStore
        A lease cannot be read: its version is unknown, so nothing may be deleted before the lease is.
    AccessDenied, StorageFailure
    """
    found = _read_all(storage, READER_LEASES)
    return {key: decode_document(data, ReaderLease, key) for key, data in found.items()}


def read_cursors(storage: Storage) -> dict[str, Cursor]:
    """Return every cursor by name, including ended ones; requests and errors as `read_leases`."""
    cursors = (_decode_cursor(data, key) for key, data in _read_all(storage, CURSORS).items())
    return {cursor.name: cursor for cursor in cursors}


def delete_ended_holds(storage: Storage, now_ms: int) -> None:
    """Delete leases and cursors that ended more than `HOLD_KEPT_MS` ago. Two listings, and one GET each.

    Raises
    ------
    CorruptStore, AccessDenied, StorageFailure
    """

    def is_long_over(hold: ReaderLease | Cursor) -> bool:
        return hold.expires_ms is not None and hold.expires_ms + HOLD_KEPT_MS < now_ms

    ended = [key for key, lease in read_leases(storage).items() if is_long_over(lease)]
    ended += [cursor_key(name) for name, cursor in read_cursors(storage).items() if is_long_over(cursor)]
    storage.delete(ended)


def is_held(expires_ms: int | None, now_ms: int) -> bool:
    """Return whether a lease or cursor is in force, `CLOCK_TOLERANCE_MS` beyond its end included. Pure."""
    return expires_ms is None or now_ms < expires_ms + CLOCK_TOLERANCE_MS


def read_held(storage: Storage, now_ms: int) -> tuple[list[ReaderLease], list[Cursor]]:
    """Return the leases and the cursors that are in force, of all logs; requests and errors as `read_leases`."""
    leases = [lease for lease in read_leases(storage).values() if is_held(lease.expires_ms, now_ms)]
    cursors = [cursor for cursor in read_cursors(storage).values() if is_held(cursor.expires_ms, now_ms)]
    return leases, cursors


def holds_on(branch: str, leases: Iterable[ReaderLease], cursors: Iterable[Cursor]) -> Holds:
    """Return those of one log, by the uuid of its branch ("" for the store's own), as `plan_retention` takes them."""
    return Holds(
        {lease.version: f"leased by {lease.holder}" for lease in leases if lease.branch == branch},
        {cursor.name: cursor.version for cursor in cursors if cursor.branch == branch},
    )


def _read_all(storage: Storage, folder: str) -> dict[str, bytes]:
    found = {}
    for stat in storage.list_objects(folder):
        data = storage.read_document(stat.key, MAX_SMALL_BYTES)
        if data is not None:
            found[stat.key] = data
    return found


def _decode_cursor(data: bytes, key: str) -> Cursor:
    """Decode the cursor at ``key`` and check its name: a copy under another key would replace a cursor."""
    cursor = decode_document(data, Cursor, key)
    try:
        expected = cursor_key(cursor.name)
    except BadName:
        expected = None
    if expected != key:
        raise CorruptStore(
            f"{key} has the name of cursor {cursor.name[:80]!r}; it is a copy, delete it", path=key, expected=expected
        )
    return cursor


def _check_version(log: LogReader, version: int) -> None:
    head = log.latest().record
    if not 0 <= version <= head.v:
        raise VersionNotFound(f"no version {version}; the newest is {head.v}", version=version)
    if not is_live(head, version):
        raise version_expired(version, head)


def _check_ttl(ttl_s: float) -> None:
    checked_number("ttl_s", ttl_s, above=0, most=1e9)
