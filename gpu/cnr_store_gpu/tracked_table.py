"""What the tracker knows of one table.

Why this module exists: model tables and shards of the caller differ in who looks them up and who says that they were
written; everything else about them is the same, and is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cnr_store_gpu.bitmap import RowBitmap
from cnr_store_gpu.optimizers import Movement, RowMovement


@dataclass(slots=True, eq=False)
class Watched:
    """What the hooks know of one table; everything changes in eager code only, never in what dynamo traces."""

    table: str
    num_rows: int
    weight: torch.Tensor | None
    bitmap: RowBitmap
    first_word: int  # in the bitmap
    place: int  # in the ledger
    is_shard: bool
    stamp: tuple[int, int] | None = None
    mates: tuple[Watched, ...] = ()  # shards in the same memory: a write to one counts as a version of all
    optimizer: torch.optim.Optimizer | None = None
    is_stepped: bool = False  # whether there is an optimizer, for code that dynamo traces
    group_key: tuple[object, ...] = ()  # what `movement` was decided from
    movement: RowMovement | None = None
    declared: bool = False  # the caller marked rows, so a change of version until the next step or take is theirs
    marked: bool = False  # rows were marked in this interval by other than a lookup
    says_updated: bool = False  # the caller tells of its updates
    has_source: bool = False
    reach: Movement = Movement.TOUCHED  # the furthest that a step reached since the last take
    followed: RowMovement | None = None  # the movement that `reach` already has
    keeps_ever: bool = False
    stepped: bool = False  # the running step has a gradient for it

    def begin_interval(self) -> None:
        """Forget what steps and writers did in the last one."""
        self.reach, self.followed, self.marked = Movement.TOUCHED, None, False

    def restamp(self) -> None:
        """Take the present weights as known."""
        self.stamp = stamp_of(self.weight)


def stamp_of(weight: torch.Tensor | None) -> tuple[int, int] | None:
    """Return what changes with in-place writes (but those through ``.data``) and with another storage.

    None for no weight, and for one that counts no versions. Reads the host's bookkeeping only.
    """
    if weight is None or weight.is_inference():
        return None
    return weight._version, weight.data_ptr()
