"""The maintenance process: repeats ``cnr maintain`` with a policy and a grace period for a run of a minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cnr_store import CompactionPolicy, RetentionPolicy, Store, compact, maintain
from cnr_store_tools.demo.worker import Channel

POLICY = CompactionPolicy(max_chain=8, fanout=3)
KEEP = RetentionPolicy(keep_last=4)
GRACE_S = 5.0
ORPHAN_AGE_S = 60.0
"""Far below a production value, so that versions are deleted while readers serve them."""

PAUSE_S = 0.5


def play(task: Mapping[str, Any], channel: Channel) -> None:
    """Maintain ``task["store"]`` until an order arrives."""
    with Store.open(task["store"]) as store:
        # A killed compaction leaves a lease; force ignores it, because no other process compacts.
        compact(store, policy=POLICY, force=True)
        channel.report("ready")
        while channel.order(PAUSE_S) is None:
            report = maintain(
                store, compaction=POLICY, retention=KEEP, grace_s=GRACE_S, orphan_age_s=ORPHAN_AGE_S, force=True
            )
            error = None if report.error is None else str(report.error)
            channel.report("maintained", deleted_bytes=report.deleted_bytes, error=error)
    channel.report("finished")
