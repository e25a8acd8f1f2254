"""A version that expires while it is read: what is missing of it then is no damage (spec, CNR-GC-12)."""

from __future__ import annotations

from cnr_store.errors import CnrStoreError
from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord
from cnr_store.log.log_reader import LogReader


def expired_by(log: LogReader, version: int) -> CommitRecord | None:
    """Return the newest record of a log if a version is not live by it; None if it is, or that cannot be told.

    For whoever misses an object of that version, before that is called damage. A few GETs.
    """
    try:
        newest = log.latest().record
    except CnrStoreError:
        return None  # What is missing is the error to tell.
    return None if is_live(newest, version) else newest
