"""The store that the tests of repair damage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cnr_store import Store, TableOptions
from cnr_store.storage import storage_from_filesystem
from tests.maintenance.torn_stores import ROOT, open_store, values
from tests.support.compacted import Training
from tests.support.faulty import IsolatedMemoryFileSystem


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    """Versions: 2 is a baseline of step 10, 3 and 4 are deltas of steps 20 and 30, 5 is a tag."""
    found = IsolatedMemoryFileSystem()
    store = Store.create_on(storage_from_filesystem(found, ROOT), threads=1)
    with store.writer() as writer:
        with writer.begin(step=10) as txn:
            txn.write_table("user", values(10), options=TableOptions(scale=1.0))
        for step in (20, 30):
            with writer.begin(step=step) as txn:
                rows = np.arange(step // 10, dtype=np.int64)
                txn.write_rows("user", rows, values(step)[: step // 10])
    store.tag("good", 3)
    store.close()
    return found


@pytest.fixture
def store(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    with open_store(files) as opened:
        yield opened


@pytest.fixture
def training(store: Store) -> Training:
    """A store of a baseline and three deltas, whose writer is closed."""
    training = Training(store)
    with store.writer() as writer:
        training.full(writer)
        for _ in range(3):
            training.delta(writer)
    return training
