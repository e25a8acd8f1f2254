"""The order of a check: log, then the segments of each chain, then (deep) the states they lead to."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from cnr_store import arrays, layout
from cnr_store.errors import CorruptObject, MissingObject, VersionExpired, VersionNotFound
from cnr_store.records import FORMAT, MAJOR, MINOR, LogEntry, is_live
from cnr_store.segment import SegmentReader
from cnr_store.storage import Storage
from cnr_store.store import Store
from cnr_store.verify.chains import check_chain_statements, check_record
from cnr_store.verify.log import LogView, distinct_chains, read_log
from cnr_store.verify.report import Findings, Problem, ProgressCallback, VerifyReport
from cnr_store.verify.segments import check_objects, open_segment
from cnr_store.verify.states import FailedReplay, WrongState, check_states, replayed_rows
from cnr_store.workers import Workers


def verify_store(
    store: Store,
    *,
    version: int | None = None,
    every: bool = False,
    deep: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read a store's log and every object of the versions in question, and report all that is wrong. Blocks.

    Never stops at the first problem and changes nothing. Memory: one object and one decoded chunk per thread, the
    manifests of one chain, and with ``deep`` 64 MiB of codes.

    Parameters
    ----------
    store
        An opened store; other processes may go on writing to it.
    version
        Check the chain of this version; None checks the head's and those of all tags.
    every
        Check the chains of all versions that readers may still open.
    deep
        Replay every table too: the row algebra, and the state digest after each segment.
    threads
        Objects read at once; None takes the usual number.
    progress
        Told about ``objects`` (bytes) and ``states`` (rows).

    Raises
    ------
    VersionNotFound, VersionExpired
        ``version`` is not one.
    AccessDenied
        Nothing can be said about objects that may not be read.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-verify")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> verify_store(store, deep=True).is_sound
    True
    """
    findings = Findings()
    with Workers(threads, name="cnr-verify") as workers:
        view = read_log(store.storage, store.identity, workers, findings, version=version, every=every)
        _check_version(store, view, version, findings)
        _check_root(store.storage, findings)
        run = _Run(store.storage, view, findings, workers, progress)
        targets = sorted(view.entries.values(), key=lambda entry: entry.record.v, reverse=True)
        run.check_chains(targets, deep=deep)
    return VerifyReport(
        url=store.url, head=None if view.head is None else view.head.record.v,
        versions=tuple(sorted(view.entries)), is_deep=deep, records=view.records,
        segments=len(run.checked), objects=run.objects, size_bytes=run.size_bytes, problems=tuple(findings.problems),
    )  # fmt: skip


def _check_version(store: Store, view: LogView, version: int | None, findings: Findings) -> None:
    if version is None or findings.hurts(layout.commit_key(version) if version >= 0 else "?"):
        return
    if version not in view.entries:
        known = view.head is not None and 0 <= version <= view.head.record.v
        if not known:
            raise VersionNotFound(f"{store.url} has no version {version}", version=version)
    if view.head is not None and not is_live(view.head.record, version):
        raise VersionExpired(
            f"version {version} of {store.url} has expired; the floor is {view.head.record.floor}", version=version
        )


def _check_root(storage: Storage, findings: Findings) -> None:
    wanted = arrays.group_document({"cnr": {"format": FORMAT, "major": MAJOR, "minor": MINOR}})
    data = storage.read(layout.ROOT_GROUP)
    if data is None:
        message = f"{layout.ROOT_GROUP} is missing; Zarr readers do not see the store as a group"
        findings.add(Problem(MissingObject.kind, layout.ROOT_GROUP, (), message))
    elif data != wanted:
        message = f"{layout.ROOT_GROUP} is not the document a store of format {MAJOR}.{MINOR} has"
        findings.add(Problem(CorruptObject.kind, layout.ROOT_GROUP, (), message))


class _Count:
    """Progress of one stage, from any thread."""

    def __init__(self, stage: str, total: int, callback: ProgressCallback | None) -> None:
        self._stage = stage
        self._total = total
        self._callback = callback
        self._done = 0
        self._lock = Lock()
        self.advance(0)

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            if self._callback is not None:
                self._callback(self._stage, min(self._done, self._total), self._total)


class _Run:
    """Checks chains; a segment that several chains share is read once."""

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
        sizes = {item.seg: item.bytes for entry in targets for item in entry.record.chain}
        count = _Count("objects", sum(sizes.values()), self._progress)
        sound = []
        for entry in targets:
            readers = self._check_objects(entry, count)
            if None not in readers:
                whole = [reader for reader in readers if reader is not None]
                self._check_statements(entry, whole)
                sound.append(entry)
        if deep:
            self._check_states(distinct_chains(sound))

    def _check_objects(self, entry: LogEntry, count: _Count) -> list[SegmentReader | None]:
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
        if manifests:
            for message in check_record(entry.record, manifests[-1]):
                key = layout.commit_key(entry.record.v)
                self._findings.add(Problem("corrupt_record", key, (entry.record.v,), message))

    def _check_states(self, entries: Iterable[LogEntry]) -> None:
        chains = [entry.record.chain for entry in entries]
        rows = 0
        for chain in chains:
            rows += replayed_rows([SegmentReader.open(self._storage, item).manifest for item in chain])
        count = _Count("states", rows, self._progress)
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
