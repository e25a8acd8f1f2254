"""Memory that is kept between saves: a fresh gigabyte costs more in page faults than in copying.

It must be used by one save at a time: whoever takes a buffer again gets the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

GROWTH = 1.125
"""Spare room of a buffer that had to grow: row counts drift, and each growth pays page faults again."""

Key = tuple[str, str, str]
"""What a buffer is for: (use, table, name)."""


@dataclass(slots=True)
class KeptMemory:
    """Flat buffers by use, grown when they are too small."""

    _flat: dict[tuple[Key, torch.dtype, torch.device], torch.Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.numel() * flat.element_size() for flat in list(self._flat.values()))

    def take(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        at_most: int | None = None,
        pinned: bool = False,
    ) -> torch.Tensor:
        """Return contiguous memory of ``shape``: the buffer's, so what it held is overwritten.

        Parameters
        ----------
        key
            What it is for; the same key gets the same memory again.
        shape, dtype, device
            Of the tensor that is returned.
        at_most
            Elements that will never be exceeded: there is no spare room beyond.
        pinned
            Page-locked host memory.
        """
        needed = math.prod(shape)
        place = (key, dtype, torch.device(device))
        flat = self._flat.get(place)
        if flat is None or flat.numel() < needed:
            self._flat.pop(place, None)
            del flat  # before the larger one is allocated, so that the peak is one buffer, not two
            room = int(needed * GROWTH)
            if at_most is not None:
                room = min(room, max(at_most, needed))
            flat = torch.empty(room, dtype=dtype, device=device, pin_memory=pinned)
            self._flat[place] = flat
        return flat[:needed].view(shape)
