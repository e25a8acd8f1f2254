"""Check chains: the objects of each segment, what segments say about each other, and the states they lead to."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from cnr_store import layout
from cnr_store.records import ChainEntry, LogEntry
from cnr_store.segment import SegmentReader
from cnr_store.storage import Storage
from cnr_store.verify.chains import check_chain_statements, check_record
from cnr_store.verify.log import LogView, distinct_chains
from cnr_store.verify.report import Findings, Problem, ProgressCallback
from cnr_store.verify.segments import check_objects, open_segment
from cnr_store.verify.states import FailedReplay, WrongState, check_states, replayed_rows
from cnr_store.workers import Workers


class Count:
    """Progress of one stage, from any thread."""

    def __init__(self, stage: str, total: int, callback: ProgressCallback | None) -> None:
        self._stage = stage
        self._total = total
        self._callback = callback
        self._done = 0
        self._lock = Lock()
        self.advance(0)

    def advance(self, amount: int) -> None:
        """Tell of ``amount`` more."""
        with self._lock:
            self._done += amount
            if self._callback is not None:
                self._callback(self._stage, min(self._done, self._total), self._total)


class ChainChecks:
    """Checks chains; a segment that several chains share is read once.

    Attributes
    ----------
    checked
        The segments read so far.
    objects, size_bytes
        How much that was.
    """

    def __init__(
        self,
        storage: Storage,
        view: LogView,
        findings: Findings,
        workers: Workers,
        progress: ProgressCallback | None,
    ) -> None:
        self.checked: set[str] = set()
        self.objects = 0
        self.size_bytes = 0
        self._storage = storage
        self._view = view
        self._findings = findings
        self._workers = workers
        self._progress = progress

    def check_chains(self, targets: list[LogEntry], *, deep: bool) -> None:
        """Read every object of these chains, and with ``deep`` replay their tables. Blocks."""
        sizes = {item.seg: item.bytes for entry in targets for item in entry.record.chain}
        count = Count("objects", sum(sizes.values()), self._progress)
        sound: list[LogEntry] = []
        last: tuple[tuple[ChainEntry, ...], list[SegmentReader | None]] = ((), [])
        for entry in targets:
            # Records that leave the state alone repeat the chain before them: what was just read is not read again.
            chain = entry.record.chain
            is_new = chain != last[0]
            readers = self._check_objects(entry, count) if is_new else last[1]
            last = (chain, readers)
            if None not in readers:
                whole = [reader for reader in readers if reader is not None]
                if is_new:
                    self._check_statements(entry, whole)
                    sound.append(entry)
                self._check_record(entry, whole)
        if deep:
            self._check_states(distinct_chains(sound))

    def _check_objects(self, entry: LogEntry, count: Count) -> list[SegmentReader | None]:
        readers = []
        for item in entry.record.chain:
            versions = self._view.versions_of(item.seg) or (entry.record.v,)
            reader = open_segment(self._storage, item, versions, self._findings)
            readers.append(reader)
            if item.seg in self.checked:
                continue
            self.checked.add(item.seg)
            self.objects += 1
            if reader is None:
                count.advance(item.bytes)
                continue
            self.objects += len(reader.manifest.objects)
            self.size_bytes += item.bytes
            count.advance(item.bytes - sum(one.size for one in reader.manifest.objects))
            check_objects(self._storage, reader, versions, self._workers, self._findings, count.advance)
        return readers

    def _check_statements(self, entry: LogEntry, readers: list[SegmentReader]) -> None:
        names = [reader.name for reader in readers]
        manifests = [reader.manifest for reader in readers]
        for found in check_chain_statements(names, manifests):
            key = layout.segment_key(names[found.index], layout.MANIFEST)
            versions = self._view.versions_of(names[found.index]) or (entry.record.v,)
            self._findings.add(Problem("corrupt_store", key, versions, f"{key}: {found.message}", found.table))

    def _check_record(self, entry: LogEntry, readers: list[SegmentReader]) -> None:
        manifests = [reader.manifest for reader in readers]
        if manifests:
            for message in check_record(entry.record, manifests[-1]):
                key = self._view.key(entry.record.v)
                self._findings.add(Problem("corrupt_record", key, (entry.record.v,), message))

    def _check_states(self, entries: Iterable[LogEntry]) -> None:
        chains = [entry.record.chain for entry in entries]
        rows = 0
        for chain in chains:
            rows += replayed_rows([SegmentReader.open(self._storage, item).manifest for item in chain])
        count = Count("states", rows, self._progress)
        for chain in chains:
            readers = [SegmentReader.open(self._storage, item) for item in chain]
            for found in check_states(readers, self._workers, count.advance):
                self._add_state([reader.name for reader in readers], found)

    def _add_state(self, names: list[str], found: WrongState | FailedReplay) -> None:
        key = layout.segment_key(names[found.index], layout.MANIFEST)
        if isinstance(found, FailedReplay):
            # An object that cannot be read has been named, and is not named twice.
            versions = self._view.versions_of(names[found.index])
            self._findings.add_error(found.error, found.error.path or key, versions)
            return
        versions = tuple(sorted(self._view.enders.get(names[found.index], ())))
        message = (
            f"after {key} table {found.table!r} has state digest {found.found}, the segment states {found.expected}; "
            "its rows were computed against another state"
        )
        self._findings.add(Problem("corrupt_store", key, versions, message, found.table))
