"""The sizes of the checkpoints that a policy decides on, read back from the log after a restart."""

from __future__ import annotations

from collections.abc import Iterable

from cnr_store.format.records import CommitRecord
from cnr_store.write.policy import CheckpointSize, Policy


def sizes_of_chain(record: CommitRecord) -> list[CheckpointSize]:
    """Return the sizes of a record's own chain. Pure."""
    return [CheckpointSize(e.kind, e.bytes) for e in record.chain]


def sizes_since_baseline(policy: Policy, records: Iterable[CommitRecord]) -> list[CheckpointSize]:
    """Return the sizes since the baseline of the newest record, oldest first.

    Parameters
    ----------
    records
        Newest first. `intermittent` reads more than one, because a chain has only the last of its deltas.
    """
    walk = iter(records)
    newest = next(walk)
    sizes = sizes_of_chain(newest)
    if policy != "intermittent" or len(sizes) < 2:
        return sizes
    baseline, last = newest.chain[0], newest.chain[-1]
    deltas = {last.seg: last.bytes}
    for record in walk:
        if not record.chain or record.chain[0].seg != baseline.seg:
            if record.kind in ("baseline", "compact", "delta"):
                break
            continue
        if record.kind == "baseline":
            break
        if record.kind == "delta" and len(record.chain) > 1:
            deltas.setdefault(record.chain[-1].seg, record.chain[-1].bytes)
    return [sizes[0], *(CheckpointSize("delta", size) for size in reversed(deltas.values()))]
