"""Appends whose outcome is unclear: they are settled by reading, or stay unknown, and are never told wrong."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
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
    UnknownFeature,
)
from cnr_store.format.commit_record import decode_record, encode_record
from cnr_store.format.layout import commit_key
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after
from cnr_store.storage import CreateOutcome, Storage, storage_from_filesystem
from tests.log.logs import (
    ROOT,
    STORE,
    WRITER,
    Clock,
    append_delta,
    append_fence,
    append_tag,
    calm,
    log_on,
    no_rebase,
    on_a_branch_too,
    open_log,
    txn,
    unresolved_log,
    with_versions,
    write_raw,
)
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem


@pytest.mark.parametrize(
    "kind", [FaultKind.FAIL_AFTER, FaultKind.LOST_REPLY, FaultKind.DUPLICATE, FaultKind.FAIL_BEFORE]
)
@on_a_branch_too
def test_unclear_create_is_settled_by_reading_back(
    inner: IsolatedMemoryFileSystem, prefix: str, kind: FaultKind
) -> None:
    head = with_versions(inner, 3, prefix)
    fs = FaultyFileSystem(inner, fault=Fault(kind, at=0))
    log = open_log(fs, prefix)

    entry = append_delta(log, head, 1)

    assert entry.record.v == 3
    assert open_log(calm(inner), prefix).latest() == entry
    assert fs.count("create") == (2 if kind is FaultKind.FAIL_BEFORE else 1)
    assert log.unresolved is None


def test_delayed_put_that_lands_before_the_retry_is_ours(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.DELAYED_PUT, at=0, delay_calls=2))

    entry = append_delta(open_log(fs), head, 1)

    assert fs.count("create") == 2
    assert open_log(calm(inner)).latest() == entry


def never_arriving(inner: IsolatedMemoryFileSystem) -> tuple[Storage, list[tuple[str, bytes]]]:
    """A network that swallows every request to create, and what was sent."""
    storage, sent = storage_from_filesystem(calm(inner), ROOT), []

    def create(key: str, data: bytes) -> CreateOutcome:
        sent.append((key, data))
        return CreateOutcome.UNKNOWN

    storage.create = create  # type: ignore[method-assign]
    return storage, sent


def test_retries_send_the_same_bytes_with_growing_pauses_to_the_deadline(
    inner: IsolatedMemoryFileSystem,
) -> None:
    head = with_versions(inner, 3)
    clock = Clock()
    storage, sent = never_arriving(inner)
    log = CommitLog(
        storage, STORE, clock_ms=clock.ms, monotonic_s=clock.monotonic_s, sleep=clock.sleep, random=Random(1)
    )

    with pytest.raises(CommitStateUnknown) as unknown:
        append_delta(log, head, 1)

    assert unknown.value.version == 3
    assert log.unresolved == 3
    assert len(set(sent)) == 1
    assert len(sent) > 20
    assert 50 < sum(clock.sleeps) <= 60
    assert max(clock.sleeps) <= 2.0
    assert clock.sleeps[0] <= 0.05


def test_nothing_else_is_appended_while_an_outcome_is_unknown(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    storage, sent = never_arriving(inner)
    log = log_on(storage, deadline_s=0.0)
    with pytest.raises(CommitStateUnknown) as own:
        append_delta(log, head, 1)
    first = log.unresolved_entry
    assert first is not None

    with pytest.raises(CommitStateUnknown, match="nothing new was sent") as refused:
        append_delta(log, head, 2)

    assert log.unresolved_entry is first
    assert len(sent) > 1
    assert len(set(sent)) == 1
    assert refused.value.version == own.value.version == 3
    assert refused.value.expected == own.value.expected == first.record.commit_uuid


@on_a_branch_too
@pytest.mark.parametrize("fate", ["landed", "never sent", "another took the position"])
def test_append_settles_what_an_earlier_append_left_unresolved(
    inner: IsolatedMemoryFileSystem, prefix: str, fate: str
) -> None:
    head = with_versions(inner, 3, prefix)
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.DELAYED_PUT, at=0, delay_calls=10**6))
    log = open_log(fs, prefix, deadline_s=0.0)
    with pytest.raises(CommitStateUnknown):
        append_tag(log, head, "unclear")
    if fate == "landed":
        fs.deliver_delayed()
    elif fate == "another took the position":
        append_tag(open_log(calm(inner), prefix), head, "other")

    entry = append_delta(log, head, 1)  # the head from before the tag
    fs.deliver_delayed()

    assert log.unresolved is None
    assert open_log(calm(inner), prefix).latest() == entry
    assert entry.record.v == 4
    assert list(entry.record.tags) == (["other"] if fate == "another took the position" else ["unclear"])


@pytest.mark.parametrize("wins", [True, False])
def test_what_a_later_append_settled_can_still_be_learned(inner: IsolatedMemoryFileSystem, *, wins: bool) -> None:
    head = with_versions(inner, 3)
    log, fs = unresolved_log(inner, head)
    sent = log.unresolved_entry
    assert sent is not None
    if wins:
        fs.deliver_delayed()
    else:
        append_tag(open_log(calm(inner)), head, "other")
    append_tag(log, log.latest(), "later")

    assert log.unresolved is None
    assert log.resolve(sent) == (sent if wins else None)
    inner.rm(f"{ROOT}/{commit_key(sent.record.v)}")
    with pytest.raises(CorruptStore) as hole:
        log.resolve(sent)
    assert hole.value.version == sent.record.v


def test_resolve_finds_the_straggler_that_landed(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    log, fs = unresolved_log(inner, head)
    fs.deliver_delayed()

    entry = log.resolve()

    assert entry == open_log(calm(inner)).latest()
    assert entry is not None
    assert entry.record.chain[-1].seg.endswith(txn(1))
    assert append_delta(log, entry, 2).record.v == 4


def test_resolve_sends_the_same_bytes_again_when_nothing_landed(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    log, fs = unresolved_log(inner, head)

    entry = log.resolve()
    fs.deliver_delayed()

    assert entry == open_log(calm(inner)).latest()
    assert entry is not None
    assert entry.record.v == 3


class Swallowed:
    """A network that keeps the first create back, without an answer, and refuses the later ones."""

    def __init__(self, storage: Storage, then: CnrStoreError) -> None:
        self._real, self._then = storage.create, then
        self.sent: list[tuple[str, bytes]] = []
        storage.create = self._create  # type: ignore[method-assign]  # what a driver does beneath is not ours to choose

    def _create(self, key: str, data: bytes) -> CreateOutcome:
        self.sent.append((key, data))
        if len(self.sent) > 1:
            raise self._then
        return CreateOutcome.UNKNOWN

    def deliver(self) -> None:
        assert self._real(*self.sent[0]) is CreateOutcome.CREATED


REFUSALS = [StorageFailure("the disk is full"), AccessDenied("the token has expired"), BadInput("too large")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("retried_by", ["append", "resolve"])
def test_a_refused_retry_says_nothing_of_what_was_sent_before(
    inner: IsolatedMemoryFileSystem, refusal: CnrStoreError, retried_by: str
) -> None:
    head = with_versions(inner, 3)
    storage = storage_from_filesystem(calm(inner), ROOT)
    network = Swallowed(storage, refusal)
    log = log_on(storage, deadline_s=1.0 if retried_by == "append" else 0.0)

    with pytest.raises((CommitStateUnknown, BadInput)):
        append_delta(log, head, 1)
    if retried_by == "resolve":
        assert len(network.sent) == 1
        with pytest.raises((CommitStateUnknown, BadInput)):
            log.resolve()

    assert len(network.sent) > 1
    assert log.unresolved == 3
    network.deliver()
    assert log.resolve() == open_log(calm(inner)).latest()


@pytest.mark.parametrize("changes", [{"floor": 9}, {"tags": {"t": 9}}, {"checkpoint": 1}])
def test_a_record_that_contradicts_itself_is_not_sent(inner: IsolatedMemoryFileSystem, changes: dict[str, Any]) -> None:
    head = with_versions(inner, 3)

    with pytest.raises(BadInput, match="readers would refuse it"):
        open_log(calm(inner)).append(head, draft_after(head.record, "expire", WRITER, **changes), no_rebase)

    assert open_log(calm(inner)).latest() == head


def test_resolve_says_none_when_another_took_the_position(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    log, fs = unresolved_log(inner, head)
    fence = append_fence(open_log(calm(inner)), head)

    assert log.resolve() is None
    fs.deliver_delayed()

    assert log.unresolved is None
    assert open_log(calm(inner)).latest() == fence


def test_resolve_without_anything_unresolved_asks_nobody(inner: IsolatedMemoryFileSystem) -> None:
    fs = calm(inner)

    assert open_log(fs).resolve() is None

    assert fs.count() == 0


def test_interrupt_during_the_put_leaves_the_append_to_be_resolved(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    for interrupted_call, lands in [("create", True), ("write", True), ("create", False)]:
        storage = storage_from_filesystem(calm(inner), ROOT)
        log = log_on(storage)
        interrupt_once(storage, interrupted_call, after=lands)

        with pytest.raises(KeyboardInterrupt):
            append_delta(log, head, 1)
        assert log.unresolved == head.record.v + 1
        interrupt_once(storage, "read", after=False)
        with pytest.raises(KeyboardInterrupt):  # while it looks for what became of the first
            append_delta(log, head, 2)
        entry = log.resolve()

        assert entry is not None
        assert entry == open_log(calm(inner)).latest()
        head = entry


def interrupt_once(storage: Storage, operation: str, *, after: bool) -> None:
    """Make the next create, read or put of ``storage`` raise KeyboardInterrupt before or after its effect."""
    name = {"write": "put"}.get(operation, operation)
    real: Callable[..., Any] = getattr(storage, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        delattr(storage, name)
        if after:
            real(*args, **options)
        raise KeyboardInterrupt

    setattr(storage, name, interrupted)


def test_denied_append_leaves_nothing_unresolved(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    storage = storage_from_filesystem(calm(inner), ROOT)
    storage.create = denied  # type: ignore[method-assign]  # rights that were taken away
    log = log_on(storage)

    with pytest.raises(AccessDenied):
        append_delta(log, head, 1)

    assert log.unresolved is None


def denied(key: str, data: bytes) -> CreateOutcome:
    raise AccessDenied(f"{key} was refused")


def test_denial_that_hid_a_success_is_a_success(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    storage = storage_from_filesystem(calm(inner), ROOT)
    real = storage.create

    def landed_then_denied(key: str, data: bytes) -> CreateOutcome:
        real(key, data)
        return denied(key, data)

    storage.create = landed_then_denied  # type: ignore[method-assign]  # a client that retries with stale credentials
    log = log_on(storage)

    assert append_delta(log, head, 1) == open_log(calm(inner)).latest()


def test_failing_side_object_means_nothing_was_committed(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 2)
    log = open_log(FaultyFileSystem(inner, fault=Fault(FaultKind.DISK_FULL, at=0)))
    draft = draft_after(head.record, "expire", WRITER, aborted={txn(n): n for n in range(400)})

    with pytest.raises(StorageFailure):
        log.append(head, draft, no_rebase)

    assert log.unresolved is None
    assert open_log(calm(inner)).latest() == head


def test_failing_hint_does_not_fail_the_append(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 2)
    storage = storage_from_filesystem(inner, ROOT)

    def full(key: str, _data: bytes) -> None:
        raise StorageFailure(f"no room for {key}")

    storage.put = full  # type: ignore[method-assign, assignment]  # a disk that is full for what is not created
    log = log_on(storage)

    entry = append_delta(log, head, 1)

    assert open_log(calm(inner)).latest() == entry
    assert log.unresolved is None


def test_truncated_read_back_is_read_again(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)
    other = append_tag(open_log(calm(inner)), head, "t")
    log = open_log(FaultyFileSystem(inner, fault=Fault(FaultKind.SHORT_READ, at=1)))

    entry = append_delta(log, head, 1)

    assert entry.record.v == other.record.v + 1


def test_torn_record_in_the_way_ends_in_an_unknown_outcome(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 4)
    write_raw(inner, 4, b'{"v":4,')
    log = open_log(calm(inner))

    with pytest.raises(CommitStateUnknown) as unknown:
        append_delta(log, head, 1)

    assert isinstance(unknown.value.__cause__, CorruptRecord)


def test_unknown_reader_feature_in_the_way_is_not_ours(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 4)
    newer = msgspec.structs.replace(
        head.record, v=4, parent_digest=head.digest, commit_uuid="e" * 32, reader_features=("of_tomorrow",)
    )
    write_raw(inner, 4, encode_record(newer))
    log = open_log(calm(inner))

    with pytest.raises(UnknownFeature):
        append_delta(log, head, 1)

    assert log.unresolved is None


def test_altered_bytes_under_our_uuid_are_never_called_a_success(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 4)
    storage = storage_from_filesystem(calm(inner), ROOT)

    def altered(key: str, data: bytes) -> CreateOutcome:
        record = msgspec.structs.replace(decode_record(data, 4).record, step=1_000_000)
        inner.pipe_file(f"{ROOT}/{key}", encode_record(record))
        return CreateOutcome.UNKNOWN

    storage.create = altered  # type: ignore[method-assign]  # a proxy that rewrites bodies
    log = log_on(storage)

    with pytest.raises(CommitStateUnknown) as unknown:
        append_delta(log, head, 1)

    assert isinstance(unknown.value.__cause__, CorruptRecord)
