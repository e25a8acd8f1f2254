"""What readers hold: leases on single versions, cursors of consumers (spec, annex D). Advisory, never a lock.

A holder writes its object first and reads the head afterwards; garbage collection commits the expiry first and reads
these objects afterwards. So one of the two sees the other: either the holder learns that the version has expired, or
nothing of it is deleted. A reader that may not write here relies on the grace before deletions.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
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
from cnr_store.log.log_reader import LogReader
from cnr_store.runtime.arguments import checked_number
from cnr_store.storage import Storage

CLOCK_TOLERANCE_MS = 300_000
"""How far the clocks of holders and of maintenance may differ: a lease counts for so long behind its end."""

HOLD_KEPT_MS = 86_400_000
"""A hold that ended is deleted only so much later."""

_ATTEMPTS = 5


class Lease:
    """A hold on one version, until it is released or its time is over; renew it before that.

    Made by `Store.lease`. A context manager that releases at its end. Not safe for several threads.

    Attributes
    ----------
    version
        The version that stays readable.
    expires_ms
        When the hold ends by itself (ms since 1970, this machine's clock).
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
        # Left behind it ends by itself; an error of the body must not be hidden by this one.
        with contextlib.suppress(StorageFailure):
            self.release()

    def renew(self, ttl_s: float | None = None) -> None:
        """Hold the version for ``ttl_s`` more from now (None: as long as at first). One PUT; blocks.

        Raises
        ------
        VersionExpired
            The hold had ended before, and the version has expired since.
        AccessDenied, StorageFailure
        """
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        _check_ttl(ttl_s)
        expires_ms = self._clock_ms() + int(ttl_s * 1000)
        document = ReaderLease(
            version=self.version, branch=branch_of(self._log.prefix), expires_ms=expires_ms, holder=self._holder
        )
        self._storage.put_document(self._key, canonical_json(document), MAX_SMALL_BYTES)
        had_ended = self._clock_ms() >= self.expires_ms  # by now: a put that took long may have come too late
        self.expires_ms = expires_ms
        if had_ended:
            self._check_live()

    def release(self) -> None:
        """Give the hold up. A second call is harmless; `renew` takes the version again.

        Raises
        ------
        AccessDenied, StorageFailure
        """
        self.expires_ms = 0
        self._storage.delete([self._key])

    def _check_live(self) -> None:
        """Behind the put, never before it: garbage collection looks in the other order."""
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
    """Hold a version, the head's if None, for ``ttl_s`` seconds. A PUT and a few GETs; blocks.

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
            continue  # The head has moved on and the old one has expired, between two requests.
        return lease
    lease = Lease(storage, log, log.latest().record.v, ttl_s, holder, clock_ms)
    lease.renew()
    return lease


def put_cursor(
    storage: Storage,
    log: LogReader,
    name: str,
    version: int,
    *,
    ttl_s: float | None,
    holder: str,
    clock_ms: Callable[[], int] = wall_ms,
) -> Cursor:
    """Say that a consumer stands at ``version``: that one and all behind it stay. Moves the cursor of that name.

    Raises
    ------
    BadName, BadInput
        Also where the name is a cursor of another log of the store.
    VersionExpired
        The version is gone; a cursor of that name stays where it was.
    VersionNotFound, AccessDenied, StorageFailure, CorruptStore
    """
    check_name(name)
    if ttl_s is not None:
        _check_ttl(ttl_s)
    key, now_ms, branch = cursor_key(name), clock_ms(), branch_of(log.prefix)
    before = storage.read_document(key, MAX_SMALL_BYTES)
    if before is not None and (other := _decode_cursor(before, key)).branch != branch:
        raise BadInput(f"cursor {name!r} belongs to another branch ({other.branch or 'none'}); choose another name")
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
    """Forget a cursor.

    Raises
    ------
    NotFound
        There is none of that name.
    BadName, AccessDenied, StorageFailure
    """
    key = cursor_key(name)
    if storage.read(key, stop=1) is None:
        raise NotFound(f"no cursor {name!r}; there are {sorted(read_cursors(storage))}", found=name)
    storage.delete([key])


def read_leases(storage: Storage) -> dict[str, ReaderLease]:
    """Return every reader lease by key, ended ones too: a listing, and a GET each.

    Raises
    ------
    CorruptStore
        One cannot be read: whom it protects is not known, so nothing may be deleted until it is gone.
    AccessDenied, StorageFailure
    """
    found = _read_all(storage, READER_LEASES)
    return {key: decode_document(data, ReaderLease, key) for key, data in found.items()}


def read_cursors(storage: Storage) -> dict[str, Cursor]:
    """Return every cursor by name, ended ones too; as `read_leases`."""
    cursors = (_decode_cursor(data, key) for key, data in _read_all(storage, CURSORS).items())
    return {cursor.name: cursor for cursor in cursors}


def delete_ended_holds(storage: Storage, now_ms: int) -> None:
    """Delete leases and cursors that ended so long ago that nobody can mean to renew them. Listings, a GET each.

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
    """Whether a lease or cursor with that end still counts: clocks differ by less than `CLOCK_TOLERANCE_MS`. Pure."""
    return expires_ms is None or now_ms < expires_ms + CLOCK_TOLERANCE_MS


def _read_all(storage: Storage, folder: str) -> dict[str, bytes]:
    found = {}
    for stat in storage.list_objects(folder):
        data = storage.read_document(stat.key, MAX_SMALL_BYTES)
        if data is not None:
            found[stat.key] = data
    return found


def _decode_cursor(data: bytes, key: str) -> Cursor:
    """The cursor at ``key``. One under another's name would stand in for it, and that one would hold nothing."""
    cursor = decode_document(data, Cursor, key)
    try:
        expected = cursor_key(cursor.name)
    except BadName:
        expected = None
    if expected != key:
        raise CorruptStore(
            f"{key} says that it is cursor {cursor.name[:80]!r}; it was copied, delete it", path=key, expected=expected
        )
    return cursor


def _check_version(log: LogReader, version: int) -> None:
    head = log.latest().record
    if not 0 <= version <= head.v:
        raise VersionNotFound(f"there is no version {version}; the newest is {head.v}", version=version)
    if not is_live(head, version):
        raise VersionExpired(f"version {version} has expired; the floor is {head.floor}", version=version)


def _check_ttl(ttl_s: float) -> None:
    checked_number("ttl_s", ttl_s, above=0, most=1e9)
