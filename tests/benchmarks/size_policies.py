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

from cnr_store.compaction import DEFAULT_POLICY
from cnr_store.policy import Policy

POLICIES: tuple[tuple[Policy, bool], ...] = (
    ("full", False),
    ("one_shot", False),
    ("intermittent", False),
    ("consecutive", False),
    ("consecutive", True),
)
"""Policy, and whether a compaction job folds the chain beside it."""

PUBLISHED = (
    ("published: intermittent, least restores (2 bit)", 17.0, 8.0),
    ("published: intermittent, most restores (8 bit)", 6.0, 2.5),
)
"""Bandwidth and capacity of Check-N-Run on its own models (NSDI'22). The paper gives the ranges 6-17x and 2.5-8x; that
the ends are its 2-bit and its 8-bit rows follows from its 13x and 4x for quantization alone."""


def policy_stores(folder: Path, encodings: Sequence[Encoding], rescale_at: Collection[int]) -> Iterator[MeasuredStore]:
    """Yield a store for every policy and encoding."""
    for encoding in encodings:
        for policy, is_compacted in POLICIES:
            compaction = DEFAULT_POLICY if is_compacted else None
            name = f"{policy}{'-compacted' if is_compacted else ''}-{encoding.name}".replace(" ", "-")
            yield MeasuredStore(folder / name, encoding, policy, rescale_at=rescale_at, compaction=compaction)


def print_policies(report: harness.Report, stores: Sequence[MeasuredStore], fp32_bytes: int) -> None:
    """Add the tables and plots of a run in which every store saw every interval.

    Parameters
    ----------
    fp32_bytes
        Of a full checkpoint: what each interval would write and what would be kept.
    """
    intervals = len(stores[0].savings)
    rows: list[list[harness.Cell]] = [
        [name, bandwidth, capacity, *[None] * 5] for name, bandwidth, capacity in PUBLISHED
    ]
    for store in stores:
        savings = store.savings
        written = sum(saving.total for saving in savings)
        held = max(saving.held_bytes for saving in savings)
        rows.append(
            [
                store.name,
                intervals * fp32_bytes / written,
                fp32_bytes / held,
                2 * fp32_bytes / max(saving.peak_bytes for saving in savings),
                written / intervals,
                sum(saving.folded_bytes for saving in savings) / intervals,
                held,
                sum(saving.kind == "full" for saving in savings),
            ]
        )
    report.table(
        f"Policies over {intervals} intervals, times fewer bytes than an fp32 full checkpoint at each of them",
        ("policy, encoding", "bandwidth x", "capacity x", "while writing x", "bytes per interval", "of it compaction",
         "most bytes kept", "fulls"),
        rows,
        note="Bandwidth: all bytes written (records, manifests, receipts, compaction, the first full). Capacity: most "
        "bytes kept after older checkpoints were deleted, against one fp32 checkpoint; while writing: before, against "
        "two. Published figures are of models, intervals (26 % of the rows touched) and slots of their own.",
    )  # fmt: skip
    kinds = [[store.name, *cells(store.savings)] for store in stores]
    report.table("Bytes written per interval, by kind", ("policy, encoding", *columns()), kinds)
    for store in stores:
        if store.policy == "intermittent":
            report.add(
                f"{store.name}: bandwidth", intervals * fp32_bytes / sum(saving.total for saving in store.savings)
            )
    _plot(report, stores, fp32_bytes)


def _plot(report: harness.Report, stores: Sequence[MeasuredStore], fp32_bytes: int) -> None:
    """Bytes per interval, cumulative and kept, one curve per policy, for each encoding."""
    x = [float(number) for number in range(1, len(stores[0].savings) + 1)]
    for encoding in dict.fromkeys(store.encoding.name for store in stores):
        chosen = [store for store in stores if store.encoding.name == encoding]
        per_interval, cumulative, kept = {}, {}, {}
        for store in chosen:
            totals = [saving.total / fp32_bytes for saving in store.savings]
            per_interval[store.policy_name] = harness.Series(x, totals)
            cumulative[store.policy_name] = harness.Series(x, [sum(totals[: n + 1]) for n in range(len(totals))])
            kept[store.policy_name] = harness.Series(x, [saving.held_bytes / fp32_bytes for saving in store.savings])
        name = encoding.replace(" ", "-")
        unit = "fp32 full checkpoints"
        report.plot(f"bytes-{name}", f"Written per interval, {encoding}", "interval", unit, per_interval)
        report.plot(f"cumulative-{name}", f"Written so far, {encoding}", "interval", unit, cumulative)
        report.plot(f"kept-{name}", f"Kept after the save, {encoding}", "interval", unit, kept)
