"""The clock of this machine and the clock of the store, which stamps its objects (spec, section 7.3).

Commits do not depend on time. But after a record stamped years ahead every later one is, too, and maintenance with a
wrong clock deletes what readers use. So a machine whose clock differs too much from the store's is refused.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from datetime import UTC, datetime, timedelta

from cnr_store.errors import AccessDenied, BadInput, StorageFailure, WrongClock
from cnr_store.storage import Storage

MAX_SKEW_MS = 3_600_000
"""Largest allowed difference of a machine's clock from the store's. Saves less apart than this do not compare them."""

_FOLDER = "_probe"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_ms() -> int:
    """Return the time of this machine in ms since 1970. Records, leases and branches all use it."""
    return time.time_ns() // 1_000_000


def ms_of(time_: datetime) -> int:
    """Return a time in ms since 1970, rounded down. A time without a zone is local time. Pure.

    Raises
    ------
    BadInput
        It is no `datetime.datetime`, or cannot be converted to UTC.

    >>> ms_of(datetime(2023, 11, 14, 22, 13, 20, 123_999, UTC))
    1700000000123
    """
    if not isinstance(time_, datetime):
        raise BadInput(
            f"time is {time_!r}, expected a datetime.datetime; convert ms since 1970 with "
            "datetime.fromtimestamp(ms / 1000, UTC), text with datetime.fromisoformat(text)",
            expected="datetime.datetime", found=repr(time_),
        )  # fmt: skip
    try:
        return (time_.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
    except (OverflowError, ValueError) as error:
        raise BadInput(f"time {time_} cannot be converted to UTC; use a year within range", found=str(time_)) from error


def read_store_clock(storage: Storage) -> int | None:
    """Return the time of the store's clock in ms since 1970, or None. Three requests.

    It writes, lists and deletes an object. None: objects have no times, or access is denied.

    Raises
    ------
    StorageFailure
    """
    key = f"{_FOLDER}/{uuid.uuid4().hex}"
    try:
        storage.put(key, b"clock")
        times = (stat.modified_ms for stat in storage.list_objects(_FOLDER) if stat.key == key)
        return next(times, None)
    except AccessDenied:
        return None
    finally:
        with contextlib.suppress(StorageFailure):  # a remaining probe object is harmless
            storage.delete([key])


def check_clock(storage: Storage, now_ms: int, *, head_ms: int | None = None, may_be_behind: bool = False) -> None:
    """Check that this machine's time differs from the store's by at most `MAX_SKEW_MS`. Three requests.

    Passes if objects have no times. Detects nothing if this machine itself stamps the objects.

    Parameters
    ----------
    head_ms
        The time of the newest record, for the message.
    may_be_behind
        Allow any time before the store's: a record always gets a later time than its parent.

    Raises
    ------
    WrongClock, StorageFailure
    """
    store_ms = read_store_clock(storage)
    if store_ms is None:
        return
    ahead_ms = now_ms - store_ms
    if ahead_ms <= MAX_SKEW_MS and (may_be_behind or ahead_ms >= -MAX_SKEW_MS):
        return
    head = "" if head_ms is None else f", the newest record has {text_of(head_ms)}"
    raise WrongClock(
        f"this machine's clock shows {text_of(now_ms)}, that of the store {storage.url} {text_of(store_ms)}{head}: "
        f"they may differ by {MAX_SKEW_MS // 1000} s. Nothing was written; correct the clock (NTP) and retry",
        expected=store_ms, found=now_ms,
    )  # fmt: skip


def text_of(time_ms: int) -> str:
    """Return a time in ms since 1970 as ISO 8601 text in UTC.

    >>> text_of(1_700_000_000_000)
    '2023-11-14T22:13:20Z'
    """
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
