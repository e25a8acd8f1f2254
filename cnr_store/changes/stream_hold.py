"""The registered cursor of a change stream: what a consumer still needs is kept in the store."""

from __future__ import annotations

import time

from cnr_store.errors import VersionExpired
from cnr_store.store import Store

_RENEWALS_PER_TTL = 3


class StreamHold:
    """A cursor of a store under a name; without a name it holds nothing and costs nothing.

    Unlike a loader's cursor, one that cannot be written is an error: a stream whose versions expire cannot go on.
    """

    def __init__(self, store: Store, name: str | None, ttl_s: float | None) -> None:
        self._store = store
        self._name = name
        self._ttl_s = ttl_s
        self._version: int | None = None
        self._at_s = 0.0

    @property
    def is_registered(self) -> bool:
        """Whether the store has it."""
        return self._version is not None

    def put(self, version: int) -> bool:
        """Register it at a version; return whether that is still there.

        Raises
        ------
        VersionNotFound, AccessDenied, StorageFailure
        """
        if self._name is None:
            return True
        try:
            self._store.register_cursor(self._name, version, ttl_s=self._ttl_s)
        except VersionExpired:
            return False
        self._version, self._at_s = version, time.monotonic()
        return True

    def settle(self, version: int) -> None:
        """Put it where the consumer is, or renew it in time; no request where neither is due."""
        if self._name is not None and (self._version != version or self._is_renewal_due()):
            self.put(version)

    def renew(self) -> None:
        """Renew it in time where it is: a consumer may take longer for a version than ``ttl_s``."""
        if self._version is not None and self._is_renewal_due():
            self.put(self._version)

    def _is_renewal_due(self) -> bool:
        age_s = time.monotonic() - self._at_s
        return self._ttl_s is not None and age_s * _RENEWALS_PER_TTL > self._ttl_s
