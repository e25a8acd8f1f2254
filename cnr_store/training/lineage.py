"""Sizes and changed rows of the checkpoints since the last baseline; save policies use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cnr_store.training.background import SaveJob
from cnr_store.training.shard_ownership import RankShard
from cnr_store.types import RowIds
from cnr_store.write.policy import CheckpointSize
from cnr_store_gpu import Cumulative


@dataclass(slots=True)
class Lineage:
    """Sizes since the baseline, and rows changed since then, by shard."""

    changed: Cumulative
    sizes: list[CheckpointSize] = field(default_factory=list)

    def add(self, job: SaveJob) -> None:
        """Add a committed save."""
        size = CheckpointSize(job.transaction.kind, job.transaction.size_bytes)
        if size.kind == "baseline":
            self.sizes = [size]
            self.changed.clear()
        else:
            self.sizes.append(size)
            self.changed.add(job.taken)

    def restored(
        self, sizes: list[CheckpointSize], changed: Mapping[str, RowIds], holdings: Mapping[str, RankShard]
    ) -> None:
        """Reset after a restore; ``changed`` are row ids of whole tables, ``holdings`` this rank's shards."""
        self.sizes = sizes
        self.changed.clear()
        for name, holding in holdings.items():
            first, stop = holding.shard.rows
            rows = changed.get(holding.table, np.empty(0, np.int64))
            self.changed.add_rows(name, rows[(rows >= first) & (rows < stop)] - first)
