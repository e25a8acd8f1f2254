from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def torch_keeps_its_threads() -> Iterator[None]:
    """Benchmarks set their number, and sums of a later test would have other last bits than those of its processes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
