"""The store of the tests of garbage collection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cnr_store import Store
from tests.maintenance.gc.stores import armed, fill, on
from tests.support.faulty import IsolatedMemoryFileSystem


@pytest.fixture
def fs() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()


@pytest.fixture
def store(fs: IsolatedMemoryFileSystem) -> Store:
    """Versions 2 to 7: baseline, delta, delta, baseline, delta, delta."""
    made = Store.create_on(on(fs))
    assert fill(made) == [2, 3, 4, 5, 6, 7]
    return made


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    armed[0] = False
    yield
    armed[0] = False
