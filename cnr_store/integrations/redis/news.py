"""Tells of commits by a channel of Redis, so that a loader looks before its next poll. Redis keeps nothing of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from random import random
from typing import TYPE_CHECKING, Any, Self

from cnr_store.errors import AccessDenied, StorageFailure
from cnr_store.integrations.redis.connection import Connection, connected
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.repeating import Repeating, pause_s

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0
_LISTEN_S = 0.2
"""Seconds that a listener waits for a message before it looks whether it was closed."""


class RedisNews(Closing):
    """Announces versions of a store to all who listen, in Redis 5 or newer.

    A message wakes a poll and carries nothing that is trusted; one that is lost costs a poll interval at most. Where
    Redis cannot be reached, committing and serving go on: it is logged once and tried again.

    Parameters
    ----------
    client
        A `redis.Redis`; it is not closed. `connect` creates one.
    name
        Of the store or relay that is announced; the channel is ``{name}:versions``. Those who read a relay listen to
        the relay's name, not to that of its source.

    Examples
    --------
    A trainer: ``store.announce_to(RedisNews.connect(url, "run-7").announce)``. A server:
    ``RedisNews.connect(url, "run-7").listen(loader.wake)``. A relay does both, by two names.
    """

    def __init__(self, client: Redis, name: str) -> None:
        self._at = Connection(client, name)
        self._lock = threading.Lock()
        self._version: int | None = None
        self._publisher: Repeating | None = None
        self._listeners: list[tuple[_Listener, Repeating]] = []
        self._failures = 0

    @classmethod
    def connect(cls, url: str, name: str, **options: Any) -> Self:
        """Return the news of a name at a URL such as ``redis://user:password@host:6379/0``; no I/O.

        Passes options to redis-py; by default a server that does not answer in 1 s is a failure.

        Raises
        ------
        MissingDependency, BadInput
        """
        return cls(connected(url, {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S, **options}), name)

    def announce(self, version: int) -> None:
        """Publish the number of a version on a thread of its own; does not block. Of several, the newest is enough."""
        with self._lock:
            self._version = version
            if self._publisher is None:
                self._publisher = Repeating(self, RedisNews._publish, name="cnr-announce")
            self._publisher.wake()

    def listen(self, wake: Callable[[], object]) -> None:
        """Call ``wake()`` for each announcement until `close`, on a thread of its own; does not block.

        Also when the connection was made, or made again, because announcements may have been missed before.
        """
        listener = _Listener(self._at, wake)
        with self._lock:
            self._listeners.append((listener, Repeating(listener, _Listener.listen, name="cnr-listen")))

    def close(self) -> None:
        """Publish what was announced, unless Redis fails, and end the threads. Idempotent."""
        with self._lock:
            publisher, self._publisher = self._publisher, None
            listeners, self._listeners = self._listeners, []
        if publisher is not None:
            publisher.stop()
            self._publish()
        for _, thread in listeners:
            thread.stop()
        for listener, _ in listeners:
            listener.disconnect()

    def _publish(self) -> float:
        with self._lock:
            version, self._version = self._version, None
        if version is not None:
            channel = self._at.keys.named("versions")
            try:
                self._at.call("announcing", lambda: self._at.client.publish(channel, version))
                self._failures = 0
            except (StorageFailure, AccessDenied) as error:
                # Not again: the next commit is announced anew, and this one is found by polling.
                if self._failures == 0:
                    logger.warning("version %d is not announced: %s", version, error)
                self._failures += 1
        return threading.TIMEOUT_MAX


class _Listener:
    """One subscription, used by one thread at a time."""

    def __init__(self, at: Connection, wake: Callable[[], object]) -> None:
        self._at, self._wake = at, wake
        self._subscription: Any = None
        self._failures = 0

    def listen(self) -> float:
        """Wait for a message and wake; return the seconds until it is to be called again."""
        try:
            if self._subscription is None:
                self._at.call("subscribing", self._subscribe)
            message = self._at.call("listening", lambda: self._subscription.get_message(timeout=_LISTEN_S))
        except (StorageFailure, AccessDenied) as error:
            if self._failures == 0:
                logger.warning("no announcements until it is back: %s", error)
            self._failures += 1
            self.disconnect()
            return pause_s(_ANSWER_S, self._failures, random())
        self._failures = 0
        if message is not None:  # or the server's answer to a subscription, before which announcements were missed
            self._wake()
        return 0.0

    def disconnect(self) -> None:
        """End the subscription, if there is one."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _subscribe(self) -> None:
        subscription = self._at.client.pubsub()
        try:
            subscription.subscribe(self._at.keys.named("versions"))
        except BaseException:
            subscription.close()
            raise
        self._subscription = subscription
