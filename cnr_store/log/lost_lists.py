"""Reconstruct the lists of a newest record whose side objects are lost (spec, section 7.10).

Names come from the records that set and removed them, which are never deleted. The other lists come from the record
itself and the remaining side objects, and may be incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cnr_store.errors import CorruptStore
from cnr_store.format.commit_record import Layer, LogEntry, Names
from cnr_store.format.records import CommitRecord
from cnr_store.log.layers import merge_lists
from cnr_store.log.log_reader import LogReader
from cnr_store.log.side_objects import read_layer
from cnr_store.storage import Storage


def with_what_is_left(storage: Storage, log: LogReader, bare: LogEntry) -> LogEntry:
    """Return an entry with its lists, as far as they can be reconstructed. Blocks; one GET per record.

    Parameters
    ----------
    bare
        The newest readable record, without the lists of its side objects.

    Raises
    ------
    StorageFailure
    """
    record = merge_lists(bare, tuple(_layers_left(storage, bare))).record
    walked: list[CommitRecord] = []
    try:
        walked += (entry.record for entry in log.walk(bare))
    except CorruptStore:
        walked.clear()  # Names cannot be replayed past a damaged record.
    if walked:
        names = Names()
        for before in reversed(walked):
            names = names.after(before)
        pins = {branch: record.pins.get(branch, pin) for branch, pin in names.pins.items()}
        record = msgspec.structs.replace(record, tags=names.tags, channels=names.channels, pins=pins)
    return LogEntry(record, bare.digest, bare.extra)


def _layers_left(storage: Storage, bare: LogEntry) -> Iterator[Layer]:
    for digest in bare.record.state or ():
        try:
            yield read_layer(storage, bare.record.v, digest)
        except CorruptStore:
            pass
