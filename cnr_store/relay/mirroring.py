"""What a relay copies next, from records alone: pure.

A relay copies a log in order, position by position, and before each record all that it names. Where a version expired
at the source before its segments were copied, the relay goes to the next version that is live there. The records
between are copied too, as the log has no holes, but behind the newer one, from it downwards: so no reader ever finds
one of them at the end of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cnr_store.errors import CnrStoreError, CorruptRecord
from cnr_store.format.commit_record import LogEntry, decode_record, is_live
from cnr_store.format.documents import sha256
from cnr_store.format.records import ChainEntry, CommitRecord


def next_live(head: CommitRecord, version: int) -> int:
    """Return the first version from ``version`` on that is live by the source's newest record, or that record's.

    >>> from cnr_store.log.rebase import draft_init
    >>> from cnr_store.format.records import WriterInfo
    >>> import msgspec
    >>> init = draft_init(WriterInfo(host="", lib="", run_id=""))
    >>> head = msgspec.structs.replace(init, v=9, floor=7, kept=(3, 5), expired=(7,))
    >>> [next_live(head, version) for version in (2, 4, 6, 9)]
    [3, 5, 8, 9]
    """
    named = (*head.kept, *head.tags.values(), *head.channels.values(), *(pin.version for pin in head.pins.values()))
    below = [one for one in named if version <= one < head.v and is_live(head, one)]
    # Above the floor only what is listed as expired is not live: as many steps as there are of those.
    above = next((one for one in range(max(version, head.floor), head.v) if is_live(head, one)), head.v)
    return min([*below, above]) if head.kind != "close" else head.v


def first_version(head: CommitRecord, start: int | None, begins: int) -> int | None:
    """Return where a new relay begins: at ``start``, or low enough for every channel; None while there is nothing.

    A relay never has position 0, which tells it from a store.

    Parameters
    ----------
    begins
        Where the source's log begins: above 0 if it is a relay itself.
    """
    if head.v < 1:
        return None
    wanted = min([head.v, *head.channels.values()]) if start is None else start
    return max(wanted, begins, 1)


def versions_to_hold(record: CommitRecord, first: int) -> tuple[int, ...]:
    """Return the versions, besides a record's own, that its channels name and that the relay has a record of."""
    named = {version for version in record.channels.values() if first <= version < record.v}
    return tuple(sorted(version for version in named if is_live(record, version)))


def segments_to_copy(chains: Iterable[Sequence[ChainEntry]], present: Iterable[str]) -> tuple[ChainEntry, ...]:
    """Return the segments of chains that are not there yet, each once, in the order in which they apply."""
    known = set(present)
    needed: dict[str, ChainEntry] = {}
    for chain in chains:
        for entry in chain:
            if entry.seg not in known:
                needed.setdefault(entry.seg, entry)
    return tuple(needed.values())


@dataclass(frozen=True, slots=True)
class RawRecord:
    """The bytes at one log position."""

    version: int
    data: bytes


class Descent:
    """Checks the bytes of a log from its newest record downwards: each names the digest of those below it."""

    def __init__(self, newest: LogEntry) -> None:
        self.version = newest.record.v
        self._expected: dict[int, str] = {newest.record.v: newest.digest}

    def take(self, data: bytes) -> RawRecord:
        """Check the bytes of the next position downwards. Torn ones are right if a later record superseded them.

        Raises
        ------
        CorruptRecord
        """
        version = self.version
        expected = self._expected.pop(version)
        if sha256(data) != expected:
            raise CorruptRecord(
                f"commit record {version} is not the one that the record behind it follows; run `cnr verify` at the "
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

    def check_meets(self, held: LogEntry | None) -> None:
        """Check that the next position downwards is the record that the relay has there, if it has one.

        Raises
        ------
        CorruptRecord
        """
        if held is None:
            return
        expected = self._expected[self.version]
        if held.record.v != self.version or held.digest != expected:
            raise CorruptRecord(
                f"commit record {self.version + 1} of the source follows another record {self.version} than the relay "
                "has: the source's log was rewritten or restored; begin a relay in an empty place",
                version=self.version, expected=expected, found=held.digest,
            )  # fmt: skip
