"""Opening, creating and reading around a damaged head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import CorruptRecord, CorruptStore, NotAStore, Store, StoreExists, TableOptions
from cnr_store.layout import HINT, commit_key
from cnr_store.storage import Storage, open_storage


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


def keys(storage: Storage) -> dict[str, bytes | None]:
    return {item.key: storage.read(item.key) for item in storage.list_objects("")}


def test_a_creation_that_died_before_the_first_record_is_finished_by_open(tmp_path: Path) -> None:
    made = Store.create(str(tmp_path / "new"))
    made.storage.delete([commit_key(0), HINT])

    opened = Store.open(str(tmp_path / "new"))

    assert opened.snapshot().is_empty
    assert opened.storage.read(HINT) == b'{"version":0}'


@pytest.mark.parametrize("gone", [[0], [0, 1], [0, 1, 2]])
@pytest.mark.parametrize("has_hint", [True, False])
def test_a_log_that_lost_its_first_records_is_not_begun_anew(store: Store, gone: list[int], *, has_hint: bool) -> None:
    """Opening wrote another position 0 and reset the hint, so that the store looked empty."""
    store.tag("later")
    store.storage.delete([commit_key(version) for version in gone] + ([] if has_hint else [HINT]))
    before = keys(store.storage)

    if has_hint:
        opened = Store.open(store.url)
        assert opened.snapshot().table("t").read().sum() == 8, "what is left can be read"
        with pytest.raises(CorruptStore) as hole:
            list(opened.log())
        assert hole.value.version == gone[-1]
    else:
        with pytest.raises(CorruptStore, match="position 0") as hole:
            Store.open(store.url)
        assert hole.value.version == 0
    assert keys(store.storage) == before


def test_open_beside_a_creation_under_way_finds_its_first_record(store: Store) -> None:
    storage = open_storage(store.url)
    read = storage.read

    def too_early(key: str, **part: int) -> bytes | None:
        """Position 0 is written just after the first look at it."""
        if key == commit_key(0):
            del storage.read  # type: ignore[method-assign]
            return None
        return read(key, **part)

    storage.read = too_early  # type: ignore[method-assign,assignment]

    assert Store.open_on(storage).latest_version() == store.latest_version()
