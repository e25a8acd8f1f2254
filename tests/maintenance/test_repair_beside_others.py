"""Repair during saves, other repairs and with newer libraries: nothing that they committed is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import Conflict, CorruptStore, Store, TableOptions, repair_store, verify_store
from cnr_store.errors import CommitStateUnknown, CorruptRecord, Fenced, ReadOnlyStore, UnknownFeature
from cnr_store.format.commit_record import LogEntry, encode_record
from cnr_store.format.layout import commit_key, state_key
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after, rebase_tag
from cnr_store.maintenance.verify import find_newest_whole
from tests.maintenance.torn_stores import WRITER, chunk_of, contents, flip, open_store, path, tear, values
from tests.support.faulty import IsolatedMemoryFileSystem


def test_the_writer_of_a_torn_record_learns_that_it_lost(files: IsolatedMemoryFileSystem, store: Store) -> None:
    writer = store.writer()
    writer.restore()
    torn = store.latest_version() + 1
    tear(files, torn)
    txn = writer.begin(step=40)
    txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])
    with pytest.raises(CommitStateUnknown):
        txn.commit()

    with open_store(files) as other:
        repair_store(other, dry_run=False)

    assert writer.settle() is None
    with pytest.raises(Fenced):
        writer.restore()


def test_a_writer_that_sleeps_through_a_repair_is_fenced(files: IsolatedMemoryFileSystem, store: Store) -> None:
    writer = store.writer()
    writer.restore()
    tear(files, store.latest_version() + 1)
    with open_store(files) as other:
        repair_store(other, dry_run=False)

    txn = writer.begin(step=40)
    txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])

    with pytest.raises(Fenced):
        txn.commit()
    assert np.array_equal(store.snapshot().table("user").read(), values(30))


def test_a_tag_that_meets_a_superseded_position_goes_behind_it(files: IsolatedMemoryFileSystem, store: Store) -> None:
    head = store.head()
    tear(files, 6)
    with open_store(files) as other:
        repair_store(other, dry_run=False)

    draft = draft_after(head.record, "tag", WRITER, name="late", target=3, tags={**head.record.tags, "late": 3})
    assert store.internals.log.append(head, draft, rebase_tag).record.v == 8
    assert store.tags() == {"good": 3, "late": 3}


def test_of_two_repairs_one_supersedes_and_the_other_is_told(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tear(files, 6)
    real: Callable[..., LogEntry] = CommitLog.append

    def late(self: CommitLog, *arguments: Any) -> LogEntry:
        monkeypatch.undo()
        with open_store(files) as other:
            repair_store(other, dry_run=False)
        return real(self, *arguments)

    monkeypatch.setattr(CommitLog, "append", late)

    with pytest.raises(Conflict):
        repair_store(store, dry_run=False)

    assert store.latest_version() == 7
    assert repair_store(store, dry_run=False).actions == ()


def test_a_repair_never_goes_back_from_what_was_saved_meanwhile(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a rollback was planned before a save and committed after it, and the newest checkpoint was lost."""
    with open_store(files) as other, other.writer() as writer:
        writer.restore()
        flip(files, chunk_of(store, 4))
        real = find_newest_whole

        def slow(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            with writer.begin(step=40, kind="baseline") as txn:
                txn.write_table("user", values(40), options=TableOptions(scale=1.0))
            return found

        monkeypatch.setattr("cnr_store.maintenance.repair.find_newest_whole", slow)

        with pytest.raises(Conflict):
            repair_store(store, dry_run=False)

    monkeypatch.undo()
    assert (store.head().record.kind, store.snapshot().step) == ("baseline", 40)
    assert repair_store(store, dry_run=False).actions == ()


def test_a_torn_record_that_is_restored_meanwhile_is_not_superseded(
    files: IsolatedMemoryFileSystem, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair reads a whole checkpoint before it appends; meanwhile a backup may restore the record."""
    newest = path(commit_key(5))
    record = files.cat_file(newest)
    files.pipe_file(newest, record[:60])
    real = find_newest_whole

    def slow(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        files.pipe_file(newest, record)
        return found

    monkeypatch.setattr("cnr_store.maintenance.repair.find_newest_whole", slow)

    with pytest.raises(Conflict):
        repair_store(store, dry_run=False)

    assert (store.latest_version(), store.head().record.kind) == (5, "tag")


@pytest.mark.parametrize("damage", ["torn", "chunk"])
def test_a_store_of_a_newer_library_is_not_repaired(files: IsolatedMemoryFileSystem, store: Store, damage: str) -> None:
    head = store.head()
    draft = draft_after(head.record, "expire", WRITER, writer_features=("from_the_future",))
    newest = store.internals.log.append(head, draft, rebase_tag).record.v
    if damage == "torn":
        tear(files, newest + 1)
    else:
        flip(files, chunk_of(store, 4))
    before = contents(files)

    with pytest.raises(ReadOnlyStore, match="from_the_future"):
        repair_store(store, dry_run=False)

    assert contents(files) == before


def test_a_record_that_only_a_newer_library_reads_is_not_superseded(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    head = store.head()
    newer = msgspec.structs.replace(
        head.record, v=head.record.v + 1, parent_digest=head.digest, reader_features=("from_the_future",)
    )
    files.pipe_file(path(commit_key(newer.v)), encode_record(newer))
    before = contents(files)

    with pytest.raises(UnknownFeature, match="from_the_future"):
        repair_store(store, dry_run=False)

    assert contents(files) == before


def test_a_newest_record_whose_side_object_is_gone_is_followed(files: IsolatedMemoryFileSystem) -> None:
    with open_store(files) as store:
        for number in range(12):
            store.tag(f"{number:02d}{'x' * 900}", 3)
        newest = store.latest_version()
        raw = msgspec.json.decode(files.cat_file(path(commit_key(newest))))
        files.rm_file(path(state_key(raw["state"][0])))
        store = open_store(files)
        with pytest.raises(CorruptStore):
            store.head()

        report = repair_store(store, dry_run=False)

        assert (report.torn, report.target) == ((), newest)
        assert np.array_equal(store.snapshot().table("user").read(), values(30))
        assert len(store.tags()) == 13


def test_what_a_record_without_its_side_object_committed_is_not_lost(files: IsolatedMemoryFileSystem) -> None:
    with open_store(files) as store:
        for number in range(12):
            store.tag(f"{number:02d}{'x' * 900}", 3)
        with store.writer() as writer:
            writer.restore()
            with writer.begin(step=40) as txn:
                txn.write_rows("user", np.arange(4, dtype=np.int64), values(40)[:4])
        committed = store.head().record
        raw = msgspec.json.decode(files.cat_file(path(commit_key(committed.v))))
        files.rm_file(path(state_key(raw["state"][0])))
        fence = msgspec.json.decode(files.cat_file(path(commit_key(committed.v - 1))))
        assert fence["state"] == raw["state"]
        store = open_store(files)

        report = repair_store(store, dry_run=False)

        assert (report.torn, report.target) == ((), committed.v)
        head = store.head().record
        assert (head.chain, head.step) == (committed.chain, 40)
        assert np.array_equal(store.snapshot().table("user").read(), values(40))
        assert verify_store(store, deep=True).is_sound


def test_a_record_that_supersedes_more_than_its_digests_say_is_refused(
    files: IsolatedMemoryFileSystem, store: Store
) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)
    head = store.head().record
    assert head.supersedes is not None
    for torn in ((), ("0" * 64,), (head.parent_digest,) * 7):
        forged = msgspec.structs.replace(head, supersedes=msgspec.structs.replace(head.supersedes, torn=torn))
        files.pipe_file(path(commit_key(7)), encode_record(forged))
        with pytest.raises(CorruptRecord, match=r"supersedes positions that are not directly|supersedes\.torn"):
            store.head()


def test_the_next_record_supersedes_nothing(files: IsolatedMemoryFileSystem, store: Store) -> None:
    tear(files, 6)
    repair_store(store, dry_run=False)

    store.untag("good")

    assert store.head().record.supersedes is None
