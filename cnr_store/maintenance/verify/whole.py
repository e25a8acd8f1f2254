"""Find the newest intact version: walk the log back and read each state."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cnr_store.errors import CorruptStore, StorageFailure
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.maintenance.verify.checking import MOST_LOOKS, ChainChecks, overtaken, was_overtaken
from cnr_store.maintenance.verify.log import LogView, list_positions, read_position, superseded_by, take
from cnr_store.maintenance.verify.report import Findings, Problem, ProgressCallback
from cnr_store.runtime.threads import Workers
from cnr_store.store import Store

_NONE_KEPT = -1
"""No version. The walk collects which versions use which segment, and keeps no record."""


@dataclass(frozen=True, slots=True)
class NewestWhole:
    """The result of walking the log back.

    Attributes
    ----------
    entry
        The newest live version without a problem in objects, records and states; None if there is none. If the side
        object of the newest record is lost, its lists are missing (its ``state`` still names them).
    rejected
        Records of newer checkpoints that are not intact, newest first, each state once.
    problems
        The problems of the rejected ones.
    """

    entry: LogEntry | None
    rejected: tuple[LogEntry, ...]
    problems: tuple[Problem, ...]


def find_newest_whole(
    store: Store,
    *,
    avoid: Collection[str] = (),
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> NewestWhole:
    """Return the newest version that a deep check finds intact.

    Blocks: reads every object of the candidate states. Skips damaged records. Memory: as `verify_store` with ``deep``.

    Parameters
    ----------
    avoid
        Segments known to be damaged: states that need one are rejected without reading.

    Raises
    ------
    AccessDenied, StorageFailure, UnknownFeature
        A record could not be read; whether it is damaged is unknown.
    Conflict
        During each of several attempts, what was read was compacted and deleted.
    """
    for _ in range(MOST_LOOKS):
        found, findings = _look(store, avoid, threads, progress)
        if not was_overtaken(store.internals.log, findings):
            return found
    raise overtaken(store.url)


def _look(
    store: Store, avoid: Collection[str], threads: int | None, progress: ProgressCallback | None
) -> tuple[NewestWhole, Findings]:
    findings = Findings(store.branch)
    view = LogView(prefix=store.internals.log.prefix)
    rejected: list[LogEntry] = []
    with Workers(threads, name="cnr-whole") as workers:
        checks = ChainChecks(store.storage, view, findings, workers, progress)
        for entry in _states(store, view):
            names = [item.seg for item in entry.record.chain]
            if set(avoid).isdisjoint(names) and not _is_affected(view, entry, findings):
                checks.check_chains([entry], deep=True)
                _refuse_failures(findings)
                if not _is_affected(view, entry, findings):
                    return NewestWhole(entry, tuple(rejected), tuple(findings.problems)), findings
                if was_overtaken(store.internals.log, findings):
                    break
            rejected.append(entry)
    return NewestWhole(None, tuple(rejected), tuple(findings.problems)), findings


def _states(store: Store, view: LogView) -> Iterator[LogEntry]:
    """Yield the live versions with a non-empty chain, newest first, each chain once."""
    known: set[tuple[str, ...]] = set()
    torn: set[int] = set()
    for version in reversed(list_positions(store.storage, view.prefix)):
        if version in torn:
            continue
        here = read_position(store.storage, version, view.prefix)
        if here.error is not None and not isinstance(here.error, CorruptStore):
            raise here.error
        entry = here.entry
        if entry is None or entry.record.store_uuid != store.uuid:
            continue
        torn |= superseded_by(entry.record).keys()
        take(view, entry, version=_NONE_KEPT, every=False)
        assert view.head is not None  # `take` sets it
        names = tuple(item.seg for item in entry.record.chain)
        if names and names not in known and is_live(view.head.record, version):
            known.add(names)
            yield entry


def _refuse_failures(findings: Findings) -> None:
    """Raise a storage failure among the findings: it is no damage, so no older state is restored."""
    for problem in findings.problems:
        if problem.kind == StorageFailure.kind:
            raise StorageFailure(problem.message, path=problem.path)


def _is_affected(view: LogView, entry: LogEntry, findings: Findings) -> bool:
    """Return whether a reader of this version needs an object that has a problem."""
    starts = tuple(layout.segment_prefix(item.seg) for item in entry.record.chain)
    return any(
        problem.path == view.key(entry.record.v) or (problem.versions and problem.path.startswith(starts))
        for problem in findings.problems
    )
