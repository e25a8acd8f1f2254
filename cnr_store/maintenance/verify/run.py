"""Run a check: log and references, then the segments of each chain, then (deep) the tables' states."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from cnr_store.errors import (
    CorruptObject,
    CorruptStore,
    MissingObject,
    StorageFailure,
    VersionNotFound,
)
from cnr_store.format import arrays, layout
from cnr_store.format.commit_record import is_live
from cnr_store.format.records import FORMAT, MAJOR, MINOR, CommitRecord
from cnr_store.log.expiry import version_expired
from cnr_store.maintenance.verify.checking import MOST_LOOKS, ChainChecks, SegmentReads, overtaken, was_overtaken
from cnr_store.maintenance.verify.log import LogView, read_log
from cnr_store.maintenance.verify.logs import Log, other_logs
from cnr_store.maintenance.verify.report import Findings, LogReport, Problem, ProgressCallback, VerifyReport
from cnr_store.runtime.threads import Workers
from cnr_store.storage import Storage
from cnr_store.store import Store


def verify_store(
    store: Store,
    *,
    version: int | None = None,
    all_versions: bool = False,
    deep: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read a store's log and every object of the chosen versions; return all problems. Blocks.

    It does not stop at the first problem, and changes nothing. Memory: one object and one decoded chunk per thread, the
    manifests of one chain, and with ``deep`` 64 MiB of codes.

    Parameters
    ----------
    store
        An opened store, or a branch of it; other processes may write to it meanwhile. All logs of the store are read.
        If a branch or a ``version`` is given, the chains of other logs are not read (`LogReport.is_read`).
    version
        Check the chain of this version. None checks the head, the versions with a name (tags, channels, branches) and
        the kept ones.
    all_versions
        Check the chains of all live versions.
    deep
        Also replay every table: check the row algebra, and the state digest after each segment.
    threads
        Number of objects read at once; None is the default number.
    progress
        Called with the stages ``objects`` (bytes) and ``states`` (rows).

    Raises
    ------
    VersionNotFound, VersionExpired
        ``version`` does not exist or is not live.
    AccessDenied
        An object may not be read, so it cannot be checked.
    Conflict
        During each of several attempts, what was read was compacted and deleted.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-verify")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> verify_store(store, deep=True).is_sound
    True
    """
    for _ in range(MOST_LOOKS):
        report, logs = _check(store, version, all_versions, deep, threads, progress)
        if not any(was_overtaken(log.log, log.findings) for log in logs):
            return report
    raise overtaken(store.url)


def _check(
    store: Store,
    version: int | None,
    all_versions: bool,
    deep: bool,
    threads: int | None,
    progress: ProgressCallback | None,
) -> tuple[VerifyReport, list[Log]]:
    """Run one attempt. Meanwhile other processes may compact and delete what it reads."""
    findings = Findings(store.branch)
    with Workers(threads, name="cnr-verify") as workers:
        view = read_log(
            store.storage, store.identity, workers, findings, version=version, every=all_versions,
            prefix=store.internals.log.prefix, first=store.internals.log.first,
        )  # fmt: skip
        _check_version(store, view, version, findings)
        if store.relay is not None:
            _leave_out_unmirrored(store.storage, view)
            if version is not None and version not in view.entries:
                store.internals.check_held(version)
        check_root(store.storage, findings)
        own = Log(store.branch, view, findings, store.internals.log)
        logs = [own, *other_logs(store, own, workers, every=all_versions)]
        reads = SegmentReads()
        is_read = {log.branch: log is own or (version is None and store.branch is None) for log in logs}
        for log in logs:
            check_references(log.view, log.findings)
            if is_read[log.branch]:
                checks = ChainChecks(store.storage, log.view, log.findings, workers, progress, reads)
                targets = sorted(log.view.entries.values(), key=lambda entry: entry.record.v, reverse=True)
                checks.check_chains(targets, deep=deep)
        folders = set() if view.head is None else set(store.storage.list_folders(layout.DATA))
        check_links(store.storage, findings)
    others = [
        LogReport(log.branch, is_read[log.branch], **_found(log, reads.checked if is_read[log.branch] else None))
        for log in logs[1:]
    ]
    report = VerifyReport(
        url=store.url, branch=store.branch, **_found(own, reads.checked), is_deep=deep,
        records=sum(log.view.records for log in logs),
        segments=len(reads.checked), objects=reads.objects, size_bytes=reads.size_bytes,
        problems=tuple(problem for log in logs for problem in log.findings.problems),
        unreferenced=len(folders.difference(*(log.view.users for log in logs))), others=tuple(others),
    )  # fmt: skip
    return report, logs


def _found(log: Log, checked: Collection[str] | None) -> dict[str, Any]:
    """Return the report fields of a log; ``checked`` is None if its chains were not read."""
    view = log.view
    return {
        "head": None if view.head is None else view.head.record.v,
        "versions": () if checked is None else tuple(sorted(view.entries)),
        "restorable": () if checked is None else _restorable(view, checked, log.findings),
        "superseded": tuple(view.superseded),
    }


def _restorable(view: LogView, checked: Collection[str], findings: Findings) -> tuple[int, ...]:
    """Return the live versions whose segments were all read and that no problem affects, newest first."""
    unread = {version for segment, versions in view.users.items() if segment not in checked for version in versions}
    affected = {version for problem in findings.problems for version in problem.versions}
    return tuple(sorted(view.live - unread - affected, reverse=True))


def _leave_out_unmirrored(storage: Storage, view: LogView) -> None:
    """Remove the versions that a relay has not mirrored completely; it has to mirror only the newest one."""
    held = {
        name
        for name in storage.list_folders(layout.DATA)
        if layout.is_segment_name(name) and storage.read(layout.segment_key(name, layout.MANIFEST), stop=1) is not None
    }
    head = None if view.head is None else view.head.record
    needed = set() if head is None else {item.seg for item in head.chain}
    gone = {version for name, users in view.users.items() if name not in held | needed for version in users}
    for version in gone:
        view.entries.pop(version, None)
    for users in (view.users, view.enders):
        for name in list(users):
            users[name] = [version for version in users[name] if version not in gone]
            if not users[name]:
                del users[name]


def _check_version(store: Store, view: LogView, version: int | None, findings: Findings) -> None:
    if version is None or findings.affects(view.key(version) if version >= 0 else "?"):
        return
    if version not in view.entries:
        known = view.head is not None and 0 <= version <= view.head.record.v
        if not known:
            raise VersionNotFound(f"{store.url} has no version {version}", version=version)
    if view.head is not None and not is_live(view.head.record, version):
        raise version_expired(version, view.head.record, store.url)


def check_references(view: LogView, findings: Findings) -> None:
    """Report names of versions that do not exist, and marked transactions that a live version needs.

    A transaction that only another log needs may be marked here: it may have been marked before that log committed it.
    Its segment is never deleted, and the next collection removes the mark (spec, CNR-GC-8).
    """
    if view.head is None:
        return
    head = view.head.record
    wrong = "; ".join(_dangling(head, set(view.superseded)))
    if wrong:
        findings.add(Problem(CorruptStore.kind, view.key(head.v), (), wrong))
    for segment in sorted(view.users):
        txn = segment.rpartition("-")[2]
        if txn in head.aborted:
            message = (
                f"the head marks transaction {txn} for deletion, but live versions need its segment; repair this "
                "before the next garbage collection"
            )
            key = layout.segment_key(segment, layout.MANIFEST)
            findings.add(Problem(CorruptStore.kind, key, view.versions_of(segment), message))


def _dangling(head: CommitRecord, superseded: set[int]) -> Iterator[str]:
    """Yield the names that refer to superseded or expired versions. Pure."""
    expired = set(head.expired)
    named = [(f"tag {name!r}", version) for name, version in sorted(head.tags.items())]
    named += [(f"channel {name!r}", version) for name, version in sorted(head.channels.items())]
    named += [(f"the pin of branch {pin.name!r}", pin.version) for _, pin in sorted(head.pins.items())]
    named += [("the list of kept versions", version) for version in head.kept]
    for what, version in named:
        if version in superseded:
            yield f"{what} names version {version}, which does not exist; the head is {head.v}"
        elif version in expired:
            yield f"{what} names version {version}, which has expired"


def zarr_groups() -> dict[str, bytes]:
    """Return the Zarr group documents that every store has, key to content. Pure."""
    root = arrays.group_document({"cnr": {"format": FORMAT, "major": MAJOR, "minor": MINOR}})
    return {layout.ROOT_GROUP: root, layout.DATA_GROUP: arrays.group_document({})}


def check_links(storage: Storage, findings: Findings) -> None:
    """Report symbolic links in the store's folders. Lists local folders; no I/O on other storage."""
    for folder in layout.FOLDERS:
        for key in storage.list_links(folder):
            message = f"{key} is a symbolic link, which is not followed; replace it with its target, or remove it"
            findings.add(Problem(StorageFailure.kind, key, (), message))


def check_root(storage: Storage, findings: Findings) -> None:
    """Report wrong or missing Zarr group documents of the root and of ``data/``. One GET each."""
    for key, wanted in zarr_groups().items():
        data = storage.read(key, stop=len(wanted) + 1)
        if data is None and key == layout.DATA_GROUP and not storage.list_folders(layout.DATA):
            continue  # Creation was interrupted before this document, and nothing was saved.
        if data is None and any(storage.list_objects(key)):
            message = f"{key} is a folder with other files, in place of an object; move it away, and run `cnr repair`"
            findings.add(Problem(CorruptObject.kind, key, (), message))
        elif data is None:
            message = f"{key} is missing; Zarr readers do not see the store as a group"
            findings.add(Problem(MissingObject.kind, key, (), message))
        elif data != wanted:
            message = f"{key} differs from the document of a store of format {MAJOR}.{MINOR}; `cnr repair` rewrites it"
            findings.add(Problem(CorruptObject.kind, key, (), message))
