"""Check chains: the objects of each segment, the consistency of segments, and their state digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock

from cnr_store.errors import Conflict, CorruptStore, MissingObject
from cnr_store.format import layout
from cnr_store.format.chain_checks import chain_problems, record_problems
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import ChainEntry
from cnr_store.log.expiry import expired_by
from cnr_store.log.log_reader import LogReader
from cnr_store.maintenance.verify.log import LogView, distinct_chains
from cnr_store.maintenance.verify.report import Findings, Problem, ProgressCallback
from cnr_store.maintenance.verify.segments import check_objects, open_segment
from cnr_store.maintenance.verify.states import FailedReplay, WrongState, check_states, replayed_rows
from cnr_store.runtime.threads import Workers
from cnr_store.segment.reader import SegmentReader, in_chain
from cnr_store.storage import Storage

MOST_LOOKS = 3
"""Maximum number of attempts of one check. An attempt takes minutes; compacted segments stay for a grace period."""


class Count:
    """Reports the progress of one stage. Thread-safe."""

    def __init__(self, stage: str, total: int, callback: ProgressCallback | None) -> None:
        self._stage = stage
        self._total = total
        self._callback = callback
        self._done = 0
        self._lock = Lock()
        self.advance(0)

    def advance(self, amount: int) -> None:
        """Add ``amount`` to the progress and report it."""
        with self._lock:
            self._done += amount
            if self._callback is not None:
                self._callback(self._stage, min(self._done, self._total), self._total)


@dataclass(slots=True)
class SegmentReads:
    """Results that all logs of a store share, so that each segment and state is read once.

    Attributes
    ----------
    objects, size_bytes
        Number and bytes of the objects read.
    states
        Replayed chains, each with its errors.
    """

    objects: int = 0
    size_bytes: int = 0
    states: dict[tuple[str, ...], tuple[WrongState | FailedReplay, ...]] = field(default_factory=dict)
    _objects: dict[str, tuple[Problem, ...]] = field(default_factory=dict)

    @property
    def checked(self) -> Set[str]:
        """Names of the segments that were read."""
        return self._objects.keys()

    def objects_of(self, segment: str, read: Callable[[], tuple[Problem, ...]]) -> tuple[Problem, ...]:
        """Return the problems of a segment's objects; calls ``read`` at the first call for the segment."""
        if segment not in self._objects:
            self._objects[segment] = read()
        return self._objects[segment]

    def states_of(self, chain: tuple[str, ...]) -> tuple[WrongState | FailedReplay, ...] | None:
        """Return the state errors of a chain; None if neither it nor a longer one was replayed."""
        for known, found in self.states.items():
            if known[: len(chain)] == chain:
                return tuple(one for one in found if one.index < len(chain))
        return None


class ChainChecks:
    """Checks the chains of one log. A segment that several chains share is read once."""

    def __init__(
        self,
        storage: Storage,
        view: LogView,
        findings: Findings,
        workers: Workers,
        progress: ProgressCallback | None,
        reads: SegmentReads | None = None,
    ) -> None:
        self._reads = SegmentReads() if reads is None else reads
        self._storage = storage
        self._view = view
        self._findings = findings
        self._workers = workers
        self._progress = progress
        self._opened: dict[ChainEntry, SegmentReader] = {}
        """Those of the chain before: the next one shares most of its segments."""

    def check_chains(self, targets: list[LogEntry], *, deep: bool) -> None:
        """Read every object of these chains, and with ``deep`` replay their tables. Blocks."""
        items = (item for entry in targets for item in entry.record.chain)
        sizes = {item.seg: item.size_bytes for item in items if item.seg not in self._reads.checked}
        count = Count("objects", sum(sizes.values()), self._progress)
        sound: list[LogEntry] = []
        last: tuple[tuple[ChainEntry, ...], list[SegmentReader | None]] = ((), [])
        for entry in targets:
            # Records that do not change the state repeat their parent's chain: it is read once.
            chain = entry.record.chain
            is_new = chain != last[0]
            readers = self._check_objects(entry, count) if is_new else last[1]
            last = (chain, readers)
            if None not in readers:
                whole = in_chain([reader for reader in readers if reader is not None])
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
            reader = self._opened.get(item) or open_segment(self._storage, item, versions, self._findings)
            readers.append(reader)
            for problem in self._reads.objects_of(item.seg, partial(self._read_segment, item, reader, versions, count)):
                # An object that no version needs, such as a receipt, affects no version of this log either.
                self._findings.add(replace(problem, versions=versions if problem.versions else ()))
        self._opened = {item: reader for item, reader in zip(entry.record.chain, readers, strict=True) if reader}
        return readers

    def _read_segment(
        self, item: ChainEntry, reader: SegmentReader | None, versions: tuple[int, ...], count: Count
    ) -> tuple[Problem, ...]:
        self._reads.objects += 1
        if reader is None:
            count.advance(item.size_bytes)
            return ()
        self._reads.objects += len(reader.manifest.objects)
        self._reads.size_bytes += item.size_bytes
        count.advance(item.size_bytes - sum(one.size for one in reader.manifest.objects))
        found = Findings()
        check_objects(self._storage, reader, versions, self._workers, found, count.advance)
        return tuple(found.problems)

    def _check_statements(self, entry: LogEntry, readers: Sequence[SegmentReader]) -> None:
        names = [reader.name for reader in readers]
        manifests = [reader.manifest for reader in readers]
        for found in chain_problems(manifests):
            key = layout.segment_key(names[found.index], layout.MANIFEST)
            versions = self._view.versions_of(names[found.index]) or (entry.record.v,)
            self._findings.add(Problem("corrupt_store", key, versions, f"{key}: {found.message}", found.table))

    def _check_record(self, entry: LogEntry, readers: Sequence[SegmentReader]) -> None:
        manifests = [reader.manifest for reader in readers]
        if manifests:
            key = self._view.key(entry.record.v)
            for message in record_problems(entry.record, manifests[-1]):
                self._findings.add(Problem("corrupt_record", key, (entry.record.v,), f"{key} {message}"))

    def _check_states(self, entries: Iterable[LogEntry]) -> None:
        chains = {tuple(item.seg for item in entry.record.chain): entry.record.chain for entry in entries}
        fresh = {names for names in chains if self._reads.states_of(names) is None}
        rows = sum(replayed_rows([reader.manifest for reader in self._open(chains[names])[0]]) for names in fresh)
        count = Count("states", rows, self._progress)
        for names, chain in chains.items():
            found = self._reads.states_of(names)
            if found is None:
                readers, failed = self._open(chain)
                replayed = [] if failed else check_states(readers, self._workers, count.advance)
                found = self._reads.states[names] = (*failed, *replayed)
            for one in found:
                self._add_state(names, one)

    def _open(self, chain: tuple[ChainEntry, ...]) -> tuple[Sequence[SegmentReader], list[FailedReplay]]:
        """Open the segments of a chain; if one fails to open, return none and its error."""
        readers: list[SegmentReader] = []
        for index, item in enumerate(chain):
            try:
                readers.append(self._opened.get(item) or SegmentReader.open(self._storage, item))
            except CorruptStore as error:
                return [], [FailedReplay(index, error)]
        self._opened = dict(zip(chain, readers, strict=True))
        return in_chain(readers), []

    def _add_state(self, names: Sequence[str], found: WrongState | FailedReplay) -> None:
        key = layout.segment_key(names[found.index], layout.MANIFEST)
        if isinstance(found, FailedReplay):
            # Findings keeps one problem per object: an unreadable object is not reported twice.
            versions = self._view.versions_of(names[found.index])
            self._findings.add_error(found.error, found.error.path or key, versions)
            return
        versions = tuple(sorted(self._view.enders.get(names[found.index], ())))
        message = (
            f"after {key} table {found.table!r} has state digest {found.found}, the segment records {found.expected}; "
            "its rows were computed against another state"
        )
        self._findings.add(Problem("corrupt_store", key, versions, message, found.table))


def was_overtaken(log: LogReader, findings: Findings) -> bool:
    """Return whether a missing object is of a version that has expired since: no damage (spec, CNR-GC-12).

    A few GETs if any is missing.
    """
    missing = [
        problem.versions
        for problem in findings.problems
        if problem.kind == MissingObject.kind and problem.path.startswith((layout.DATA, layout.STATE))
    ]
    return any(expired_by(log, version) is not None for versions in missing for version in versions[-1:])


def overtaken(url: str) -> Conflict:
    """Return the error of a check whose attempts were all disturbed by deletions."""
    return Conflict(
        f"other processes compacted and deleted what was read of {url} during each of {MOST_LOOKS} attempts; retry, or "
        "use a longer grace period for garbage collection"
    )
