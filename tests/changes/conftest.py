"""The store of the tests of change streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cnr_store import Store
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    with Store.create_on(storage_from_filesystem(files, "/root"), threads=1) as made:
        yield made
