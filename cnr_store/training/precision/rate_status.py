"""What rate control tells: what became of scales, and how exact tables are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cnr_store.encodings.scale import ScaleChoice
from cnr_store.types import AffineBits
from cnr_store.write.rate import Refinement


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """What one save did to the scale of a table that is stored as a lattice.

    Attributes
    ----------
    before, after
        The step; None before if the table is new, or was no lattice.
    reason
        One clause.
    choice
        How it was measured, where it was chosen and not halved.
    """

    before: float | None
    after: float
    reason: str
    choice: ScaleChoice | None = None


@dataclass(frozen=True, slots=True)
class TableRate:
    """How exact a table is stored now.

    Attributes
    ----------
    bits
        The width that its scale is for, or that its rows have; None where ``max_error=``, ``scale=`` or an exact
        encoding says it.
    pending
        What becomes of it at the next save; None if nothing.
    """

    bits: AffineBits | None
    pending: Refinement | None = None


@dataclass(frozen=True, slots=True)
class RateStatus:
    """What the rate control knows and wants; `CheckpointManager.rate`.

    Attributes
    ----------
    restores
        How often the state that is trained was restored since the run began: restores that nothing was saved behind do
        not count.
    tables
        By name.
    first_loss, loss
        Mean of the reported losses at the first save, and now; None if none was reported.
    """

    restores: int
    tables: Mapping[str, TableRate]
    first_loss: float | None = None
    loss: float | None = None
