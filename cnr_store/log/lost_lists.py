"""The lists of a newest record whose side objects are lost, from what else tells them (spec, section 7.10).

Names are told by the records that set and dropped them, which are never deleted. Of the other lists what the record
itself and the side objects that are left say has to do.
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
    """Return an entry with what can be had of its lists. Blocks: a GET for each record of the log, and some more.

    Parameters
    ----------
    bare
        The newest record that can be read, without the lists of its side objects.

    Raises
    ------
    StorageFailure
    """
    record = merge_lists(bare, tuple(_layers_left(storage, bare))).record
    walked: list[CommitRecord] = []
    try:
        walked += (entry.record for entry in log.walk(bare))
    except CorruptStore:
        walked.clear()  # What the records behind the damage named is not known.
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
