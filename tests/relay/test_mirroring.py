"""A relay copies records in descending order, each checked against the digest in the next one."""

from __future__ import annotations

import pytest

from cnr_store import Store, repair_store
from cnr_store.errors import CorruptRecord
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import sha256
from cnr_store.format.layout import commit_key
from cnr_store.log.log_reader import position_bytes
from cnr_store.relay.mirroring import Descent
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.memory import store_in_memory

TORN = b'{"v":'


@pytest.fixture
def store() -> Store:
    """Records 0 to 4, of which 2 is torn and superseded by 3, and another log with other tags."""
    store = store_in_memory()
    store.tag("first", 0)
    store.storage.put(commit_key(2), TORN)
    repair_store(store, dry_run=False)
    store.tag("last", 0)
    return store


def bytes_at(store: Store, version: int) -> bytes:
    data = position_bytes(store.storage, version)
    assert data is not None
    return data


def entry_at(store: Store, version: int) -> LogEntry:
    entry = store.internals.log.read(version)
    assert entry is not None
    return entry


def descended(store: Store, stop: int) -> Descent:
    """The check of the newest records down to the one above ``stop``."""
    descent = Descent(store.head())
    for version in range(4, stop, -1):
        assert descent.take(bytes_at(store, version)).version == version
    return descent


def other_history(store: Store) -> Store:
    """The same store as it would be if another tag had been set first."""
    files = IsolatedMemoryFileSystem()
    copy = storage_from_filesystem(files, "/root")
    for key in ("cnr.json", commit_key(0)):
        copy.put(key, store.storage.read(key) or b"")
    other = Store.open_on(copy, threads=1)
    other.tag("another", 0)
    return other


def test_a_whole_log_is_taken_down_to_what_the_relay_has(store: Store) -> None:
    descended(store, -1)
    descended(store, 1).check_meets(entry_at(store, 1))
    descended(store, 1).check_meets(None)


@pytest.mark.parametrize("version", [4, 2, 1, 0])
def test_a_record_of_another_history_is_not_taken(store: Store, version: int) -> None:
    """Also one that is whole by itself: a source whose log was exchanged while it was read."""
    descent = descended(store, version)

    with pytest.raises(CorruptRecord, match=f"commit record {version} does not match"):
        descent.take(bytes_at(other_history(store), 1))


def test_a_relay_that_has_another_history_is_not_gone_on_with(store: Store) -> None:
    with pytest.raises(CorruptRecord, match="expects another record 1 than the relay has"):
        descended(store, 1).check_meets(entry_at(other_history(store), 1))
    with pytest.raises(CorruptRecord, match="expects another record"):
        descended(store, 0).check_meets(entry_at(store, 1))


def test_a_torn_record_that_nobody_superseded_is_not_taken() -> None:
    store = store_in_memory()
    store.tag("first", 0)
    entry = store.head()
    torn = LogEntry(entry.record, sha256(TORN))

    with pytest.raises(CorruptRecord):
        Descent(torn).take(TORN)
