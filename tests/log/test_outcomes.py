"""What an append may say of itself: nothing was committed, or it is not known; and which record follows which."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from cnr_store.errors import (
    AccessDenied,
    BadInput,
    CnrStoreError,
    CommitStateUnknown,
    CorruptRecord,
    CorruptStore,
    StorageFailure,
)
from cnr_store.format.commit_record import LogEntry, encode_record
from cnr_store.format.documents import sha256
from cnr_store.format.layout import commit_key
from cnr_store.format.records import CommitRecord, Superseded
from cnr_store.log.rebase import draft_after, draft_init
from cnr_store.storage import CreateOutcome, Storage, storage_from_filesystem
from tests.log import logs
from tests.log.logs import WRITER, no_rebase
from tests.support.faulty import IsolatedMemoryFileSystem


@pytest.fixture
def storage() -> Storage:
    return storage_from_filesystem(IsolatedMemoryFileSystem(), "/root")


open_log = partial(logs.log_on, deadline_s=0.0)


def draft(head: LogEntry, **changes: Any) -> CommitRecord:
    return draft_after(head.record, "expire", WRITER, **{"step": head.record.step + 1, **changes})


def with_versions(storage: Storage, count: int) -> list[LogEntry]:
    log = open_log(storage)
    entries = [log.append_first(draft_init(WRITER))]
    while len(entries) < count:
        entries.append(log.append(entries[-1], draft(entries[-1]), no_rebase))
    return entries


class Swallowed:
    """A network that keeps the first creates back, without an answer; they can be delivered later."""

    def __init__(self, storage: Storage, then: CnrStoreError | None = None) -> None:
        self._real = storage.create
        self._then = then
        self.sent: list[tuple[str, bytes]] = []
        storage.create = self.create  # type: ignore[method-assign]  # what a driver does beneath is not ours to choose

    def create(self, key: str, data: bytes) -> CreateOutcome:
        self.sent.append((key, data))
        if self._then is not None and len(self.sent) > 1:
            raise self._then
        return CreateOutcome.UNKNOWN

    def deliver(self) -> None:
        assert self._real(*self.sent[0]) is CreateOutcome.CREATED


REFUSALS = [StorageFailure("the disk is full"), AccessDenied("the token has expired"), BadInput("too large")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refused_retry_says_nothing_of_what_was_sent_before(storage: Storage, refusal: CnrStoreError) -> None:
    head = with_versions(storage, 3)[-1]
    network = Swallowed(storage, then=refusal)
    log = open_log(storage, deadline_s=1.0)

    with pytest.raises((CommitStateUnknown, BadInput)):
        log.append(head, draft(head), no_rebase)

    assert len(network.sent) > 1
    assert log.unresolved == 3
    network.deliver()
    assert log.resolve() == open_log(storage).latest()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refused_retry_of_a_resolve_leaves_it_unresolved(storage: Storage, refusal: CnrStoreError) -> None:
    head = with_versions(storage, 3)[-1]
    network = Swallowed(storage, then=refusal)
    log = open_log(storage)
    with pytest.raises(CommitStateUnknown):
        log.append(head, draft(head), no_rebase)
    assert len(network.sent) == 1

    with pytest.raises((CommitStateUnknown, BadInput)):
        log.resolve()

    assert len(network.sent) > 1
    assert log.unresolved == 3
    network.deliver()
    assert log.resolve() == open_log(storage).latest()


def test_a_hint_that_is_never_written_does_not_fail_an_append(storage: Storage) -> None:
    head = with_versions(storage, 3)[-1]

    def full(key: str, _data: bytes) -> None:
        raise StorageFailure(f"no room for {key}")

    storage.put = full  # type: ignore[method-assign, assignment]  # a disk that is full for what is not created
    log = open_log(storage)

    assert log.append(head, draft(head), no_rebase) == open_log(storage).latest()
    assert log.unresolved is None


@pytest.mark.parametrize("changes", [{"floor": 9}, {"tags": {"t": 9}}, {"checkpoint": 1}])
def test_a_record_that_contradicts_itself_is_not_sent(storage: Storage, changes: dict[str, Any]) -> None:
    head = with_versions(storage, 3)[-1]

    with pytest.raises(BadInput, match="readers would refuse it"):
        open_log(storage).append(head, draft(head, **changes), no_rebase)

    assert open_log(storage).latest() == head


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data.replace(b'"step":', b'"step":1')])
def test_a_damaged_record_is_not_superseded_by_the_one_behind_it(storage: Storage, damage: Damage) -> None:
    entries = with_versions(storage, 5)
    stored = storage.read(commit_key(3), stop=1 << 16)
    assert stored is not None
    storage.put(commit_key(3), damage(stored))

    with pytest.raises(CorruptRecord) as refused:
        open_log(storage).read_standing(3)

    assert refused.value.version == 3
    assert open_log(storage).read_standing(4) == entries[4]


def test_a_record_that_says_it_carries_on_another_version_is_refused(storage: Storage) -> None:
    entries = with_versions(storage, 4)
    storage.put(commit_key(4), b"torn")
    lying = Superseded(torn=("a" * 64, sha256(b"torn")), follows=entries[3].digest)  # of one position, it says two
    changes: dict[str, Any] = {"kind": "rollback", "target": 1, "supersedes": lying, "parent_digest": sha256(b"torn")}
    record = msgspec.structs.replace(entries[3].record, v=5, commit_uuid="e" * 32, **changes)
    storage.put(commit_key(5), encode_record(record))

    with pytest.raises(CorruptStore):
        open_log(storage).poll(entries[3])
