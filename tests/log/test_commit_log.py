"""The commit log: finding the newest version, appending beside others, damage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cnr_store.errors import (
    BadInput,
    Conflict,
    CorruptRecord,
    CorruptStore,
    Fenced,
    MissingObject,
    StorageFailure,
    TransactionAborted,
)
from cnr_store.format.commit_record import LogEntry, decode_record, encode_record
from cnr_store.format.documents import sha256
from cnr_store.format.layout import HINT, commit_key, hint_key, segment_name, state_key
from cnr_store.format.limits import MAX_RECORD_BYTES
from cnr_store.format.records import CommitRecord, Superseded
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.log_reader import READ_AHEAD, READ_ALONE
from cnr_store.log.rebase import draft_after, draft_init, rebase_tag
from cnr_store.runtime.threads import Workers
from cnr_store.storage import local, open_storage
from tests.log.logs import (
    ROOT,
    STORE,
    WRITER,
    Clock,
    append_delta,
    append_fence,
    append_tag,
    calm,
    no_rebase,
    on_a_branch_too,
    open_log,
    txn,
    with_versions,
    write_raw,
)
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.recording_os import RecordingOs


def test_first_record_is_version_zero_of_its_store(inner: IsolatedMemoryFileSystem) -> None:
    entry = open_log(calm(inner)).append_first(draft_init(WRITER))

    assert (entry.record.v, entry.record.kind, entry.record.store_uuid) == (0, "init", STORE)
    assert open_log(calm(inner)).latest() == entry


def test_second_initialization_finds_the_first(inner: IsolatedMemoryFileSystem) -> None:
    first = open_log(calm(inner)).append_first(draft_init(WRITER))

    assert open_log(calm(inner)).append_first(draft_init(WRITER)) == first


def test_append_fills_position_parent_time_and_uuid(inner: IsolatedMemoryFileSystem) -> None:
    clock = Clock()
    log = open_log(calm(inner), clock=clock)
    head = log.append_first(draft_init(WRITER))
    clock.now_s -= 500  # a clock that was set back

    entry = append_delta(log, head, 1)

    assert entry.record.v == 1
    assert entry.record.parent_digest == head.digest
    assert entry.record.ts_ms == head.record.ts_ms + 1
    assert entry.record.commit_uuid != head.record.commit_uuid
    assert log.read(1) == entry


@on_a_branch_too
def test_walk_yields_every_version_back_to_zero(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 12, prefix)

    entries = list(open_log(calm(inner), prefix).walk(head))

    assert [entry.record.v for entry in entries] == list(range(11, -1, -1))


@pytest.mark.parametrize("taken", [1, READ_ALONE, READ_ALONE + 1, 70, 200])
def test_long_walk_reads_ahead_in_few_round_trips(inner: IsolatedMemoryFileSystem, taken: int) -> None:
    head = with_versions(inner, 200)
    log = open_log(calm(inner))
    round_trips: list[int] = []

    class CountedWorkers(Workers):
        def run(self, tasks: Iterable[Callable[[], Any]]) -> list[Any]:
            found = super().run(tasks)
            round_trips.append(len(found))
            return found

    with CountedWorkers(4) as workers:
        entries = list(itertools.islice(log.walk(head, workers), taken))

    assert entries == list(itertools.islice(log.walk(head), taken))
    assert sum(round_trips) <= max(taken, READ_ALONE, 2 * taken - 1)
    assert len(round_trips) <= READ_ALONE + 6
    assert max(round_trips, default=0) <= READ_AHEAD


def test_walk_that_reads_ahead_finds_a_hole_where_it_is(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 60)
    log = open_log(calm(inner))
    inner.rm_file(f"{ROOT}/{commit_key(30)}")
    write_raw(inner, 20, b"{")

    with Workers(2) as workers:
        walk = log.walk(head, workers)
        assert [next(walk).record.v for _ in range(29)] == list(range(59, 30, -1))
        with pytest.raises(CorruptStore, match="log position 30 is empty"):
            next(walk)


def test_reading_an_empty_position_gives_none(inner: IsolatedMemoryFileSystem) -> None:
    with_versions(inner, 3)
    log = open_log(calm(inner))

    assert log.read(3) is None
    assert log.read(-1) is None


@on_a_branch_too
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("hint", [b'{"version":0}', b'{"version":2}', None, b"{torn", b'{"version":-4}', b"[]"])
def test_latest_finds_the_newest_from_any_hint(
    inner: IsolatedMemoryFileSystem, prefix: str, count: int, hint: bytes | None
) -> None:
    head = with_versions(inner, count, prefix)
    hint_path = f"{ROOT}/{hint_key(prefix)}"
    if count > 1:
        inner.rm(hint_path)
    if hint is not None:
        inner.pipe_file(hint_path, hint)

    assert open_log(calm(inner), prefix).latest() == head


@pytest.mark.parametrize("version", [40, 10**6, 10**18, 10**25])
def test_hint_beyond_the_log_is_ignored(inner: IsolatedMemoryFileSystem, version: int) -> None:
    head = with_versions(inner, 7)
    inner.pipe_file(f"{ROOT}/{HINT}", b'{"version":%d}' % version)

    assert open_log(calm(inner)).latest() == head


def test_latest_costs_a_few_reads_whatever_the_length_of_the_log(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 1_000)

    with_hint = calm(inner)
    found = open_log(with_hint).latest()
    inner.rm(f"{ROOT}/{HINT}")
    without_hint = calm(inner)
    found_again = open_log(without_hint).latest()

    assert found == found_again == head
    assert with_hint.count() == with_hint.count("read") == 3  # the hint, its position, the empty one behind it
    assert without_hint.count() == without_hint.count("read") <= 2 + 2 * 10  # 2 log2(n)


@on_a_branch_too
def test_poll_without_news_is_one_request(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 5, prefix)
    fs = calm(inner)

    assert open_log(fs, prefix).poll(head) is None

    assert [(call.operation, call.path) for call in fs.calls] == [("read", f"{ROOT}/{commit_key(5, prefix)}")]


@on_a_branch_too
def test_poll_with_news_is_one_request(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 5, prefix)
    log = open_log(calm(inner), prefix)
    before = log.read(3)
    assert before is not None
    fs = calm(inner)

    assert open_log(fs, prefix).poll(before) == head

    assert fs.count() == 1


@on_a_branch_too
def test_clean_append_is_one_create_and_one_hint(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 3, prefix)
    fs = calm(inner)

    append_delta(open_log(fs, prefix), head, 1)

    assert [(call.operation, call.path) for call in fs.calls] == [
        ("create", f"{ROOT}/{commit_key(3, prefix)}"),
        ("write", f"{ROOT}/{hint_key(prefix)}"),
    ]


def test_unknown_fields_are_kept_by_the_next_record(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 2)
    newer = msgspec.structs.replace(head.record, v=2, parent_digest=head.digest, commit_uuid="e" * 32)
    write_raw(inner, 2, encode_record(newer, {"flavour": {"a": [1, 2]}}))
    log = open_log(calm(inner))

    entry = append_delta(log, log.latest(), 1)

    assert entry.extra == {"flavour": {"a": [1, 2]}}
    assert log.read(3) == entry


@on_a_branch_too
def test_growing_lists_move_to_a_side_object_and_come_back(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 2, prefix)
    log = open_log(calm(inner), prefix)
    tags = {f"a tag with a rather long name, number {n}": 0 for n in range(400)}
    draft = draft_after(head.record, "tag", WRITER, name="x", target=0, tags=tags)

    entry = log.append(head, draft, no_rebase)

    raw = decode_record(inner.cat_file(f"{ROOT}/{commit_key(2, prefix)}"), 2)
    assert raw.record.tags == {}
    assert raw.record.state is not None
    (name,) = raw.record.state
    assert inner.exists(f"{ROOT}/{state_key(name)}"), "side objects of all logs lie at the root"
    assert log.latest() == entry
    assert entry.record.tags == tags


def test_side_object_is_put_before_its_record(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 2)
    fs = calm(inner)
    aborted = {txn(n): n for n in range(400)}

    open_log(fs).append(head, draft_after(head.record, "expire", WRITER, aborted=aborted), no_rebase)

    assert [call.path.removeprefix(f"{ROOT}/").split("/")[0] for call in fs.calls] == ["state", "commits", "hint"]


def test_side_object_is_durable_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommitLog(open_storage(tmp_path), STORE)
    head = log.append_first(draft_init(WRITER))
    shim = RecordingOs(tmp_path)
    monkeypatch.setattr(local, "os", shim)
    aborted = {txn(n): n for n in range(400)}

    log.append(head, draft_after(head.record, "expire", WRITER, aborted=aborted), no_rebase)

    calls = [(call, path.partition("/")[0]) for call, path in shim.calls]
    named, durable, visible = map(calls.index, (("replace", "state"), ("fsync", "."), ("link", "commits")))
    assert named < durable < visible
    assert ("fsync", "state") in shim.calls[named:durable]


def test_missing_or_changed_side_object_is_named(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 2)
    log = open_log(calm(inner))
    aborted = {txn(n): n for n in range(400)}
    log.append(head, draft_after(head.record, "expire", WRITER, aborted=aborted), no_rebase)
    state = decode_record(inner.cat_file(f"{ROOT}/{commit_key(2)}"), 2).record.state
    assert state is not None
    path = f"{ROOT}/{state_key(state[0])}"
    data = inner.cat_file(path)

    inner.pipe_file(path, data.replace(b"0", b"1", 1))
    with pytest.raises(CorruptStore) as changed:
        log.latest()
    inner.rm(path)
    with pytest.raises(MissingObject) as missing:
        log.latest()

    assert changed.value.version == missing.value.version == 2
    assert missing.value.path == state_key(state[0])


def test_a_record_too_large_is_refused_before_anything_is_written(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 2)
    fs = calm(inner)
    log = open_log(fs)

    with pytest.raises(BadInput) as refused:
        log.append(head, draft_after(head.record, "expire", WRITER, user={"x": "y" * MAX_RECORD_BYTES}), no_rebase)

    assert refused.value.expected == MAX_RECORD_BYTES
    assert fs.count() == 0
    assert log.unresolved is None


@on_a_branch_too
def test_loser_takes_the_next_position_behind_records_that_commute(
    inner: IsolatedMemoryFileSystem, prefix: str
) -> None:
    log = open_log(calm(inner), prefix)
    head = append_delta(log, log.append_first(draft_init(WRITER)), 1)
    other = open_log(calm(inner), prefix)
    tagged = append_tag(other, append_tag(other, head, "a"), "b")

    entry = append_delta(log, head, 2)

    assert entry.record.v == tagged.record.v + 1
    assert entry.record.parent_digest == tagged.digest
    assert entry.record.tags == {"a": 1, "b": 2}
    assert [part.seg for part in entry.record.chain] == [segment_name(0, txn(1)), segment_name(1, txn(2))]


def test_every_intervening_record_reaches_the_rebase_in_order(inner: IsolatedMemoryFileSystem) -> None:
    log = open_log(calm(inner))
    head = log.append_first(draft_init(WRITER))
    newest = head
    for name in ("a", "b", "c"):
        newest = append_tag(log, newest, name)
    seen: list[int] = []

    def rebase(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
        seen.append(intervening.record.v)
        return rebase_tag(draft, intervening)

    draft = draft_after(head.record, "tag", WRITER, name="d", target=0, tags={"d": 0})
    entry = open_log(calm(inner)).append(head, draft, rebase)

    assert seen == [1, 2, 3]
    assert entry.record.tags == {"a": 0, "b": 1, "c": 2, "d": 0}


@on_a_branch_too
def test_a_zombie_of_an_older_epoch_is_fenced(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    log = open_log(calm(inner), prefix)
    head = append_fence(log, log.append_first(draft_init(WRITER)))
    zombie_head = append_delta(log, head, 1)
    other = open_log(calm(inner), prefix)
    fenced = append_fence(other, other.latest())
    append_delta(other, fenced, 2)

    with pytest.raises(Fenced):
        append_delta(log, zombie_head, 3)
    with pytest.raises(Fenced):
        append_delta(log, log.latest(), 3, epoch=zombie_head.record.epoch)

    assert log.unresolved is None
    assert log.latest().record.chain[-1].seg.endswith(txn(2))


def test_concurrent_fences_get_different_epochs(inner: IsolatedMemoryFileSystem) -> None:
    log, other = open_log(calm(inner)), open_log(calm(inner))
    head = log.append_first(draft_init(WRITER))

    first, second = append_fence(log, head), append_fence(other, head)

    assert (first.record.epoch, second.record.epoch) == (1, 2)


def test_two_data_records_conflict(inner: IsolatedMemoryFileSystem) -> None:
    log = open_log(calm(inner))
    head = log.append_first(draft_init(WRITER))
    append_delta(open_log(calm(inner)), head, 1)

    with pytest.raises(Conflict) as refused:
        append_delta(log, head, 2)

    assert type(refused.value) is Conflict
    assert refused.value.version == 1


def test_an_aborted_transaction_cannot_commit(inner: IsolatedMemoryFileSystem) -> None:
    log = open_log(calm(inner))
    head = log.append_first(draft_init(WRITER))
    gc = open_log(calm(inner))
    gc.append(head, draft_after(head.record, "expire", WRITER, aborted={txn(2): 0}), no_rebase)

    with pytest.raises(TransactionAborted):
        append_delta(log, head, 2)


@on_a_branch_too
def test_log_without_version_zero_is_refused(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    with_versions(inner, 1, prefix)
    inner.rm(f"{ROOT}/{commit_key(0, prefix)}")

    with pytest.raises(CorruptStore) as refused:
        open_log(calm(inner), prefix).latest()

    assert (refused.value.version, refused.value.path) == (0, commit_key(0, prefix))


@on_a_branch_too
def test_hole_in_the_log_is_named(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 9, prefix)
    inner.rm(f"{ROOT}/{commit_key(4, prefix)}")

    with pytest.raises(CorruptStore) as hole:
        list(open_log(calm(inner), prefix).walk(head))

    assert (hole.value.version, hole.value.path) == (4, commit_key(4, prefix))


def test_rewritten_record_breaks_the_digest_chain(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 6)
    log = open_log(calm(inner))
    before, old = log.read(3), log.read(4)
    assert before is not None
    assert old is not None
    write_raw(inner, 4, encode_record(msgspec.structs.replace(old.record, step=99)))
    inner.pipe_file(f"{ROOT}/{HINT}", b'{"version":4}')

    with pytest.raises(CorruptRecord) as walked:
        list(log.walk(head))
    with pytest.raises(CorruptRecord):
        log.latest()
    with pytest.raises(CorruptRecord):
        log.poll(old_entry(log, 4))
    with pytest.raises(CorruptRecord):
        append_delta(log, old_entry(log, 4), 1)

    assert walked.value.version == 5


def old_entry(log: CommitLog, version: int) -> LogEntry:
    entry = log.read(version)
    assert entry is not None
    return entry


def test_torn_newest_record_is_named_and_the_one_before_still_read(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 4)
    data = encode_record(msgspec.structs.replace(head.record, v=4, parent_digest=head.digest))
    write_raw(inner, 4, data[: len(data) // 2])
    log = open_log(calm(inner))

    with pytest.raises(CorruptRecord) as torn:
        log.latest()

    assert torn.value.version == 4
    assert log.read(3) == head


@on_a_branch_too
def test_a_record_of_which_a_read_gives_half_is_not_torn(inner: IsolatedMemoryFileSystem, prefix: str) -> None:
    head = with_versions(inner, 4, prefix)
    fs = FaultyFileSystem(inner, fault=Fault(FaultKind.SHORT_READ, at=0, calls=1000))
    log = open_log(fs, prefix)

    with pytest.raises(StorageFailure, match=r"\d+ of \d+ bytes"):
        log.newest_readable()
    with pytest.raises(StorageFailure):
        log.end_at(3)

    assert open_log(calm(inner), prefix).latest() == head


def test_record_of_another_store_is_refused(inner: IsolatedMemoryFileSystem) -> None:
    with_versions(inner, 2)

    with pytest.raises(CorruptStore, match="two stores were mixed"):
        open_log(calm(inner), uuid="6" * 32).latest()


def test_digest_is_of_the_stored_bytes(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 3)

    for entry, after in itertools.pairwise(open_log(calm(inner)).walk(head)):
        assert entry.record.parent_digest == after.digest
        assert after.digest == sha256(inner.cat_file(f"{ROOT}/{commit_key(after.record.v)}"))


def test_threads_that_race_on_local_files_lose_no_tag(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, fsync=False)
    CommitLog(storage, STORE).append_first(draft_init(WRITER))

    def tag_many(worker: int) -> None:
        log = CommitLog(open_storage(tmp_path, fsync=False), STORE)
        for number in range(10):
            append_tag(log, log.latest(), f"{worker}-{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tag_many, range(4)))

    log = CommitLog(storage, STORE)
    newest = log.latest()
    assert newest.record.v == 40
    assert len(newest.record.tags) == 40
    assert len(list(log.walk(newest))) == 41


def test_record_that_supersedes_a_torn_one_is_the_newest(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 4)
    torn = b'{"v":4,'
    write_raw(inner, 4, torn)
    repaired = msgspec.structs.replace(head.record, v=5, parent_digest=sha256(torn), commit_uuid="e" * 32)
    write_raw(inner, 5, encode_record(repaired))

    assert open_log(calm(inner)).latest().record == repaired


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data.replace(b'"step":', b'"step":1')])
def test_a_damaged_record_is_not_superseded_by_the_one_behind_it(
    inner: IsolatedMemoryFileSystem, damage: Callable[[bytes], bytes]
) -> None:
    head = with_versions(inner, 5)
    write_raw(inner, 3, damage(inner.cat_file(f"{ROOT}/{commit_key(3)}")))

    with pytest.raises(CorruptRecord) as refused:
        open_log(calm(inner)).read_standing(3)

    assert refused.value.version == 3
    assert open_log(calm(inner)).read_standing(4) == head


def test_a_record_that_says_it_carries_on_another_version_is_refused(inner: IsolatedMemoryFileSystem) -> None:
    head = with_versions(inner, 4)
    write_raw(inner, 4, b"torn")
    lying = Superseded(torn=("a" * 64, sha256(b"torn")), follows=head.digest)  # of one position, it says two
    changes: dict[str, Any] = {"kind": "rollback", "target": 1, "supersedes": lying, "parent_digest": sha256(b"torn")}
    record = msgspec.structs.replace(head.record, v=5, commit_uuid="e" * 32, **changes)
    write_raw(inner, 5, encode_record(record))

    with pytest.raises(CorruptStore):
        open_log(calm(inner)).poll(head)
