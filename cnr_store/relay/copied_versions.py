"""The versions that a relay has copied, and the segments that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.notes import metrics_of
from cnr_store.format.records import ChainEntry, CommitRecord
from cnr_store.log.retention import LiveVersion


@dataclass(frozen=True, slots=True)
class _CopiedVersion:
    checkpoint: int
    ts_ms: int
    chain: tuple[ChainEntry, ...] = field(repr=False)
    metrics: Mapping[str, float]


class CopiedVersions:
    """The versions that a relay has. No I/O.

    Attributes
    ----------
    present
        Segments that are known to be complete at the target; see `trust_only`.
    """

    def __init__(self) -> None:
        self.present: set[str] = set()
        self._versions: dict[int, _CopiedVersion] = {}
        self._entries: dict[str, ChainEntry] = {}  # one object per segment, shared by all chains

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def remember(self, entry: LogEntry) -> None:
        """Add a version."""
        record = entry.record
        chain = tuple(self._entries.setdefault(item.seg, item) for item in record.chain)
        self._versions[record.v] = _CopiedVersion(record.checkpoint, record.ts_ms, chain, metrics_of(record))

    def chain_of(self, version: int) -> tuple[ChainEntry, ...]:
        """Return the chain of a version that the relay has."""
        return self._versions[version].chain

    def live(self, head: CommitRecord) -> list[LiveVersion]:
        """Remove the versions that the newest record lists as expired; return the others, ascending."""
        self._versions = {version: one for version, one in sorted(self._versions.items()) if is_live(head, version)}
        return [
            LiveVersion(version, one.checkpoint, one.ts_ms, tuple(item.seg for item in one.chain), one.metrics)
            for version, one in self._versions.items()
        ]

    def trust_only(self, versions: Iterable[int]) -> None:
        """Leave the segments of these versions in `present`: any other may be deleted by another relay."""
        self.present &= {item.seg for one in versions if one in self._versions for item in self._versions[one].chain}

    def drop(self, versions: Iterable[int]) -> None:
        """Remove versions."""
        for version in versions:
            del self._versions[version]
        self._forget_entries()

    def keep_only(self, versions: Iterable[int]) -> None:
        """Remove all other versions. Without trimming this bounds the memory."""
        kept = set(versions)
        self._versions = {version: one for version, one in self._versions.items() if version in kept}
        self._forget_entries()

    def _forget_entries(self) -> None:
        self._entries = {item.seg: item for one in self._versions.values() for item in one.chain}
