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
        "alone. Bytes are means per save, the baseline with the new scale among them; without JSON: row ids, codes, "
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


def print_equal_quality(
    report: harness.Report, measured: Mapping[str, Measured], pairs: Sequence[tuple[str, str]], *, goal: float = 0.5
) -> None:
    """Add the bytes of encodings that the quality suite found to be as good as each other after restores.

    Parameters
    ----------
    pairs
        An affine encoding and ours of the same quality, as ``measured`` names them. That suite says which they are for
        each number of restores; this run says what they cost on disk.

    Raises
    ------
    KeyError
        The run has no such encoding.
    """
    rows: list[list[harness.Cell]] = []
    for affine, ours in pairs:
        first, second = measured[affine], measured[ours]
        saves = len(first.savings)
        rows.append(
            [
                affine, round(first.total / saves), first.error, ours, round(second.total / saves), second.error,
                second.total / first.total, second.payload / first.payload,
            ]
        )  # fmt: skip
    columns = ("affine", "bytes per save", "error", "ours", "bytes per save", "error", "ours / affine", "without JSON")
    report.table("Bytes at equal quality, second half of the run", columns, rows)
    for affine, ours in pairs:
        name = f"equal quality: {ours} / {affine}, bytes"
        report.add(name, measured[ours].total / measured[affine].total, goal=goal)


def _affine_of(name: str) -> str | None:
    """The affine encoding that a lattice of some width is compared with."""
    return f"affine {name.removeprefix('lattice ')} greedy" if name.startswith("lattice ") else None
