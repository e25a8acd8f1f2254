"""Maintenance: what cron runs as ``cnr maintain``, again and again, with a policy and a grace for a minute's life."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cnr_store import CompactionPolicy, RetentionPolicy, Store, compact_chain, maintain
from cnr_store_tools.serve_demo.channel import Channel

POLICY = CompactionPolicy(max_chain=8, fanout=3)
KEEP = RetentionPolicy(keep_last=4)
GRACE_S = 5.0
ORPHAN_AGE_S = 60.0
"""Far below what a production store has: readers must cope with versions that go away while they stand on them."""

PAUSE_S = 0.5


def play(order: Mapping[str, Any], channel: Channel) -> None:
    """Maintain ``order["store"]`` until an order comes."""
    with Store.open(order["store"]) as store:
        # A life that was killed in a fold left a note that it is at work; nobody else is.
        first = compact_chain(store, policy=POLICY, force=True)
        channel.tell("ready")
        _tell_folds(channel, first)
        while channel.order(PAUSE_S) is None:
            report = maintain(
                store, compaction=POLICY, retention=KEEP, grace_s=GRACE_S, orphan_age_s=ORPHAN_AGE_S, force=True
            )
            for stage in report.stages:
                _tell_folds(channel, stage.compactions)
            channel.tell(
                "maintained", outcome=report.outcome, deleted_bytes=report.deleted_bytes,
                error=None if report.error is None else str(report.error),
            )  # fmt: skip
    channel.tell("finished")


def _tell_folds(channel: Channel, compactions: Any) -> None:
    for report in compactions:
        if report.outcome == "committed":
            channel.tell("folded", version=report.version, size_bytes=report.bytes_out)
