"""The files of the tests of the log."""

from __future__ import annotations

import pytest

from tests.support.faulty import IsolatedMemoryFileSystem


@pytest.fixture
def inner() -> IsolatedMemoryFileSystem:
    return IsolatedMemoryFileSystem()
