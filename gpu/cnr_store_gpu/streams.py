"""The streams of a device, by torch's own module of that device, so that no code here names one kind of device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def streams_of(device: torch.device) -> Any:
    """Return the module that has the device's streams and events; None for a device that torch has none of.

    `torch.cuda` (of ROCm too), `torch.xpu`, or what another backend registered: with ``Stream``, ``Event``, ``stream``,
    ``device`` and ``current_stream``.
    """
    module = getattr(torch, device.type, None)  # None where a package beside torch has it, as XLA's
    return module if device.type != "cpu" and hasattr(module, "Stream") else None


def wait_for_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Block until what this thread has queued on the devices of these tensors is done.

    Another thread reads them on its own stream, which is not behind this one's. Does nothing for host memory.
    """
    for device in {tensor.device for tensor in tensors}:
        module = streams_of(device)
        if module is not None:
            module.current_stream(device).synchronize()
