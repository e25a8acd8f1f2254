"""A version that has expired: the error, and whether it did during a read: missing objects are no damage then.

Spec, CNR-GC-12.
"""

from __future__ import annotations

from cnr_store.errors import CnrStoreError, VersionExpired
from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord
from cnr_store.log.log_reader import LogReader


def expired_by(log: LogReader, version: int) -> CommitRecord | None:
    """Return the newest record of a log if the version is not live by it; None if it is, or if unknown.

    Call it when an object of the version is missing, before reporting damage. A few GETs.
    """
    try:
        newest = log.latest().record
    except CnrStoreError:
        return None  # The caller reports the missing object.
    return None if is_live(newest, version) else newest


def version_expired(version: int, head: CommitRecord, place: str = "") -> VersionExpired:
    """Return the error of a version that is not live by a record; ``place`` names the store or branch."""
    return VersionExpired(
        f"version {version}{place and f' of {place}'} has expired: below version {head.floor} only those remain that a "
        f"tag, channel, branch, lease or policy keeps; the newest is {head.v}",
        version=version,
    )
