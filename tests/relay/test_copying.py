"""The copy of one segment: complete if it has its manifest, whatever was there before, in a fixed order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.format.documents import sha256
from cnr_store.format.layout import MANIFEST, segment_key, state_key
from cnr_store.format.records import ChainEntry
from cnr_store.relay.copier import copy_side_object
from cnr_store.relay.trimming import delete_segment
from cnr_store.runtime.threads import Throttle
from cnr_store.segment.copying import copy_segment, has_segment
from cnr_store.storage import Storage, storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "store"), fsync=False, threads=1)
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.write_table("t", np.zeros((10, 2), np.float32), options=TableOptions(scale=1.0))
    return store


@pytest.fixture
def target() -> Storage:
    return storage_from_filesystem(IsolatedMemoryFileSystem(), "/target")


def entry_of(store: Store) -> ChainEntry:
    return store.head().record.chain[-1]


def copy(store: Store, target: Storage) -> None:
    copy_segment(store.storage, target, entry_of(store), store.internals.workers, Throttle(None))


def noted(target: Storage, *names: str) -> list[str]:
    """The keys that these calls of the storage are about, from now on."""
    calls: list[str] = []

    def noting(real: Any) -> Any:
        def call(keys: Any, *args: Any) -> Any:
            keys = keys if isinstance(keys, str) else list(keys)
            calls.extend([keys] if isinstance(keys, str) else keys)
            return real(keys, *args)

        return call

    for name in names:
        setattr(target, name, noting(getattr(target, name)))
    return calls


def test_a_segment_was_copied_if_its_manifest_is_the_one_that_is_named(store: Store, target: Storage) -> None:
    entry = entry_of(store)
    key = segment_key(entry.seg, MANIFEST)
    assert not has_segment(target, entry)

    copy(store, target)
    assert has_segment(target, entry)

    stored = target.read(key, stop=1 << 20)
    assert stored is not None
    target.put(key, stored[:-1] + b"x")
    assert not has_segment(target, entry)
    copy(store, target)
    assert has_segment(target, entry)


def test_a_manifest_comes_last_and_goes_first(store: Store, target: Storage) -> None:
    key = segment_key(entry_of(store).seg, MANIFEST)
    put = noted(target, "put")
    copy(store, target)
    assert put[-1] == key
    assert len(put) > 1

    deleted = noted(target, "delete")
    delete_segment(target, entry_of(store).seg, written_before_ms=0)
    assert deleted[0] == key
    assert sorted(deleted) == sorted(put)


def test_a_side_object_of_other_bytes_is_not_copied(store: Store, target: Storage) -> None:
    digest = sha256(b"{}")
    store.storage.put(state_key(digest), b'{"a":1}')

    with pytest.raises(CorruptStore, match="does not match its name"):
        copy_side_object(store.storage, target, digest, Throttle(None))

    assert list(target.list_objects("")) == []
