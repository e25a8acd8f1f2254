"""The accelerator of this machine, for the tests that need one: a GPU, or another device of torch with streams."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from cnr_store_gpu.streams import streams_of  # noqa: E402  (which imports torch)

FOUND = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = torch.device("cuda") if FOUND is None else FOUND
STREAMS: Any = streams_of(DEVICE)  # None on Apple's GPUs
needs_accelerator = pytest.mark.skipif(
    FOUND is None or STREAMS is None,
    reason="needs an accelerator with streams: torch.accelerator.is_available() is False, or it has none",
)


def keep_busy(cycles: int) -> None:
    """Queue a wait on the current stream of a CUDA device: what does not wait for the stream reads what was before."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(cycles)
