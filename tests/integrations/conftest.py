"""A prefix of its own for each test, and scripts that take few rows at once."""

from __future__ import annotations

import uuid

import pytest

from cnr_store.integrations.redis import sink as sink_module


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "CHUNK_ROWS", 20)
