"""Tables with more rows than the checkpoint that they were restored from: the next save records the new size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from cnr_store.errors import Unsupported
from cnr_store.format.records import TableSchema
from cnr_store.training.matching import Resize, RestorePlan
from cnr_store.training.replicated_rows import taken_rows
from cnr_store.training.shard_ownership import Holdings
from cnr_store.write.policy import Policy
from cnr_store.write.transaction import Transaction
from cnr_store_gpu import RowTracker


def check_resizable(plan: RestorePlan, holdings: Holdings) -> None:
    """Return if a training that has more rows than the checkpoint can save them.

    Raises
    ------
    Unsupported
        Several ranks, or shards: nobody holds the whole table.
    """
    if plan.resized and holdings.placement is not None:
        table = min(plan.resized)
        raise Unsupported(
            f"table {table!r} has more rows than the stored one, and resize= is for trainings of one process that "
            "holds its tables whole; resize it in such a one, save, and go on from that checkpoint",
            table=table, expected=plan.resized[table], found=holdings.tables[table][0],
        )  # fmt: skip


@torch.no_grad()
def fill_new_rows(plan: RestorePlan, resize: Resize | None) -> None:
    """Set rows beyond the stored tables to the tables' fill, if the caller wants it; no I/O."""
    if resize == "fill":
        for one in plan.shards:
            one.shard.weight.detach()[one.num_stored :].fill_(one.schema.fill)


@dataclass(slots=True)
class Growing:
    """What a training has to tell of its tables' sizes; ``rows``: table to the rows that it has now."""

    rows: dict[str, int] = field(default_factory=dict)

    def restored(self, plan: RestorePlan, holdings: Holdings, policy: Policy, tracker: RowTracker) -> set[str]:
        """Take notice of a restore and mark the new rows; returns tables that the next save must write whole."""
        resized = plan.resized
        self.rows = {table: holdings.tables[table][0] for table in resized}
        for name, holding in holdings.by_name.items():
            if holding.table in resized:
                num_rows = holding.shard.rows[1] - holding.shard.rows[0]
                new = np.arange(resized[holding.table], num_rows, dtype=np.int64)
                tracker.give_back(taken_rows(name, num_rows, new))
        return set() if policy == "consecutive" else set(self.rows)

    def applied_to(self, schemas: Mapping[str, TableSchema]) -> dict[str, TableSchema]:
        """Return stored schemas as the next save will leave them. Pure."""
        return {
            name: msgspec.structs.replace(schema, num_rows=self.rows.get(name, schema.num_rows))
            for name, schema in schemas.items()
        }

    def stage(self, transaction: Transaction, whole: set[str]) -> set[str]:
        """Resize in a delta what is not written ``whole``; returns what a baseline must be given whole."""
        if transaction.kind == "baseline":
            return set(self.rows)
        for table in self.rows.keys() - whole:
            transaction.resize_table(table, self.rows[table])
        return set()

    def won(self) -> None:
        """A save that said it is committed."""
        self.rows.clear()
