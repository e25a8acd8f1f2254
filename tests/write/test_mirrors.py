"""A writer's mirrors: staged changes show only to their transaction, and files go with the writer."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, StorageFailure, Store, TableOptions, Writer
from cnr_store.errors import CommitStateUnknown, DoesNotApply
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.segment.shards import Shard
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.memory import store_in_memory


def writer_of(mirror: Any = "memory", folder: Path | None = None) -> tuple[Store, Writer]:
    store = store_in_memory()
    writer = store.writer(mirror=mirror, mirror_folder=None if folder is None else str(folder))
    with writer.begin(1) as txn:
        txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(scale=0.5))
        txn.write_table("e", np.ones((6, 2), np.float32), options=TableOptions.exact())
        txn.write_table("a", np.ones((6, 2), np.float32), options=TableOptions(encoding="affine", bits=4))
    return store, writer


def test_memory_is_what_was_stated() -> None:
    _, writer = writer_of()
    assert writer.mirror_bytes == 6 * 2 * 2 + 6 * 2 * 4
    assert Shard("a") not in writer.mirrors
    writer.close()
    assert writer.mirror_bytes == 0
    assert writer_of("none")[1].mirror_bytes == 0


def test_files_of_a_mirror_lie_in_its_folder_and_go_with_the_writer(tmp_path: Path) -> None:
    store, writer = writer_of("mmap", tmp_path)
    mirror = writer.mirrors.get(Shard("t"))
    assert mirror is not None
    codes = mirror.arrays["codes"]
    assert isinstance(codes, np.memmap)
    assert f" {tmp_path}/" in Path("/proc/self/maps").read_text()
    # There are no names: the mappings keep the files, and a process that is killed leaves nothing, once a folder.
    assert list(tmp_path.iterdir()) == []
    with writer.begin(2) as txn:
        txn.write_rows("t", np.asarray([3]), np.full((1, 2), 4, np.float32))
    assert store.snapshot().table("t").read()[3].tolist() == [4, 4]
    writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mirror", ["memory", "mmap"])
@pytest.mark.parametrize("rows", [0, 3, 6, 9])
def test_a_resize_is_seen_by_its_transaction_alone_until_it_wins(mirror: Any, rows: int) -> None:
    store, writer = writer_of(mirror)
    before = writer.mirrors.digest(Shard("t"))
    txn = writer.begin(2)
    txn.resize_table("t", rows)
    staged = writer.mirrors.get(Shard("t"))
    assert staged is not None
    assert staged.num_rows == rows
    assert writer.mirrors.committed_digest(Shard("t")) == before
    assert (writer.mirrors.digest(Shard("t")) == before) == (rows >= 6)
    txn.abort()
    kept = writer.mirrors.get(Shard("t"))
    assert kept is not None
    assert kept.num_rows == 6
    assert writer.mirrors.digest(Shard("t")) == kept.digest() == before
    with writer.begin(3) as txn:
        txn.resize_table("t", rows)
    grown = writer.mirrors.get(Shard("t"))
    assert grown is not None
    assert grown.num_rows == rows
    assert grown.digest() == writer.mirrors.digest(Shard("t"))
    expected = np.zeros((rows, 2), np.float32)
    expected[:6] = 1
    assert np.array_equal(store.snapshot().table("t").read(), expected)
    writer.close()


def test_a_table_that_gets_an_encoding_without_a_mirror_loses_its_mirror() -> None:
    """A full of a writer that had lost its place left the old codes, and the next delta was a difference to them."""
    store, writer = writer_of()
    store.rollback(writer.head.record.v)
    with pytest.raises(Exception, match="changed the training state"):
        writer.begin(2).commit()
    with writer.begin(3, "baseline") as txn:
        txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(encoding="affine", bits=4))
        txn.drop_table("e")
        txn.drop_table("a")
    assert Shard("t") not in writer.mirrors
    with writer.begin(4) as txn:
        txn.write_rows("t", np.asarray([2]), np.full((1, 2), 4, np.float32))
    assert store.snapshot().table("t").read()[:, 0].tolist() == [1, 1, 4, 1, 1, 1]


def test_a_full_refuses_a_mirror_whose_memory_was_changed() -> None:
    """A baseline written from it would have carried the damage on under a digest that hides it until the next read."""
    store, writer = writer_of()
    with writer.begin(2) as txn:
        txn.drop_table("a")
    version = writer.head.record.v
    mirror = writer.mirrors.get(Shard("t"))
    assert mirror is not None
    mirror.arrays["codes"][3, 1] += 1

    with pytest.raises(DoesNotApply, match=r"'t' has state digest .* restore first"):
        writer.begin(3, "baseline").commit()

    assert store.snapshot().version == version
    with pytest.raises(DoesNotApply):
        writer.begin(3, "delta")
    writer.restore()
    with writer.begin(3, "baseline"):
        pass
    assert (store.snapshot().table("t").read() == 1).all()


class FailingCall:
    """Storage whose n-th call while it is armed fails, and had no effect."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.is_armed = False
        self.has_failed = False

    def __call__(self, call: Call) -> None:
        if self.is_armed and not self.has_failed:
            self._left -= 1
            if self._left < 0:
                self.has_failed = True
                raise OSError(errno.EIO, f"injected at {call.path}")


def test_a_save_that_fails_at_any_call_moves_no_mirror_and_the_next_lands() -> None:
    """The bytes of the mirror count, not its digest alone: the next save is a difference to them."""
    files = IsolatedMemoryFileSystem()
    made = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    with made, made.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((6, 2), np.float32), options=TableOptions(scale=0.5))
    rows, values = np.asarray([1, 4]), np.full((2, 2), 4, np.float32)
    refused = 0

    for at in itertools.count():
        failing = FailingCall(at)
        view = FaultyFileSystem(files.fork(), on_call=failing)
        store = Store.open_on(storage_from_filesystem(view, "/root"), threads=1, retry=RetryPolicy(deadline_s=0.0))
        writer = store.writer()
        writer.restore()
        mirror = writer.mirrors.get(Shard("t"))
        assert mirror is not None
        before, digest = mirror.arrays["codes"].copy(), writer.mirrors.digest(Shard("t"))
        failing.is_armed = True
        has_won = False
        try:
            with writer.begin(2) as txn:
                txn.write_rows("t", rows, values)
            has_won = True
        except CommitStateUnknown:
            has_won = writer.settle() is not None
        except StorageFailure:
            refused += 1
            assert np.array_equal(mirror.arrays["codes"], before)
            assert writer.mirrors.digest(Shard("t")) == digest
        failing.is_armed = False
        with writer.begin(3) as txn:
            txn.write_rows("t", np.asarray([0]), values[:1])

        expected = np.ones((6, 2), np.float32)
        expected[[0, *rows] if has_won else [0]] = 4
        assert np.array_equal(store.snapshot().table("t").read(), expected)
        if not failing.has_failed:
            break
    assert refused > 5


def test_options_end_with_their_table() -> None:
    _, writer = writer_of("none")
    with writer.begin(2) as txn:
        txn.drop_table("a")
    assert sorted(writer.mirrors.options) == ["e", "t"]


def test_a_missing_mirror_folder_is_reported_before_anything_is_fenced(tmp_path: Path) -> None:
    store, _ = writer_of()
    head = store.head()

    with pytest.raises(BadInput, match="mirror_folder") as refused:
        store.writer(mirror="mmap", mirror_folder=str(tmp_path / "none"))

    assert refused.value.path == str(tmp_path / "none")
    assert store.head() == head


def test_a_mirror_folder_that_goes_is_a_storage_failure(tmp_path: Path) -> None:
    store, _ = writer_of()
    folder = tmp_path / "mirrors"
    folder.mkdir()
    with store.writer(mirror="mmap", mirror_folder=str(folder)) as writer:
        folder.rmdir()

        with pytest.raises(StorageFailure, match="mirror") as failed, writer.begin(2, kind="baseline") as txn:
            txn.write_table("t", np.ones((6, 2), np.float32))

    assert failed.value.path == str(folder)
