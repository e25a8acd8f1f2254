"""Decides from records alone what a relay copies next. Pure.

A relay copies a log in order, position by position, and all objects of a record before the record. If a version expired
at the source before its segments were copied, the relay continues with the next live version. It also copies the
records in between, because a log has no holes. It copies them after the newer record and in descending order, so that
no reader finds one of them at the end of the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from cnr_store.errors import CnrStoreError, CorruptRecord
from cnr_store.format.commit_record import LogEntry, decode_record, is_live, named_versions
from cnr_store.format.documents import sha256
from cnr_store.format.records import CommitRecord


def next_live(head: CommitRecord, version: int) -> int:
    """Return the first version from ``version`` on that the source's newest record lists as live, or its own.

    >>> from cnr_store.log.rebase import draft_init
    >>> from cnr_store.format.records import WriterInfo
    >>> import msgspec
    >>> init = draft_init(WriterInfo(host="", lib="", run_id=""))
    >>> head = msgspec.structs.replace(init, v=9, floor=7, kept=(3, 5), expired=(7,))
    >>> [next_live(head, version) for version in (2, 4, 6, 9)]
    [3, 5, 8, 9]
    """
    below = [one for one in named_versions(head).union(head.kept) if version <= one < head.v and is_live(head, one)]
    # Above the floor all versions are live except the listed expired ones: at most one step for each of these.
    above = next((one for one in range(max(version, head.floor), head.v) if is_live(head, one)), head.v)
    return min([*below, above]) if head.kind != "close" else head.v


def first_version(head: CommitRecord, start: int | None, begins: int) -> int | None:
    """Return the first version of a new relay: ``start``, or the oldest that a channel names; None if there is none.

    A relay never has position 0. This distinguishes it from a store.

    Parameters
    ----------
    begins
        The first position of the source's log: above 0 if the source is a relay.
    """
    if head.v < 1:
        return None
    wanted = min([head.v, *head.channels.values()]) if start is None else start
    return max(wanted, begins, 1)


def versions_of_channels(record: CommitRecord, first: int) -> tuple[int, ...]:
    """Return the other versions that a record's channels name and whose records the relay has."""
    named = {version for version in record.channels.values() if first <= version < record.v}
    return tuple(sorted(version for version in named if is_live(record, version)))


@dataclass(frozen=True, slots=True)
class RawRecord:
    """The bytes at one log position."""

    version: int
    data: bytes


class Descent:
    """Checks the bytes of a log from its newest record downwards: each record has the digest of the one before."""

    def __init__(self, newest: LogEntry) -> None:
        self.version = newest.record.v
        self._expected: dict[int, str] = {newest.record.v: newest.digest}

    def take(self, data: bytes) -> RawRecord:
        """Check the bytes of the next lower position. Torn bytes are accepted if a later record superseded them.

        Raises
        ------
        CorruptRecord
        """
        version = self.version
        expected = self._expected.pop(version)
        if sha256(data) != expected:
            raise CorruptRecord(
                f"commit record {version} does not match the digest in the next record; run `cnr verify` at the "
                "source",
                version=version, expected=expected, found=sha256(data),
            )  # fmt: skip
        try:
            record = decode_record(data, version).record
        except CnrStoreError:
            if version - 1 not in self._expected:
                raise  # No later record superseded it.
        else:
            if record.supersedes is not None:
                torn = record.supersedes.torn
                self._expected |= dict(enumerate(torn, start=version - len(torn)))
                self._expected[version - 1 - len(torn)] = record.supersedes.follows
            self._expected.setdefault(version - 1, record.parent_digest)
        self.version -= 1
        return RawRecord(version, data)

    def check_meets(self, head: LogEntry | None) -> None:
        """Check that the next lower position has the record that the relay has there, if it has one.

        Raises
        ------
        CorruptRecord
        """
        if head is None:
            return
        expected = self._expected[self.version]
        if head.record.v != self.version or head.digest != expected:
            raise CorruptRecord(
                f"commit record {self.version + 1} of the source expects another record {self.version} than the relay "
                "has: the source's log was rewritten or restored; start a new relay in an empty place",
                version=self.version, expected=expected, found=head.digest,
            )  # fmt: skip
