"""The training of the tests of loaders, and the files of its store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.loaders import Flaky, Training


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.writer.close()
    for store in [made.store, *made.opened]:
        store.close()


@pytest.fixture
def fs(training: Training) -> Flaky:
    return Flaky(training.files)
