"""The time of this machine, and that of the store: the clock that stamps its objects (spec, section 7.3).

Times decide nothing about what is committed, but a record that is stamped years ahead makes every later one so, and a
maintenance whose clock is wrong deletes under readers. So a machine whose clock is not the store's is told at the door.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from datetime import UTC, datetime, timedelta

from cnr_store.errors import AccessDenied, BadInput, StorageFailure, WrongClock
from cnr_store.storage import Storage

MAX_SKEW_MS = 3_600_000
"""How far a machine's clock may be from the store's. Saves that follow each other sooner need no look at the latter."""

_FOLDER = "_probe"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_ms() -> int:
    """Return the time of this machine, ms since 1970: of records, leases and branches alike."""
    return time.time_ns() // 1_000_000


def ms_of(time_: datetime) -> int:
    """Return a time as records have it, rounded down; one without a zone is of this machine's. Pure.

    Raises
    ------
    BadInput
        It is no `datetime.datetime`, or cannot be told in UTC.

    >>> ms_of(datetime(2023, 11, 14, 22, 13, 20, 123_999, UTC))
    1700000000123
    """
    if not isinstance(time_, datetime):
        raise BadInput(
            f"time takes a datetime.datetime, found {time_!r}; of ms since 1970 give "
            "datetime.fromtimestamp(ms / 1000, UTC), of a text datetime.fromisoformat(text)",
            expected="datetime.datetime", found=repr(time_),
        )  # fmt: skip
    try:
        return (time_.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
    except (OverflowError, ValueError) as error:
        raise BadInput(f"time {time_} cannot be told in UTC; give one within its years", found=str(time_)) from error


def read_store_clock(storage: Storage) -> int | None:
    """Return the time by the clock that stamps objects, ms since 1970; None if it stamps none, or may not be listed.

    Three requests: an object is put, listed and deleted.

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
        with contextlib.suppress(StorageFailure):  # a probe that is left behind harms nobody
            storage.delete([key])


def check_clock(storage: Storage, now_ms: int, *, head_ms: int | None = None, may_be_behind: bool = False) -> None:
    """Refuse a time of this machine that is further from the store's than `MAX_SKEW_MS`. Three requests.

    Where objects have no times, or this very machine stamps them, there is nothing to compare it with.

    Parameters
    ----------
    head_ms
        Of the newest record, for the message.
    may_be_behind
        Refuse a time that is ahead only: a record is stamped behind the one before it all the same.

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
    head = "" if head_ms is None else f", its newest record is of {text_of(head_ms)}"
    raise WrongClock(
        f"the clock of this machine says {text_of(now_ms)}, that of the store {storage.url} {text_of(store_ms)}{head}: "
        f"they may differ by {MAX_SKEW_MS // 1000} s. Nothing was written; set the clock right (NTP) and try again",
        expected=store_ms, found=now_ms,
    )  # fmt: skip


def text_of(time_ms: int) -> str:
    """Return a time as people write it.

    >>> text_of(1_700_000_000_000)
    '2023-11-14T22:13:20Z'
    """
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
