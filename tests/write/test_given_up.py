"""A save or a compaction whose objects a collection deletes while they are written says that it was given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from cnr_store import RetentionPolicy, Store, TableOptions, Writer, collect_garbage
from cnr_store.errors import TransactionAborted
from cnr_store.maintenance.compaction import compact_run
from cnr_store.storage.local import LocalStorage
from tests.support.snapshot_bytes import bytes_of


class RacedStorage(LocalStorage):
    """Does something once, just before the folders of objects become durable."""

    action: Callable[[], object] | None = None

    def sync_folders(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if self.action is not None and any(key.startswith("data/") for key in keys):
            action, self.action = self.action, None
            action()
        super().sync_folders(keys)


def save(writer: Writer, step: int) -> None:
    with writer.begin(step) as txn:
        txn.write_rows("t", np.arange(2), np.full((2, 2), step, np.float32))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(str(tmp_path / "store"))
    with made.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
        save(writer, 2)
    return made


def raced(store: Store) -> Store:
    """The store in another process, whose folders a collection empties before they are synced."""
    storage = RacedStorage(store.url)

    def collect() -> None:
        collect_garbage(
            store, policy=RetentionPolicy(keep_last=9), grace_s=0, orphan_age_s=0, force=True, dry_run=False
        )

    storage.action = collect
    return Store.open_on(storage)


def test_a_save_whose_folders_went_says_that_it_was_given_up(store: Store) -> None:
    """It said that the storage had failed, which a restore and another try would not have mended."""
    with raced(store) as slow, slow.writer() as writer:
        writer.restore()
        with pytest.raises(TransactionAborted):
            save(writer, 3)
        writer.restore()
        save(writer, 3)

    assert store.snapshot().step == 3


def test_a_compact_whose_folders_went_says_that_it_was_given_up(store: Store) -> None:
    before = bytes_of(store.snapshot())

    with raced(store) as slow:
        assert compact_run(slow, run=(0, 2)).outcome == "abandoned"

    assert compact_run(store, run=(0, 2)).outcome == "committed"
    assert bytes_of(store.snapshot()) == before
