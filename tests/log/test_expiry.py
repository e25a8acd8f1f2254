"""What is compacted and deleted while somebody reads it is no damage: to writers, checks and repairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cnr_store import (
    Conflict,
    RetentionPolicy,
    Store,
    TableOptions,
    Writer,
    collect_garbage,
    repair_store,
    verify_store,
)
from cnr_store.errors import DoesNotApply, MissingObject, VersionExpired
from cnr_store.format.layout import segment_prefix
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem

ROWS, DIM = 6, 2


def save(writer: Writer, step: int) -> None:
    with writer.begin(step) as txn:
        txn.write_rows("t", np.array([step % ROWS]), np.full((1, DIM), step, np.float32))
        txn.put_dense({"dense": np.full(3, step, np.float32)})


def opened(fs: Any) -> Store:
    return Store.open_on(storage_from_filesystem(fs, "store"), threads=1)


@pytest.fixture
def fs() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(fs: IsolatedMemoryFileSystem) -> Store:
    """A baseline and three deltas."""
    made = Store.create_on(storage_from_filesystem(fs, "store"))
    with made.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", np.zeros((ROWS, DIM), np.float32), options=TableOptions(scale=1.0))
            txn.put_dense({"dense": np.zeros(3, np.float32)})
        for step in (2, 3, 4):
            save(writer, step)
    return made


def raced(fs: IsolatedMemoryFileSystem, times: int = 1) -> Store:
    """The store as a process sees it while another compacts what it has, and deletes that, just before chunks are read.

    ``times`` how often; each time there is something to compact.
    """
    left = [times]

    def on_call(call: Call) -> None:
        if call.operation == "read" and ".codes/c." in call.path and left[0]:
            left[0] -= 1
            compact_and_delete(opened(fs))

    return opened(FaultyFileSystem(fs, on_call=on_call))


def compact_and_delete(store: Store) -> None:
    chain = store.head().record.chain
    if len(chain) == 1:  # from here on the training has to go on for there to be more
        with store.writer() as writer:
            writer.restore()
            save(writer, store.head().record.step + 1)
        chain = store.head().record.chain
    assert compact_run(store, run=(0, len(chain))).outcome == "committed"
    collect_garbage(store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, force=True, dry_run=False)


def column(store: Store) -> list[float]:
    return [float(value) for value in store.snapshot().table("t").read()[:, 0]]


def test_a_restore_goes_on_from_what_its_head_was_compacted_into(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    """It called that damage, and a training went back to an older checkpoint."""
    expected = column(store)

    with raced(fs).writer() as writer:
        values = np.empty((ROWS, DIM), np.float32)
        snapshot = writer.restore({"t": {"values": values}})
        assert len(snapshot.record.chain) == 1
        assert values[:, 0].tolist() == expected
        save(writer, 5)

    assert column(store) == [0, 0, 2, 3, 4, 5]


def test_a_restore_that_is_overtaken_again_and_again_says_so(
    store: Store, fs: IsolatedMemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.write.writer._RESTORES", 1)

    with raced(fs).writer() as writer:
        with pytest.raises(VersionExpired, match="compacted and deleted"):
            writer.restore()
        writer.restore()
        save(writer, 5)

    assert store.snapshot().step == 5


def test_a_check_that_is_overtaken_looks_again(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    report = verify_store(raced(fs), deep=True, threads=1)

    assert report.is_sound
    assert report.head == store.latest_version()
    assert report.restorable[:1] == (report.head,)


def test_a_check_that_is_always_overtaken_says_so(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    with pytest.raises(Conflict, match="compacted and deleted"):
        verify_store(raced(fs, times=9), deep=True, threads=1)

    assert verify_store(store, deep=True).is_sound


def test_a_repair_that_is_overtaken_goes_back_to_nothing(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    report = repair_store(raced(fs), dry_run=False, threads=1)

    assert (report.actions, report.lost, report.remaining) == ((), (), ())
    assert report.target == store.latest_version()


def test_what_is_missing_of_a_live_version_stays_damage(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    last = store.head().record.chain[-1].seg
    (codes,) = (
        stat.key for stat in store.storage.list_objects(segment_prefix(last)) if stat.key.endswith(".codes/c.0.0")
    )
    store.storage.delete([codes])

    with opened(fs).writer() as writer, pytest.raises(MissingObject, match=codes):
        writer.restore()
    assert [problem.path for problem in verify_store(store, deep=True).problems] == [codes]


def test_a_missing_shared_segment_is_named_for_the_version_that_is_read(
    store: Store, fs: IsolatedMemoryFileSystem
) -> None:
    """A reader opened for a version that expired said so of every later version that shared its segment."""
    with opened(fs).writer() as writer:
        writer.restore()
        opened(fs).tag("keeps", 3)
        save(writer, 5)
        collect_garbage(
            store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, force=True, dry_run=False
        )
        first = writer.snapshot.record.chain[0].seg
        store.storage.delete([stat.key for stat in store.storage.list_objects(segment_prefix(first))])

        with pytest.raises(MissingObject):
            writer.snapshot.table("t").read()


def test_what_a_writer_goes_on_from_was_compacted_and_deleted(store: Store, fs: IsolatedMemoryFileSystem) -> None:
    with opened(fs).writer() as writer:
        writer.restore()
        compact_and_delete(store)

        with pytest.raises(DoesNotApply, match="compacted and deleted"):
            writer.snapshot.table("t").read()
        save(writer, 5)

    assert column(store) == [0, 0, 2, 3, 4, 5]
