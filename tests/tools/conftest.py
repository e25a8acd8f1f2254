"""The store that most tests of the command read and change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.sample_store import build_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build_store(tmp_path / "store").close()
    return tmp_path / "store"
