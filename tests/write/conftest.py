"""The world of the tests of bad input."""

from __future__ import annotations

import pytest

from tests.write.world import World


@pytest.fixture
def world() -> World:
    return World()
