"""Leases and cursors: written first, checked against the head afterwards, so that expiry and holder see each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from cnr_store import BadInput, CorruptStore, NotFound, Store
from cnr_store.errors import BadName, VersionExpired, VersionNotFound
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json
from cnr_store.format.layout import CURSORS, READER_LEASES, cursor_key
from cnr_store.format.limits import MAX_RECORD_BYTES
from cnr_store.log.author import writer_info
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.leases import CLOCK_TOLERANCE_MS, is_held, read_cursors, read_leases, take_lease
from cnr_store.log.rebase import draft_after, rebase_expire
from cnr_store.storage import Storage, storage_from_filesystem
from tests.support.memory import store_in_memory

SCHEMAS = Path(__file__).resolve().parents[2] / "format_spec" / "schemas"


@pytest.fixture
def store() -> Store:
    """Three checkpoints: versions 2, 3 and 4."""
    made = store_in_memory(threads=None)
    with made.writer() as writer:
        for step in range(3):
            with writer.begin(step, kind="baseline") as txn:
                txn.write_table("t", np.full((4, 2), step, np.float32))
    return made


class SlowPut:
    """A storage whose puts take their time."""

    def __init__(self, storage: Storage, now: list[int]) -> None:
        self.takes_ms = 0
        self._storage, self._now = storage, now

    def put_document(self, key: str, data: bytes, limit_bytes: int) -> None:
        self._now[0] += self.takes_ms
        self._storage.put_document(key, data, limit_bytes)

    def delete(self, found: list[str]) -> None:
        self._storage.delete(found)


def expire_below(store: Store, floor: int) -> None:
    head = store.head()
    draft = draft_after(head.record, "expire", writer_info(), floor=floor)
    store.internals.log.append(head, draft, rebase_expire)


def keys(store: Store, folder: str) -> list[str]:
    return [stat.key for stat in store.storage.list_objects(folder)]


def test_a_lease_is_there_until_it_is_released(store: Store) -> None:
    with store.lease(3, ttl_s=60) as lease:
        held = read_leases(store.storage)

    assert [found.version for found in held.values()] == [3]
    assert next(iter(held.values())).expires_ms == lease.expires_ms or lease.expires_ms == 0
    assert keys(store, READER_LEASES) == []


def test_without_a_version_the_head_is_leased(store: Store) -> None:
    assert store.lease().version == 4


def test_renewing_moves_the_end_in_place(store: Store) -> None:
    lease = store.lease(3, ttl_s=60)
    first = lease.expires_ms

    lease.renew(ttl_s=600)

    assert lease.expires_ms >= first + 540_000
    assert len(keys(store, READER_LEASES)) == 1


def test_a_lease_on_an_expired_version_is_refused_and_leaves_nothing(store: Store) -> None:
    expire_below(store, 4)

    with pytest.raises(VersionExpired):
        store.lease(3)

    assert keys(store, READER_LEASES) == []


def test_a_lease_on_a_version_that_never_was_is_refused(store: Store) -> None:
    with pytest.raises(VersionNotFound):
        store.lease(99)

    assert keys(store, READER_LEASES) == []


def before_next_put(storage: Storage, action: Callable[[], None]) -> None:
    """Run ``action`` once, just before the next object is written."""
    put = storage.put

    def put_later(key: str, data: bytes | memoryview) -> None:
        storage.put = put  # type: ignore[method-assign]
        action()
        put(key, data)

    storage.put = put_later  # type: ignore[method-assign]


def test_an_expiry_between_the_look_and_the_put_is_seen_by_the_second_look(store: Store) -> None:
    other = Store.open_on(storage_from_filesystem(store.storage._fs, "/root"))  # type: ignore[attr-defined]
    before_next_put(store.storage, lambda: expire_below(other, 4))

    with pytest.raises(VersionExpired):
        store.lease(3)


def test_a_head_that_expired_between_two_requests_gives_way_to_the_newer(store: Store) -> None:
    other = Store.open_on(storage_from_filesystem(store.storage._fs, "/root"))  # type: ignore[attr-defined]

    def move_on() -> None:
        with other.writer() as writer, writer.begin(9, kind="baseline") as txn:
            txn.write_table("t", np.zeros((4, 2), np.float32))
        expire_below(other, other.latest_version())

    before_next_put(store.storage, move_on)

    assert store.lease().version == other.latest_version()
    assert len(keys(store, READER_LEASES)) == 1


def test_a_lease_that_had_ended_is_renewed_only_while_its_version_lives(store: Store) -> None:
    now = [1_000_000]
    lease = take_lease(store.storage, store.internals.log, 3, ttl_s=1, holder="h", clock_ms=lambda: now[0])
    expire_below(store, 4)

    lease.renew(ttl_s=2)  # still held: garbage collection has to leave the data
    now[0] += 3000
    with pytest.raises(VersionExpired):
        lease.renew()

    assert keys(store, READER_LEASES) == []


def test_a_renewal_that_took_too_long_looks_whether_its_version_lives(store: Store) -> None:
    now = [1_000_000]
    faulty = SlowPut(store.storage, now)
    lease = take_lease(faulty, store.internals.log, 3, ttl_s=1, holder="h", clock_ms=lambda: now[0])  # type: ignore[arg-type]  # it puts and deletes
    expire_below(store, 4)
    faulty.takes_ms = CLOCK_TOLERANCE_MS + 1000

    with pytest.raises(VersionExpired):
        lease.renew()

    assert keys(store, READER_LEASES) == []


def test_a_lease_counts_for_a_while_behind_its_end_because_clocks_differ() -> None:
    assert is_held(1000, 1000 + CLOCK_TOLERANCE_MS - 1)
    assert not is_held(1000, 1000 + CLOCK_TOLERANCE_MS)
    assert is_held(None, 10**15)


def test_a_cursor_moves_and_is_dropped(store: Store) -> None:
    store.register_cursor("serving/eu", 2)
    store.register_cursor("serving/eu", 3, ttl_s=60)
    store.register_cursor("audit", 2)

    assert {name: cursor.version for name, cursor in store.cursors().items()} == {"serving/eu": 3, "audit": 2}
    store.drop_cursor("audit")
    assert list(store.cursors()) == ["serving/eu"]
    with pytest.raises(NotFound, match="serving/eu"):
        store.drop_cursor("audit")


def test_a_cursor_on_an_expired_version_is_refused_and_the_old_one_stays(store: Store) -> None:
    store.register_cursor("serving", 4)
    expire_below(store, 4)

    with pytest.raises(VersionExpired):
        store.register_cursor("serving", 3)
    with pytest.raises(VersionExpired):
        store.register_cursor("new", 3)

    assert {name: cursor.version for name, cursor in store.cursors().items()} == {"serving": 4}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300])
def test_names_that_cannot_be_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(BadName):
        store.register_cursor(name, 3)

    assert keys(store, CURSORS) == []


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan"), "6h", timedelta(hours=6)])
def test_a_time_that_cannot_be_one_is_refused(store: Store, ttl_s: Any) -> None:
    with pytest.raises(BadInput):
        store.lease(3, ttl_s=ttl_s)
    with pytest.raises(BadInput):
        store.register_cursor("c", 3, ttl_s=ttl_s)


def test_holds_of_a_branch_say_so(store: Store) -> None:
    branch = store.fork("trial", 3)
    lease = branch.lease()
    branch.register_cursor("trial reader", 0)

    (uuid,) = store.head().record.pins
    assert lease.version == 0
    assert [found.branch for found in read_leases(store.storage).values()] == [uuid]
    assert store.cursors()["trial reader"].branch == uuid
    with pytest.raises(BadInput, match="another branch"):
        store.register_cursor("trial reader", 3)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version":"x"}'])
def test_a_hold_that_cannot_be_read_is_an_error_that_names_it(store: Store, damage: bytes) -> None:
    store.register_cursor("c", 3)
    store.storage.put(cursor_key("c"), damage)

    with pytest.raises(CorruptStore) as found:
        store.cursors()

    assert found.value.path == cursor_key("c")


def test_a_copy_of_a_cursor_does_not_stand_in_for_it(store: Store) -> None:
    store.register_cursor("c", 2)
    data = store.storage.read(cursor_key("c"))
    assert data is not None
    store.storage.put(cursor_key("d"), data.replace(b'"version":2', b'"version":4'))

    with pytest.raises(CorruptStore, match="cursor 'c'") as found:
        store.cursors()

    assert found.value.path == cursor_key("d")


@pytest.mark.parametrize(
    "changes", [{"branch": "../../data"}, {"branch": "0" * 31}, {"version": -1}, {"holder": "h" * MAX_RECORD_BYTES}]
)
def test_a_hold_that_cannot_be_one_is_an_error_that_names_it(store: Store, changes: dict[str, str | int]) -> None:
    store.register_cursor("c", 3)
    store.lease(3)
    (lease_key,) = keys(store, READER_LEASES)
    for key, read in ((cursor_key("c"), read_cursors), (lease_key, read_leases)):
        data = store.storage.read(key)
        assert data is not None
        store.storage.put(key, canonical_json({**msgspec.json.decode(data), **changes}))

        with pytest.raises(CorruptStore) as found:
            read(store.storage)

        assert found.value.path == key


def test_documents_meet_their_schemas_and_a_newer_field_is_allowed(store: Store) -> None:
    store.register_cursor("c", 3, ttl_s=5)
    store.lease(3)

    for name, folder in (("cursor", CURSORS), ("reader_lease", READER_LEASES)):
        (key,) = keys(store, folder)
        data = store.storage.read(key)
        assert data is not None
        document = msgspec.json.decode(data)
        assert canonical_json(document) == data
        validator = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))
        validator.validate({**document, "from_the_future": 1})
        assert not validator.is_valid({**document, "version": [None]})


def test_an_object_that_goes_while_it_is_looked_for_is_no_hold(store: Store) -> None:
    lease = store.lease(3)
    read = store.storage.read

    def too_late(key: str, **part: int) -> bytes | None:
        if key.startswith(READER_LEASES):
            lease.release()
        return read(key, **part)

    store.storage.read = too_late  # type: ignore[method-assign,assignment]

    assert read_leases(store.storage) == {}
    assert read_cursors(store.storage) == {}


def test_commit_logs_of_other_entries_are_not_touched(store: Store) -> None:
    before: LogEntry = store.head()

    with store.lease():
        store.register_cursor("c", 4)

    log: CommitLog = store.internals.log
    assert log.latest() == before
