"""The store that the relays of these tests copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cnr_store import Store
from tests.relay.relays import FAR, place
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.memory import QUICK


@pytest.fixture
def files() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(files: IsolatedMemoryFileSystem) -> Iterator[Store]:
    with Store.create_on(place(files, FAR), threads=2, retry=QUICK) as store:
        yield store
