"""Make a damaged store usable again, by records behind the damage (spec, section 7.10).

Never deletes or overwrites a log position and never touches ``data/``: what is damaged stays as it is, and what was
committed stays in the log. The plan is pure; what it does at most is one record, the hint and the root's Zarr document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from cnr_store.errors import Conflict, CorruptStore, ReadOnlyStore, VersionNotFound, WrongClock
from cnr_store.format import layout
from cnr_store.format.commit_record import LogEntry, unknown_writer_features
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
from cnr_store.runtime.threads import Workers
from cnr_store.store import Store

ActionKind = Literal["supersede", "rollback", "time", "hint", "root"]


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One thing that a repair does.

    Attributes
    ----------
    kind
        ``supersede`` (a record behind torn ones), ``rollback`` (to a version that is whole), ``time`` (a rollback to
        the newest state that sets the time of the log right), ``hint`` or ``root`` (the object is written anew).
    message
        What it does, for people.
    version
        The record that it committed; None for objects that are no records, and in a dry run.
    """

    kind: ActionKind
    message: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class LostState:
    """A checkpoint newer than what the store goes on from, which cannot be restored."""

    version: int
    step: int


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What was done, or would be, and what stays lost.

    Attributes
    ----------
    url
        The store, without credentials.
    is_dry_run
        Whether nothing was written.
    newest
        The highest log position that was there.
    target
        The version whose state the store goes on from; None if no version is whole.
    actions
        In their order; empty if there is nothing to repair.
    torn
        Newest log positions that cannot be read: they hold no version from now on.
    lost
        Newer checkpoints than ``target`` that are not whole.
    remaining
        What is wrong and stays so: damage in older versions, or that no record can mend.
    has_log
        False where the log, or its beginning, was deleted: a repair appends records, and can make none up.
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
        The newest record could not be read, which says nothing about what it is.
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
    """Return what puts a store right, in order. Pure.

    Parameters
    ----------
    whole
        The newest version that is whole; None if there is none.

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
            message = f"append a record behind log position {positions}, which cannot be read, with {state}"
            actions.append(RepairAction("supersede", message))
        elif whole is not None and whole.v <= last.v and whole.chain != last.chain:
            actions.append(RepairAction("rollback", f"append a rollback to {state}"))
        elif end.lost is not None:
            message = f"append a rollback to {state} and the names that the log tells, as {end.lost} is lost"
            actions.append(RepairAction("rollback", message))
        elif is_time_wrong:
            message = f"append a rollback to {state} at the time of now: the newest record is of {text_of(last.ts_ms)}"
            actions.append(RepairAction("time", message))
    if is_hint_wrong and last is not None:
        actions.append(RepairAction("hint", f"write {layout.HINT} anew"))
    if is_root_wrong:
        actions.append(RepairAction("root", f"write {layout.ROOT_GROUP} and {layout.DATA_GROUP} anew"))
    return tuple(actions)


def repair_store(
    store: Store, *, dry_run: bool = False, threads: int | None = None, progress: ProgressCallback | None = None
) -> RepairReport:
    """Find the newest version that is whole and make the store go on from it; by default only say so. Blocks.

    Safe to call again: a repaired store needs nothing. Stop the store's writers first; one that goes on all the same
    is fenced by a superseding record, and by a rollback as by any other. Reads every object of the states that it
    tries, newest first, as `verify_store` with ``deep``.

    Parameters
    ----------
    dry_run
        Change nothing.
    threads
        Objects read at once; None takes the usual number.
    progress
        As for `verify_store`.

    Raises
    ------
    Conflict, Fenced
        Another process saved, or opened a writer, meanwhile; call again.
    ReadOnlyStore
        A newer library's store, or a relay.
    WrongClock
        The newest record is of a time to come, and this machine's clock is not the store's either.
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
    """Make an older version's state the head's, past newest records that cannot be read; returns the new entry.

    Torn positions are superseded, one epoch up: a writer of one of them can commit nothing more.

    Parameters
    ----------
    end
        The end of the log from which ``target`` was chosen: what was saved behind it is never gone back from.
    ts_ms
        The time of the record, where those before it were stamped by a clock that was far ahead; 0 is the usual.
    info
        Who goes on from there; this process by default.

    Raises
    ------
    Conflict
        Another process saved meanwhile, or appended behind what is torn.
    CorruptStore
        No record can be read, or part of the log was deleted.
    CommitStateUnknown, Fenced, ReadOnlyStore, StorageFailure, VersionExpired
    """
    if end.last is None:
        raise CorruptStore(
            f"no record of {store.url} behind which one could be appended can be read; restore the log from a backup",
            version=end.newest,
        )
    last = end.last.record
    unknown = unknown_writer_features(last)
    if unknown:
        raise ReadOnlyStore(
            f"{store.url} uses writer features {unknown} that this library does not know", found=unknown
        )
    draft = draft_after(
        last, "rollback", info or writer_info(),
        target=target.v, chain=target.chain, checkpoint=target.checkpoint, step=target.step, ts_ms=ts_ms,
    )  # fmt: skip
    if end.torn:
        if read_end(store) != end:
            raise Conflict(f"the log of {store.url} has changed meanwhile; repair it again", version=end.newest)
        superseded = Superseded(follows=end.last.digest, torn=end.torn)
        draft = msgspec.structs.replace(draft, epoch=last.epoch + 1, supersedes=superseded)
    # What superseded the torn ones first is a rollback or a close: neither is followed.
    return store.internals.log.append(end.last, draft, rebase_rollback)


def _has_log(store: Store) -> bool:
    try:
        store.internals.check_begun()
    except CorruptStore:
        return False
    except VersionNotFound:
        pass  # Nothing was saved yet, so nothing is lost.
    return True


def _carry_out(store: Store, action: RepairAction, end: LogEnd, whole: CommitRecord | None, ts_ms: int) -> RepairAction:
    version = None
    if action.kind in ("supersede", "rollback", "time"):
        assert end.last is not None  # or it would not have been planned
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
