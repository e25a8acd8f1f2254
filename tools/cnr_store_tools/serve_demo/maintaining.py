"""Maintenance: what cron runs as ``cnr maintain``, again and again, with a policy and a grace for a run of a minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cnr_store import CompactionPolicy, RetentionPolicy, Store, compact, maintain
from cnr_store_tools.demo.worker import Channel

POLICY = CompactionPolicy(max_chain=8, fanout=3)
KEEP = RetentionPolicy(keep_last=4)
GRACE_S = 5.0
ORPHAN_AGE_S = 60.0
"""Far below what a production store has: readers must cope with versions that go away while they serve them."""

PAUSE_S = 0.5


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Maintain ``task["store"]`` until an order comes."""
    with Store.open(task["store"]) as store:
        # A life that was killed in a compaction left a lease; force takes it, since nobody else is at work.
        compact(store, policy=POLICY, force=True)
        channel.tell("ready")
        while channel.order(PAUSE_S) is None:
            report = maintain(
                store, compaction=POLICY, retention=KEEP, grace_s=GRACE_S, orphan_age_s=ORPHAN_AGE_S, force=True
            )
            error = None if report.error is None else str(report.error)
            channel.tell("maintained", deleted_bytes=report.deleted_bytes, error=error)
    channel.tell("finished")
