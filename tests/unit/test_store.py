"""Opening, creating and reading around a damaged head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import CorruptRecord, NotAStore, Store, StoreExists, TableOptions
from cnr_store.layout import commit_key


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(str(tmp_path / "store"))
    with made.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    return made


def test_a_folder_without_identity_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(NotAStore):
        Store.open(str(tmp_path))


def test_a_second_create_is_refused(store: Store) -> None:
    with pytest.raises(StoreExists):
        Store.create(store.url)


def test_readers_serve_the_version_before_a_torn_record_and_writers_refuse(store: Store) -> None:
    torn = store.latest_version() + 1
    store.storage.put(commit_key(torn), b'{"v":')

    with pytest.warns(RuntimeWarning, match=f"serving version {torn - 1}"):
        snapshot = store.snapshot()

    assert snapshot.version == torn - 1
    assert snapshot.table("t").read().sum() == 8
    with pytest.raises(CorruptRecord):
        store.writer()
