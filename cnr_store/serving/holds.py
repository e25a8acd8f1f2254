"""What a consumer keeps in the store so that data stays for it: a lease while it loads, a cursor while it serves.

Both need write access. A consumer without it relies on the grace between expiry and deletion, and nothing here fails
for that: holding is a courtesy of the store's, serving is the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cnr_store.errors import BadInput, CnrStoreError, StorageFailure, VersionExpired, VersionNotFound
from cnr_store.store import Store

logger = logging.getLogger(__name__)

LEASE_S = 3600.0
"""How long one load is held; it ends before that where it can be written that it has."""

CURSOR_S = 24 * 3600.0
"""How long a cursor counts after its last move: a consumer that died holds the data for no longer."""

CURSOR_RETRY_S = 10.0
"""How long a move that failed is left alone, unless the consumer goes on: idle looks stay at one request each."""


@contextmanager
def leased(store: Store, version: int) -> Iterator[None]:
    """Hold a version for the block where the store can be written, else do nothing. A PUT, some GETs, a DELETE.

    Raises
    ------
    VersionExpired, VersionNotFound
        There is nothing to hold.
    """
    try:
        lease = store.lease(version, ttl_s=LEASE_S)
    except (VersionExpired, VersionNotFound):
        raise
    except CnrStoreError as error:
        logger.debug("version %d of %s is loaded without a lease: %s", version, store.url, error)
        yield
        return
    try:
        yield
    finally:
        with suppress(StorageFailure):  # left behind it ends by itself
            lease.release()


class FollowingCursor:
    """A registered cursor that goes where a consumer is. Not safe for several threads.

    Attributes
    ----------
    version
        Where the store says that the consumer stands; None as long as it could not be told.
    """

    def __init__(self, store: Store, name: str, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.version: int | None = None
        self._store = store
        self._name = name
        self._monotonic_s = monotonic_s
        self._told_s = 0.0
        self._failed: tuple[int, float] | None = None
        """The version that could not be told, and when."""

    def move(self, version: int) -> None:
        """Say where the consumer stands, if that is new or was said long ago; else no request. A failure is logged.

        Raises
        ------
        BadInput
            The name cannot be one, or is a cursor of another branch.
        """
        now = self._monotonic_s()
        if version == self.version and now - self._told_s < CURSOR_S / 4:
            return
        if self._failed is not None and version == self._failed[0] and now - self._failed[1] < CURSOR_RETRY_S:
            return
        try:
            self._store.register_cursor(self._name, version, ttl_s=CURSOR_S)
        except BadInput:
            raise
        except CnrStoreError as error:
            if self._failed is None:
                logger.warning("cursor %r of %s stays at %s: %s", self._name, self._store.url, self.version, error)
            self._failed = version, now
            return
        self.version, self._told_s, self._failed = version, now, None
