"""The backend of the tests of saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.faulty_runs import Backend


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.gate.set()
    for manager in made.managers:
        manager.close()
