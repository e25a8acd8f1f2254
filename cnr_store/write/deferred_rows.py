"""Which changed rows of a save wait for a later one: a threshold on their change, and bounds that let none wait long.

Pure: energies in, rows that wait out. What waits is kept as lists of rows, so nothing here is proportional to a table,
and it becomes the writer's state only once the commit has won (`Mirrors.hold_back`). A waiting row is simply not in
the delta: mirror and state digest keep its old codes, and whoever saves keeps it dirty.

After DCT (Gupta et al., KDD 2021, arXiv 2010.08899): a top-k quantile that is refreshed only every so often. Its error
feedback costs nothing here, because the next difference is to what the store holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cnr_store.encodings.choose import sample_rows
from cnr_store.errors import BadInput
from cnr_store.types import RowIds
from cnr_store.write.table_options import Threshold

SAMPLE_CHANGES = 1 << 18
"""Changes that a threshold is chosen on: the standard error of the share that goes out is at most 0.1 % of the rows."""

STEPS_WITHOUT_BOUND = 4
"""How many steps of the lattice a code may be off where the user names no error."""

Energies = npt.NDArray[np.int64]
Largest = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """The rows of a shard that wait at the head, and the threshold in use.

    Attributes
    ----------
    unit
        Generation and shift of the codes that ``tau`` is a sum of squares of.
    tau
        Rows whose change is at least this go out; None before the first save that chose one.
    saves
        Saves that have used it.
    rows, waited
        Sorted row ids (n,), and for how many saves each has waited, (n,).
    """

    unit: tuple[int, int]
    tau: int | None
    saves: int
    rows: RowIds
    waited: npt.NDArray[np.int32]

    @classmethod
    def none(cls, unit: tuple[int, int]) -> Waiting:
        """Return the state before any save: no row waits, no threshold is chosen."""
        return cls(unit, None, 0, np.empty(0, np.int64), np.empty(0, np.int32))

    def cleared(self) -> Waiting:
        """Return the state after a save in which no row could wait: the threshold stays in use."""
        return replace(self, rows=self.rows[:0], waited=self.waited[:0])

    def waited_of(self, rows: RowIds) -> npt.NDArray[np.int32]:
        """Return for how many saves each of the sorted ``rows`` has waited, 0 for those that do not."""
        found = np.zeros(len(rows), np.int32)
        _, here, there = np.intersect1d(rows, self.rows, assume_unique=True, return_indices=True)
        found[here] = self.waited[there]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Deferral:
    """What one save holds back.

    Attributes
    ----------
    waits
        Which of the rows that it was given, bool (n,).
    after
        The state once it has won.
    max_error
        Every element of a waiting row is within this of what the store holds, but for the rounding of floats; absolute,
        0 if none waits.
    """

    waits: npt.NDArray[np.bool_]
    after: Waiting
    max_error: float

    @property
    def oldest(self) -> int:
        """For how many saves the row has waited that has waited longest."""
        return int(self.after.waited.max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """What a save needs to know of a shard to decide which rows wait: its threshold, its state, its lattice's step."""

    threshold: Threshold
    before: Waiting
    scale: float

    def decide(self, rows: RowIds, changed: npt.NDArray[np.bool_], energies: Energies, largest: Largest) -> Deferral:
        """Return which rows wait. Pure; no I/O.

        Parameters
        ----------
        rows
            Sorted row ids (n,) with codes in the mirror.
        changed
            Which of them some array of changed in; the others have nothing to save.
        energies, largest
            Per row the sum of the squared differences of its codes, and the largest absolute one, (n,).
        """
        tau, saves = self.before.tau, self.before.saves
        if (tau is None or saves >= self.threshold.refresh_every) and changed.any():
            tau, saves = quantile(energies[changed], self.threshold.keep), 0
        waits = changed & (largest <= self.steps)
        waits &= energies < (0 if tau is None else tau)
        waited = self.before.waited_of(rows)
        waits &= waited < self.threshold.max_wait
        after = Waiting(self.before.unit, tau, saves + 1, rows[waits], waited[waits] + np.int32(1))
        farthest = int(largest[waits].max(initial=0))
        return Deferral(waits, after, (farthest + 0.5) * self.scale if waits.any() else 0.0)

    @property
    def steps(self) -> int:
        """The largest difference of codes that a waiting row may have; -1 if not even 0 is within the error."""
        if self.threshold.max_error is None:
            return STEPS_WITHOUT_BOUND
        return math.floor(min(self.threshold.max_error / self.scale, 2.0**31) - 0.5)


def quantile(energies: Energies, keep: float) -> int:
    """Return the least change that is among the ``keep`` share of largest ones, of at least one row.

    Of more than `SAMPLE_CHANGES` rows it is that of an evenly random sample with a fixed seed.
    """
    if len(energies) > SAMPLE_CHANGES:
        energies = energies[sample_rows(len(energies), SAMPLE_CHANGES, 0)]
    kept = min(len(energies), math.ceil(keep * len(energies)))
    at = len(energies) - kept
    return int(np.partition(energies, at)[at])


def check_threshold(table: str, threshold: object, *, is_lattice: bool, has_mirror: bool) -> None:
    """Return if rows of a table may wait.

    Raises
    ------
    BadInput
        No `Threshold`, or a table whose rows are no differences: exact, raw, affine, hashed, without a mirror.
    """
    if not isinstance(threshold, Threshold):
        raise BadInput(
            f"threshold of table {table!r} is a Threshold(keep=...), found {threshold!r}", table=table, found=threshold
        )
    if not is_lattice:
        raise BadInput(
            f"table {table!r} has threshold=, which is for tables stored as a lattice (bits=, max_error= or scale=): "
            "exact, float_bits, affine and raw tables hold every change",
            table=table,
        )
    if not has_mirror:
        raise BadInput(
            f"table {table!r} has threshold=, but no code mirror to measure changes against (hashed keys, or "
            'mirror="none"); leave threshold out, or keep a mirror',
            table=table,
        )
