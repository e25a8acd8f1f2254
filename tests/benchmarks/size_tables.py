"""The columns that every table of the size suite ends with: bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence

import harness
from measured_store import KINDS, Saving, total_by_kind


def columns() -> tuple[str, ...]:
    """Return the names: kinds, their sum, the same in blocks of the disk, and the dense tensors, in no ratio."""
    return (*KINDS, "total", "du", "dense")


def cells(savings: Sequence[Saving]) -> list[harness.Cell]:
    """Return the means per save, bytes."""
    count = len(savings)
    kinds = total_by_kind(savings)
    # The blocks are those of all files: less what the dense tensors' lengths say, which are some large files.
    blocks = sum(saving.written_du - saving.dense_bytes for saving in savings)
    dense = sum(saving.dense_bytes for saving in savings)
    return [round(value / count) for value in (*kinds.values(), sum(kinds.values()), blocks, dense)]
