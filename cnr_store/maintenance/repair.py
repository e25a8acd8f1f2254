"""Repair a damaged store by appending a record after the damage (spec, section 7.10).

A repair never deletes or overwrites a log position and never changes ``data/``. It writes at most one record, the hint
and the Zarr group documents of the root and of ``data/``. The plan is pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from cnr_store.errors import Conflict, CorruptObject, CorruptStore, VersionNotFound, WrongClock
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, check_writer_features
from cnr_store.format.documents import canonical_json
from cnr_store.format.records import CommitRecord, Hint, Superseded, WriterInfo
from cnr_store.log.author import writer_info
from cnr_store.log.beginning import has_begun
from cnr_store.log.clock import check_clock, text_of, wall_ms
from cnr_store.log.log_reader import LogEnd
from cnr_store.log.lost_lists import with_what_is_left
from cnr_store.log.rebase import draft_after, rebase_rollback
from cnr_store.log.side_objects import complete
from cnr_store.maintenance.verify import Problem, ProgressCallback, find_newest_whole
from cnr_store.maintenance.verify.log import is_ahead, list_positions, read_log
from cnr_store.maintenance.verify.report import Findings
from cnr_store.maintenance.verify.run import check_root, zarr_groups
from cnr_store.runtime.notebook import ShownReport
from cnr_store.runtime.threads import Workers
from cnr_store.store import Store

ActionKind = Literal["supersede", "rollback", "time", "hint", "root"]


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One action of a repair.

    Attributes
    ----------
    kind
        ``supersede`` (append a record after torn ones), ``rollback`` (to an intact version), ``time`` (a rollback to
        the newest state, with a corrected time), ``hint`` or ``root`` (rewrite the object).
    message
        A description for people.
    version
        The version of the committed record; None for ``hint`` and ``root``, and in a dry run.
    """

    kind: ActionKind
    message: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class LostState:
    """A checkpoint newer than the repair's target that cannot be restored."""

    version: int
    step: int


@dataclass(frozen=True, slots=True)
class RepairReport(ShownReport):
    """What a repair did, or would do, and what remains lost.

    Attributes
    ----------
    url
        The store, without credentials.
    is_dry_run
        Whether nothing was written.
    newest
        The highest log position before the repair.
    target
        The version whose state the store continues from, be it empty; None if no version is intact.
    actions
        The actions in order; empty if there is nothing to repair.
    torn
        Newest log positions that cannot be read: after the repair they are no versions.
    lost
        Checkpoints newer than ``target`` that are not intact.
    remaining
        Damage that remains: in older versions, or of a kind that no record can repair.
    has_log
        False if the log or its first record was deleted: a repair cannot recreate records.
    """

    url: str
    is_dry_run: bool
    newest: int
    target: int | None
    actions: tuple[RepairAction, ...]
    torn: tuple[int, ...]
    lost: tuple[LostState, ...]
    remaining: tuple[Problem, ...]
    has_log: bool = True


def read_end(store: Store) -> LogEnd:
    """Return the end of a store's log. Blocks: one listing, and a GET for each torn position and one more.

    Raises
    ------
    StorageFailure, UnknownFeature
        The newest record could not be read; whether it is damaged is unknown.
    """
    log = store.internals.log
    newest = max(list_positions(store.storage, log.prefix), default=-1)
    if newest >= 0 and not has_begun(store.storage, log.prefix):
        return LogEnd(newest, None, (), is_broken=True)
    end = log.end_at(newest, with_lists=False)
    if end.last is None:
        return end
    try:
        return replace(end, last=complete(store.storage, end.last, {}))
    except CorruptStore as error:
        return replace(end, last=with_what_is_left(store.storage, log, end.last), lost=error.path)


def plan_repair(
    end: LogEnd,
    whole: CommitRecord | None,
    *,
    is_hint_wrong: bool = False,
    is_root_wrong: bool = False,
    is_time_wrong: bool = False,
) -> tuple[RepairAction, ...]:
    """Return the actions that repair a store, in order. Pure.

    Parameters
    ----------
    whole
        The newest intact version; None if there is none.

    Examples
    --------
    >>> plan_repair(LogEnd(4, None, (), is_broken=True), None)
    ()
    """
    actions: list[RepairAction] = []
    last = None if end.last is None else end.last.record
    if last is not None:
        target = last if whole is None else whole
        state = f"the state of version {target.v} (step {target.step})"
        if end.torn:
            positions = ", ".join(map(str, end.torn_positions))
            message = f"append a record after log position {positions}, which cannot be read, with {state}"
            actions.append(RepairAction("supersede", message))
        elif whole is not None and whole.v <= last.v and whole.chain != last.chain:
            actions.append(RepairAction("rollback", f"append a rollback to {state}"))
        elif end.lost is not None:
            message = f"append a rollback to {state} with the names found in the log, because {end.lost} is lost"
            actions.append(RepairAction("rollback", message))
        elif is_time_wrong:
            message = f"append a rollback to {state} at the current time: the newest has {text_of(last.ts_ms)}"
            actions.append(RepairAction("time", message))
    if is_hint_wrong and last is not None:
        actions.append(RepairAction("hint", f"rewrite {layout.HINT}"))
    if is_root_wrong:
        actions.append(RepairAction("root", f"rewrite {layout.ROOT_GROUP} and {layout.DATA_GROUP}"))
    return tuple(actions)


def repair_store(
    store: Store, *, dry_run: bool = False, threads: int | None = None, progress: ProgressCallback | None = None
) -> RepairReport:
    """Find the newest intact version and make the store continue from it. Blocks.

    Idempotent: a repaired store has no actions left. Stop the store's writers first; a writer that still runs is
    fenced by a superseding record, and by a rollback like by any other rollback. Reads every object of the candidate
    states, newest first, like `verify_store` with ``deep``.

    Parameters
    ----------
    dry_run
        Return the actions, and write nothing.
    threads
        Number of objects read at once; None is the default number.
    progress
        As for `verify_store`.

    Raises
    ------
    Conflict, Fenced
        Another process saved or opened a writer meanwhile; retry.
    ReadOnlyStore
        A newer library's store, or a relay.
    CorruptObject
        A Zarr document of the root is a folder with other files.
    WrongClock
        The newest record has a future time, and this machine's clock differs from the store's, too.
    StorageFailure, AccessDenied, CommitStateUnknown

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-repair")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> repair_store(store, dry_run=True).actions
    ()
    """
    store.internals.check_not_relay()
    findings = Findings(store.branch)
    end = read_end(store)
    prefix = store.internals.log.prefix
    with Workers(threads, name="cnr-repair") as workers:
        read_log(store.storage, store.identity, workers, findings, prefix=prefix)
    check_root(store.storage, findings)
    for problem in findings.problems:
        if problem.path in zarr_groups() and any(store.storage.list_objects(problem.path)):
            raise CorruptObject(f"{store.url}: {problem.message}; nothing was written", path=problem.path)
    found = find_newest_whole(store, threads=threads, progress=progress)
    for problem in found.problems:
        findings.add(problem)
    whole = None if found.entry is None else found.entry.record
    hint_key = layout.hint_key(prefix)
    wrong = {problem.path for problem in findings.problems}
    now_ms = wall_ms()
    is_time_wrong = end.last is not None and is_ahead(end.last.record, now_ms)
    actions = plan_repair(
        end, whole, is_hint_wrong=hint_key in wrong, is_root_wrong=not wrong.isdisjoint(zarr_groups()),
        is_time_wrong=is_time_wrong,
    )  # fmt: skip
    if not dry_run:
        if is_time_wrong:
            check_clock(store.storage, now_ms)
        ts_ms = now_ms if is_time_wrong else 0
        actions = tuple(_carry_out(store, action, end, whole, ts_ms) for action in actions)
    if whole is None and end.last is not None and not end.last.record.chain and not end.torn and not found.rejected:
        whole = end.last.record  # nothing was saved yet, so nothing is lost
    torn = {layout.commit_key(version, prefix) for version in end.torn_positions}
    mended = {hint_key, *zarr_groups(), end.lost, *torn}
    return RepairReport(
        url=store.url, is_dry_run=dry_run, newest=end.newest, target=None if whole is None else whole.v,
        actions=actions, torn=tuple(end.torn_positions) if end.last is not None else (),
        lost=tuple(LostState(entry.record.v, entry.record.step) for entry in found.rejected),
        remaining=tuple(
            problem for problem in findings.problems
            if not actions or (problem.path not in mended and problem.kind != WrongClock.kind)
        ),
        has_log=_has_log(store),
    )  # fmt: skip


def return_to(
    store: Store, end: LogEnd, target: CommitRecord, *, ts_ms: int = 0, info: WriterInfo | None = None
) -> LogEntry:
    """Commit a rollback to an older version's state and return the new entry. Blocks.

    The record supersedes torn positions and increments the epoch: a writer of a torn record cannot commit any more.

    Parameters
    ----------
    end
        The end of the log from which ``target`` was chosen. A version saved after it is never rolled back.
    ts_ms
        The record's time in ms, if earlier records were stamped by a clock far ahead; 0 is the current time.
    info
        The writer of the record; this process by default.

    Raises
    ------
    Conflict
        Another process saved meanwhile, or appended after the torn positions.
    CorruptStore
        No record can be read, or part of the log was deleted.
    CommitStateUnknown, Fenced, ReadOnlyStore, StorageFailure, VersionExpired
    """
    if end.last is None:
        raise CorruptStore(
            f"no record of {store.url} can be read, so none can be appended; restore the log from a backup",
            version=end.newest,
        )
    last = end.last.record
    check_writer_features(last, store.url)
    draft = draft_after(
        last, "rollback", info or writer_info(),
        target=target.v, chain=target.chain, checkpoint=target.checkpoint, step=target.step, ts_ms=ts_ms,
    )  # fmt: skip
    if end.torn:
        if read_end(store) != end:
            raise Conflict(f"the log of {store.url} has changed since it was read; repair again", version=end.newest)
        superseded = Superseded(follows=end.last.digest, torn=end.torn)
        draft = msgspec.structs.replace(draft, epoch=last.epoch + 1, supersedes=superseded)
    # If another record has superseded the torn ones it is a rollback or a close: rebase_rollback refuses both.
    return store.internals.log.append(end.last, draft, rebase_rollback)


def _has_log(store: Store) -> bool:
    try:
        store.internals.check_begun()
    except CorruptStore:
        return False
    except VersionNotFound:
        pass  # Nothing was ever saved, so nothing is lost.
    return True


def _carry_out(store: Store, action: RepairAction, end: LogEnd, whole: CommitRecord | None, ts_ms: int) -> RepairAction:
    version = None
    if action.kind in ("supersede", "rollback", "time"):
        assert end.last is not None  # plan_repair plans these only with a last record
        target = end.last.record if whole is None else whole
        version = return_to(store, end, target, ts_ms=ts_ms).record.v
    elif action.kind == "hint":
        newest = max(list_positions(store.storage, store.internals.log.prefix))
        store.storage.put(layout.hint_key(store.internals.log.prefix), canonical_json(Hint(newest)))
    else:
        for key, document in zarr_groups().items():
            store.storage.put(key, document)
        store.storage.sync_folders(zarr_groups())
    return RepairAction(action.kind, action.message, version)
