"""Averaged write bandwidth and capacity of every policy over a long run: the published figure set with ours beside it.

Check-N-Run, section 5, measures both against fp32 checkpoints of the whole model at every interval: how many times
fewer bytes are written on average, and how many times fewer are kept so that the newest checkpoint can be restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import harness
from measured_store import Encoding, MeasuredStore
from size_tables import cells, columns

from cnr_store.maintenance.compaction import DEFAULT_POLICY
from cnr_store.write.policy import Policy

POLICIES: tuple[tuple[Policy, bool], ...] = (
    ("baseline", False),
    ("one_shot", False),
    ("intermittent", False),
    ("consecutive", False),
    ("consecutive", True),
)
"""Policy, and whether a compaction job compacts the chain beside it."""

PLOTTED = frozenset({"lattice 4", "affine 4 greedy"})
"""Encodings that the plots show."""

PUBLISHED = (
    ("published: intermittent, least restores (2 bit)", 17.0, 8.0),
    ("published: intermittent, most restores (8 bit)", 6.0, 2.5),
)
"""Bandwidth and capacity of Check-N-Run on its own models (NSDI'22). The paper gives the ranges 6-17x and 2.5-8x; that
the ends are its 2-bit and its 8-bit rows follows from its 13x and 4x for quantization alone."""


def policy_stores(folder: Path, encodings: Sequence[Encoding], rescale_at: Collection[int]) -> Iterator[MeasuredStore]:
    """Yield a store for every policy and encoding; policies that write baselines of their own keep to those."""
    for encoding in encodings:
        for policy, is_compacted in POLICIES:
            compaction = DEFAULT_POLICY if is_compacted else None
            name = f"{policy}{'-compacted' if is_compacted else ''}-{encoding.name}".replace(" ", "-")
            at = rescale_at if policy in ("baseline", "consecutive") else ()
            yield MeasuredStore(folder / name, encoding, policy, rescale_at=at, compaction=compaction)


def print_policies(report: harness.Report, stores: Sequence[MeasuredStore], fp32_bytes: int, command: str) -> None:
    """Add the tables and plots of a run in which every store saw every interval.

    Parameters
    ----------
    fp32_bytes
        Of a baseline: what each interval would write and what would be kept.
    command
        What the README says beside the headline.
    """
    intervals = len(stores[0].savings)
    rows: list[list[harness.Cell]] = [
        [name, bandwidth, None, capacity, *[None] * 5] for name, bandwidth, capacity in PUBLISHED
    ]
    for store in stores:
        savings = store.savings
        written = sum(saving.total for saving in savings)
        held = max(saving.held_bytes for saving in savings)
        rows.append(
            [
                store.name,
                intervals * fp32_bytes / written,
                intervals * fp32_bytes / (written - sum(saving.compacted_bytes for saving in savings)),
                fp32_bytes / held,
                2 * fp32_bytes / max(saving.peak_bytes for saving in savings),
                written / intervals,
                sum(saving.compacted_bytes for saving in savings) / intervals,
                held,
                sum(saving.kind == "baseline" for saving in savings),
            ]
        )
    report.table(
        f"Policies over {intervals} intervals, times fewer bytes than an fp32 baseline at each of them",
        (
            "policy, encoding", "bandwidth x", "by the trainer x", "capacity x", "while writing x",
            "bytes per interval", "of it compaction", "most bytes kept", "baselines",
        ),
        rows,
        note="Bandwidth: all bytes written (records, manifests, receipts, compaction, first baseline); by the trainer: "
        "without what the compaction job writes beside the storage. Capacity: most bytes kept after older checkpoints "
        "were deleted, against one fp32 checkpoint; while writing: before, against two. Published figures are of "
        "models, intervals (26 % of the rows touched) and slots of their own.",
    )  # fmt: skip
    kinds = [[store.name, *cells(store.savings)] for store in stores]
    report.table("Bytes written per interval, by kind", ("policy, encoding", *columns()), kinds)
    best = min((store for store in stores if store.encoding.name == "lattice 4"), key=_written)
    report.headline(
        f"times fewer bytes than fp32 checkpoints over a run, at 4-bit error ({best.policy_name})",
        f"{intervals * fp32_bytes / _written(best):.0f}x", "6-17x published, at 8 to 2 bits", command,
    )  # fmt: skip
    _plot(report, stores, fp32_bytes)


def _written(store: MeasuredStore) -> int:
    """All bytes that a store has written."""
    return sum(saving.total for saving in store.savings)


def _plot(report: harness.Report, stores: Sequence[MeasuredStore], fp32_bytes: int) -> None:
    """Bytes per interval, cumulative and kept, one curve per policy, for each encoding of `PLOTTED`."""
    x = [float(number) for number in range(1, len(stores[0].savings) + 1)]
    for encoding in sorted(PLOTTED & {store.encoding.name for store in stores}):
        chosen = [store for store in stores if store.encoding.name == encoding]
        per_interval, cumulative, kept = {}, {}, {}
        for store in chosen:
            totals = [saving.total / fp32_bytes for saving in store.savings]
            per_interval[store.policy_name] = harness.Series(x, totals)
            cumulative[store.policy_name] = harness.Series(x, [sum(totals[: n + 1]) for n in range(len(totals))])
            kept[store.policy_name] = harness.Series(x, [saving.held_bytes / fp32_bytes for saving in store.savings])
        name = encoding.replace(" ", "-")
        unit = "fp32 baselines"
        report.plot(f"bytes-{name}", f"Written per interval, {encoding}", "interval", unit, per_interval)
        report.plot(f"cumulative-{name}", f"Written so far, {encoding}", "interval", unit, cumulative)
        report.plot(f"kept-{name}", f"Kept after the save, {encoding}", "interval", unit, kept)
