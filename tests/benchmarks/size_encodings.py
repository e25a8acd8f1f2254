"""Encodings compared at equal mean squared error of the touched rows, and at equal quality of the restored model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import harness
from dlrm_trace import Interval
from measured_store import MeasuredStore, Saving
from size_tables import cells, columns

BITS = (2, 4, 8)
AGAINST_AFFINE = {2: 0.35, 4: 0.45, 8: 0.7}
EQUAL = 1.02
"""The error of a lattice over that of affine rows up to which they count as equal."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One store over a stretch of a run.

    Attributes
    ----------
    savings
        What each save cost.
    error
        Mean squared error of the touched rows, the mean over the intervals that were read back.
    elements
        Mean number of elements of the touched rows.
    """

    savings: Sequence[Saving]
    error: float
    elements: float

    @property
    def total(self) -> int:
        """Bytes written, without dense tensors."""
        return sum(saving.total for saving in self.savings)

    @property
    def payload(self) -> int:
        """Bytes that grow with rows: without documents, manifests, receipts and records."""
        kinds = ("rows", "codes", "scales", "slots")
        return sum(saving.written[kind] for saving in self.savings for kind in kinds)

    @property
    def deltas(self) -> list[Saving]:
        """The savings that are deltas."""
        return [saving for saving in self.savings if saving.kind == "delta"]

    @property
    def delta_payload(self) -> int:
        """`payload` of the deltas alone."""
        return Measured(self.deltas, self.error, self.elements).payload


class ErrorMeter:
    """Collects the error of stores at some intervals."""

    def __init__(self, intervals: Iterable[int]) -> None:
        self._at = frozenset(intervals)
        self._found: dict[str, list[float]] = {}

    def read(self, number: int, stores: Iterable[MeasuredStore], interval: Interval) -> None:
        """Read the touched rows of each store back, if interval ``number`` is one of those chosen."""
        if number in self._at:
            for store in stores:
                self._found.setdefault(store.encoding.name, []).append(store.error(interval))

    def mean(self, encoding: str) -> float:
        """Return the mean over the intervals read."""
        found = self._found[encoding]
        return sum(found) / len(found)


def print_encodings(report: harness.Report, title: str, measured: Mapping[str, Measured]) -> None:
    """Add the table of encodings: error, bytes by kind, bits per element, ratio to affine rows of the same width."""
    rows: list[list[harness.Cell]] = []
    for name, one in measured.items():
        affine = measured.get(_affine_of(name) or "")
        codes = sum(saving.written["codes"] for saving in one.deltas) / max(1, len(one.deltas))
        rows.append(
            [
                name,
                one.error,
                None if affine is None else one.error / affine.error,
                8 * codes / one.elements,
                None if affine is None else one.total / affine.total,
                None if affine is None else one.payload / affine.payload,
                None if affine is None else one.delta_payload / affine.delta_payload,
                *cells(one.savings),
            ]
        )
    report.table(
        title,
        ("encoding", "error", "/ affine's", "bits/el", "bytes / affine's", "without JSON", "deltas alone", *columns()),
        rows,
        note="Error: mean squared, of touched rows as the store gives them back. Bits per element: codes of the deltas "
        "alone. Bytes are means per save, the full that chose the scale anew among them; without JSON: row ids, codes, "
        "row parameters and slots; deltas alone: the same of deltas.",
    )


def add_goals(report: harness.Report, label: str, measured: Mapping[str, Measured], *, with_json: bool = True) -> None:
    """Add the ratios of lattices to affine rows, with the goals.

    ``with_json`` False puts the goal on the bytes that grow with rows, for tables so small that documents are most of
    a delta; the ratio of all bytes stands beside it.
    """
    for bits in BITS:
        lattice, affine = measured.get(f"lattice {bits}"), measured.get(f"affine {bits} greedy")
        if lattice is None or affine is None:
            continue
        name = f"{label}: lattice {bits}"
        report.add(f"{name}, error / affine's", lattice.error / affine.error, goal=EQUAL)
        goal = AGAINST_AFFINE[bits]
        report.add(f"{name}, bytes / affine's", lattice.total / affine.total, goal=goal if with_json else None)
        report.add(
            f"{name}, bytes / affine's, without JSON",
            lattice.payload / affine.payload,
            goal=None if with_json else goal,
        )


@dataclass(frozen=True, slots=True)
class QualityPoint:
    """What restores with one encoding did to a model.

    Attributes
    ----------
    encoding
        As the size suite calls it, "lattice 4".
    restores
        How often the run was restored.
    loss
        Relative loss of quality (AUC or logloss, as the caller chose) against the uninterrupted run.
    allowed
        The loss that still counts as none: 0.01 %, or the spread of the uninterrupted seeds.
    """

    encoding: str
    restores: int
    loss: float
    allowed: float


@dataclass(frozen=True, slots=True)
class CheapestPair:
    """For one number of restores the cheapest affine and the cheapest other encoding that keep the quality."""

    restores: int
    affine: tuple[str, float] | None
    ours: tuple[str, float] | None

    @property
    def ratio(self) -> float | None:
        """Bytes of ours over those of affine rows; None where one side has nothing that keeps the quality."""
        return None if self.affine is None or self.ours is None else self.ours[1] / self.affine[1]


def cheapest_at_equal_quality(
    bytes_per_save: Mapping[str, float], points: Sequence[QualityPoint]
) -> list[CheapestPair]:
    """Return, by ascending number of restores, what each side needs at least to keep the quality. Pure.

    >>> points = [QualityPoint("affine 4 greedy", 3, 5e-5, 1e-4), QualityPoint("lattice 2", 3, 2e-4, 1e-4),
    ...           QualityPoint("lattice 3", 3, 9e-5, 1e-4)]
    >>> cheapest_at_equal_quality({"affine 4 greedy": 100.0, "lattice 2": 30.0, "lattice 3": 40.0}, points)[0].ratio
    0.4
    """
    pairs = []
    for restores in sorted({point.restores for point in points}):
        kept = [
            (point.encoding, bytes_per_save[point.encoding])
            for point in points
            if point.restores == restores and point.loss <= point.allowed and point.encoding in bytes_per_save
        ]
        affine = [one for one in kept if one[0].startswith("affine")]
        ours = [one for one in kept if not one[0].startswith("affine")]
        cheapest = (min(side, key=lambda one: one[1], default=None) for side in (affine, ours))
        pairs.append(CheapestPair(restores, *cheapest))
    return pairs


def print_equal_quality(
    report: harness.Report, bytes_per_save: Mapping[str, float], points: Sequence[QualityPoint], *, goal: float = 0.5
) -> None:
    """Add the table of `cheapest_at_equal_quality` and its ratios."""
    pairs = cheapest_at_equal_quality(bytes_per_save, points)
    rows: list[list[harness.Cell]] = [
        [
            pair.restores,
            *(pair.affine or ("none keeps it", None)),
            *(pair.ours or ("none keeps it", None)),
            pair.ratio,
        ]
        for pair in pairs
    ]
    report.table(
        "Smallest bytes per save at which the quality is kept",
        ("restores", "affine", "bytes", "ours", "bytes", "ours / affine"),
        rows,
    )
    for pair in pairs:
        if pair.ratio is not None:
            report.add(f"equal quality after {pair.restores} restores: bytes / affine's", pair.ratio, goal=goal)


def _affine_of(name: str) -> str | None:
    """The affine encoding that a lattice of some width is compared with."""
    return f"affine {name.removeprefix('lattice ')} greedy" if name.startswith("lattice ") else None
