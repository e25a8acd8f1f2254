"""Protects the data that a consumer needs from deletion: a lease during a load, a registered cursor afterwards.

Both need write access. A loader without it continues, and relies on the grace period between expiry and deletion.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cnr_store.errors import BadInput, CnrStoreError, StorageFailure, VersionExpired, VersionNotFound
from cnr_store.store import Store

logger = logging.getLogger(__name__)

LEASE_S = 3600.0
"""Longest lease of one load, in seconds; it is released at the end of the load."""

CURSOR_S = 24 * 3600.0
"""Seconds after which the cursor of a loader expires, unless it is renewed: a dead loader keeps data no longer."""

CURSOR_RETRY_S = 10.0
"""Seconds before a failed registration at the same version is retried: idle polls keep to one request each."""

_RENEWALS_PER_TTL = 4


@contextmanager
def leased(store: Store, version: int) -> Iterator[None]:
    """Lease a version during the block if the store can be written. A PUT, some GETs, a DELETE.

    Raises
    ------
    VersionExpired, VersionNotFound
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
        with suppress(StorageFailure):  # a lease that stays ends by itself
            lease.release()


class RegisteredCursor:
    """A cursor of a store under a name, which keeps what a consumer needs; without a name it does nothing.

    Not safe for several threads.

    Attributes
    ----------
    version
        The version at which the store has it; None if it is not registered.
    """

    def __init__(self, store: Store, name: str | None, ttl_s: float | None) -> None:
        self.version: int | None = None
        self._store, self._name, self._ttl_s = store, name, ttl_s
        self._at_s = 0.0

    def put(self, version: int) -> bool:
        """Register it at a version; return False if that has expired.

        Raises
        ------
        BadInput, VersionNotFound, AccessDenied, StorageFailure
        """
        try:
            self._register(version)
        except VersionExpired:
            return False
        return True

    def move(self, version: int) -> None:
        """Register it at a version, unless it is there and not due for renewal. Raises as `put`."""
        if self._is_due(version):
            self.put(version)

    def renew(self) -> None:
        """Renew it at its version if due: a consumer may take longer for a version than ``ttl_s``. Raises as `put`."""
        if self.version is not None:
            self.move(self.version)

    def _is_due(self, version: int) -> bool:
        age_s = time.monotonic() - self._at_s
        return version != self.version or (self._ttl_s is not None and age_s >= self._ttl_s / _RENEWALS_PER_TTL)

    def _register(self, version: int) -> None:
        if self._name is not None:
            self._store.register_cursor(self._name, version, ttl_s=self._ttl_s)
            self.version, self._at_s = version, time.monotonic()


class FollowingCursor(RegisteredCursor):
    """The cursor of a loader. If it cannot be registered, the loader continues without it."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name, CURSOR_S)
        self._failed: tuple[int, float] | None = None
        """The version at which it could not be registered, and when."""

    def move(self, version: int) -> None:
        """As `RegisteredCursor.move`; a failure is logged and retried later.

        Raises
        ------
        BadInput
            The name is invalid, or is a cursor of another branch.
        """
        now = time.monotonic()
        if self._failed is not None and version == self._failed[0] and now - self._failed[1] < CURSOR_RETRY_S:
            return
        if not self._is_due(version):
            return
        try:
            self._register(version)
        except BadInput:
            raise
        except CnrStoreError as error:
            if self._failed is None:
                logger.warning("cursor %r of %s stays at %s: %s", self._name, self._store.url, self.version, error)
            self._failed = version, now
        else:
            self._failed = None
