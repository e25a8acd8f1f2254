"""The accelerator of this machine, for the tests that need one: a GPU, or another device that torch has."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

FOUND = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = FOUND or torch.device("cuda")
STREAMS: Any = torch.get_device_module(DEVICE)
needs_accelerator = pytest.mark.skipif(
    FOUND is None, reason="needs an accelerator: torch.accelerator.is_available() is False"
)


def keep_busy(cycles: int) -> None:
    """Queue a wait on the current stream of a CUDA device: what does not wait for the stream reads what was before."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(cycles)
