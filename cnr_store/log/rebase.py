"""Rebase a draft that lost its log position onto the record that won it (spec, section 7).

Every function takes a draft and one intervening record. It returns the draft for the position after that record, or
raises because the two do not commute. The rules are pure; `CommitLog.append` applies one to every intervening record in
order. A delta is never rebased onto another training state: it is valid only for the state it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cnr_store.errors import (
    BranchExists,
    BranchNotFound,
    Conflict,
    DoesNotApply,
    Fenced,
    TagExists,
    TagNotFound,
    TransactionAborted,
    VersionExpired,
)
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.records import ChainEntry, CommitRecord, RecordKind, WriterInfo
from cnr_store.log.author import author_of, fenced_by

_COMMUTING_KINDS: frozenset[str] = frozenset({"compact", "tag", "untag", "channel", "expire", "fork"})
"""Kinds that do not change the training state, so a data record may follow them unchanged."""


def leaves_state(record: CommitRecord) -> bool:
    """Return whether ``record`` changes neither the training state nor the writer. Pure."""
    return record.kind in _COMMUTING_KINDS


def draft_after(head: CommitRecord, kind: RecordKind, writer: WriterInfo, **changes: Any) -> CommitRecord:
    """Return a draft of ``kind`` with the fields of ``head``, except the given ``changes``. Pure.

    The append fills in position, uuid, parent digest and time.

    Raises
    ------
    BranchNotFound
        The head closes a branch, so no record may follow it.
    """
    _check_goes_on(head)
    carried = msgspec.structs.replace(
        head,
        kind=kind,
        writer=writer,
        v=0,
        commit_uuid="",
        parent_digest="",
        ts_ms=0,
        state=None,
        removed=msgspec.UNSET,
        target=None,
        name=None,
        supersedes=None,
        user={},
    )
    return msgspec.structs.replace(carried, **changes)


def draft_init(writer: WriterInfo, identity_digest: str = "0" * 64) -> CommitRecord:
    """Return the draft of log position 0; its parent is the identity document, given by sha256. Pure."""
    return CommitRecord(
        v=0,
        kind="init",
        commit_uuid="",
        store_uuid="",
        parent_digest=identity_digest,
        epoch=0,
        checkpoint=0,
        step=0,
        ts_ms=0,
        writer=writer,
    )


def draft_branch(point: CommitRecord, branch: str, writer: WriterInfo) -> CommitRecord:
    """Return the draft of position 0 of the branch with uuid ``branch``, forked from ``point``. Pure.

    It has the fork point's state and features, but not its names, pins and expiries, which refer to the other log.
    """
    return msgspec.structs.replace(
        draft_init(writer),
        kind="fork",
        name=branch,
        target=point.v,
        chain=point.chain,
        checkpoint=point.checkpoint,
        step=point.step,
        reader_features=point.reader_features,
        writer_features=point.writer_features,
    )


def rebase_data(draft: CommitRecord, intervening: LogEntry, *, txn: str) -> CommitRecord:
    """Return a ``baseline`` or ``delta`` draft rebased onto a record that kept the training state. Pure.

    The draft's own segment, the last of its chain with the transaction ``txn``, is appended to the new chain.

    Raises
    ------
    Fenced
        The record has a higher epoch, or is a fence.
    TransactionAborted
        The record marks ``txn`` for deletion.
    Conflict
        The record is itself ``baseline``, ``delta`` or ``rollback``.
    DoesNotApply
        Compaction merged the segment that the delta starts from into a later one.
    """
    record = intervening.record
    _check_epoch(draft, record)
    check_not_given_up(record, txn)
    _check_commutes(draft, record)
    own = draft.chain[-1]
    chain = (own,) if own.kind == "baseline" else (*_chain_up_to(record, own), own)
    return _adopt(draft, record, chain=chain, checkpoint=draft.checkpoint, step=draft.step)


def check_not_given_up(record: CommitRecord, txn: str) -> None:
    """Check that a record does not mark a transaction for deletion. Pure.

    Raises
    ------
    TransactionAborted
        It does, or its lists were deleted, so that it may.
    """
    if txn in record.aborted or record.state is not None:
        raise TransactionAborted(
            f"transaction {txn} was marked for deletion by commit record {record.v}; begin it again",
            version=record.v,
            found=txn,
        )


def rebase_rollback(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``rollback`` draft rebased onto a record that kept the training state. Pure.

    The draft keeps its chain, which is the target's.

    Raises
    ------
    Fenced, Conflict
        As for `rebase_data`.
    VersionExpired
        The record expired the target.
    """
    record = intervening.record
    _check_epoch(draft, record)
    _check_commutes(draft, record)
    _check_target_lives(draft, record)
    return _adopt(draft, record, chain=draft.chain, checkpoint=draft.checkpoint, step=draft.step)


def rebase_fence(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``fence`` draft rebased onto any record: its state, with the epoch plus one. Pure."""
    return _adopt(draft, intervening.record, epoch=intervening.record.epoch + 1)


def rebase_succession(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return the ``fence`` draft of a writer with a restored state, rebased onto a record. Pure.

    Raises
    ------
    Conflict
        The record changes the state, or is the fence of another writer that continues from the same state.
    BranchNotFound
        The branch was closed.
    """
    record = intervening.record
    _check_goes_on(record)
    if not leaves_state(record):
        raise Conflict(
            f"another writer has continued from the state that was restored here, with commit record {record.v} "
            f"({record.kind}): {author_of(record)}. This run has saved nothing since. Stop this writer, or stop the "
            "other one and restore here again",
            version=record.v, found=record.kind,
        )  # fmt: skip
    return rebase_fence(draft, intervening)


def rebase_tag(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``tag`` draft (``name``, ``target``) rebased onto any record; checks both again. Pure.

    Raises
    ------
    VersionExpired
        The record expired the target.
    TagExists
        The name now belongs to another version or to a channel.
    """
    record = intervening.record
    _check_target_lives(draft, record)
    name, target = _named(draft)
    if name in record.channels:
        raise TagExists(
            f"{name!r} is a channel since commit record {record.v}; choose another name for the tag", version=record.v
        )
    if record.tags.get(name, target) != target:
        raise TagExists(
            f"tag {name!r} points to version {record.tags[name]} since commit record {record.v}; "
            "a tag cannot be moved, choose another name or untag it first",
            version=record.v,
            expected=target,
            found=record.tags[name],
        )
    return _adopt(draft, record, tags={**record.tags, name: target})


def rebase_untag(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return an ``untag`` draft (``name``) rebased onto any record. Pure.

    Raises
    ------
    TagNotFound
        The record has already removed the tag.
    """
    record = intervening.record
    if draft.name not in record.tags:
        raise TagNotFound(
            f"tag {draft.name!r} was removed by commit record {record.v}", version=record.v, found=draft.name
        )
    return _adopt(draft, record, tags={key: v for key, v in record.tags.items() if key != draft.name})


def rebase_channel(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``channel`` draft (``name``, ``target``) rebased onto any record. Pure.

    No ``target`` removes the channel. If the record moved the same channel, this draft is later and wins.

    Raises
    ------
    VersionExpired
        The record expired the target.
    TagExists
        The record made the name a tag.
    """
    record = intervening.record
    _check_target_lives(draft, record)
    name = draft.name or ""
    if name in record.tags:
        raise TagExists(
            f"{name!r} is a tag since commit record {record.v}; choose another name for the channel",
            version=record.v,
            found=record.tags[name],
        )
    others = {key: version for key, version in record.channels.items() if key != name}
    return _adopt(draft, record, channels=others if draft.target is None else {**others, name: draft.target})


def rebase_fork(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``fork`` draft (``name`` is the uuid; no ``target`` unpins it) rebased onto a record. Pure.

    Raises
    ------
    VersionExpired
        The record expired the target.
    BranchExists
        The record forked another branch of this name.
    BranchNotFound
        The record has already unpinned the branch.
    """
    record = intervening.record
    branch = draft.name or ""
    if draft.target is None:
        if branch not in record.pins:
            raise BranchNotFound(f"branch {branch} was unpinned by commit record {record.v}", version=record.v)
        return _adopt(draft, record, pins={key: pin for key, pin in record.pins.items() if key != branch})
    _check_target_lives(draft, record)
    pin = draft.pins[branch]
    if any(other.name == pin.name for other in record.pins.values()):
        raise BranchExists(
            f"branch {pin.name!r} was forked by commit record {record.v}; choose another name", version=record.v
        )
    return _adopt(draft, record, pins={**record.pins, branch: pin})


def rebase_compact(
    draft: CommitRecord, intervening: LogEntry, *, merged: ChainEntry, run: Sequence[str]
) -> CommitRecord:
    """Return a ``compact`` draft with the segments ``run`` of the record's chain replaced. Pure.

    Raises
    ------
    TransactionAborted
        The record marks the merged segment's transaction for deletion.
    Conflict
        The run is no longer contiguous in the record's chain.
    """
    record = intervening.record
    check_not_given_up(record, merged.seg.rpartition("-")[2])
    return _adopt(draft, record, chain=replace_run(record, merged, run))


def rebase_expire(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Raise: what an ``expire`` may name depends on every record before it, so it has to be planned again.

    Raises
    ------
    Conflict
        Always.
    """
    raise Conflict(
        f"commit record {intervening.record.v} was committed while the {draft.kind} was planned; plan it again",
        version=intervening.record.v,
        found=intervening.record.kind,
    )


def replace_run(head: CommitRecord, merged: ChainEntry, run: Sequence[str]) -> tuple[ChainEntry, ...]:
    """Return the chain of ``head`` with the contiguous segments ``run`` replaced by ``merged``. Pure.

    Raises
    ------
    Conflict
        The chain does not contain exactly that run, from ``merged.l0`` to ``merged.l1``.
    """
    names = [entry.seg for entry in head.chain]
    start = names.index(run[0]) if run and run[0] in names else len(names)
    stop = start + len(run)
    replaced = head.chain[start:stop]
    is_same = bool(replaced) and names[start:stop] == list(run)
    if not is_same or (replaced[0].l0, replaced[-1].l1) != (merged.l0, merged.l1):
        raise Conflict(
            f"the compacted run of {len(run)} segments is no longer in the chain of commit record {head.v}; "
            "plan the compaction again",
            version=head.v,
        )
    return (*head.chain[:start], merged, *head.chain[stop:])


def _adopt(draft: CommitRecord, newest: CommitRecord, **own: Any) -> CommitRecord:
    """Return a draft with the fields of ``newest``, except the draft's own."""
    changes: dict[str, Any] = {
        "name": draft.name,
        "target": draft.target,
        "user": draft.user,
        "reader_features": _union(newest.reader_features, draft.reader_features),
        "writer_features": _union(newest.writer_features, draft.writer_features),
        **own,
    }
    return draft_after(newest, draft.kind, draft.writer, **changes)


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*first, *second}))


def _check_epoch(draft: CommitRecord, record: CommitRecord) -> None:
    if record.kind == "close":
        raise Fenced(
            f"the branch was dropped by its commit record {record.v}; stop this writer",
            version=record.v,
            expected=draft.epoch,
            found=record.epoch,
        )
    if record.epoch > draft.epoch or record.kind == "fence":
        raise fenced_by(record, draft.epoch)


def _check_goes_on(record: CommitRecord) -> None:
    if record.kind == "close":
        raise BranchNotFound(f"the branch was dropped by its commit record {record.v}; fork another", version=record.v)


def _check_commutes(draft: CommitRecord, record: CommitRecord) -> None:
    if not leaves_state(record):
        raise Conflict(
            f"commit record {record.v} ({record.kind}; {author_of(record)}) changed the training state that this "
            f"{draft.kind} started from; restore it, or commit a baseline",
            version=record.v,
            found=record.kind,
        )


def _check_target_lives(draft: CommitRecord, record: CommitRecord) -> None:
    _check_goes_on(record)
    target = draft.target
    if target is not None and not is_live(record, target):
        raise VersionExpired(
            f"version {target} was expired by commit record {record.v}; choose a later one",
            version=target,
            expected=record.floor,
            found=target,
        )


def _chain_up_to(record: CommitRecord, own: ChainEntry) -> tuple[ChainEntry, ...]:
    """Return the beginning of the chain, up to the state that the delta starts from."""
    for index, entry in enumerate(record.chain):
        if entry.l1 == own.l0:
            return record.chain[: index + 1]
    raise DoesNotApply(
        f"segment {own.seg} starts at checkpoint {own.l0}, but no segment of commit record {record.v} ends there: "
        "compaction merged that segment into a later one; save again",
        version=record.v,
        expected=own.l0,
        found=[entry.l1 for entry in record.chain],
    )


def _named(draft: CommitRecord) -> tuple[str, int]:
    if draft.name is None or draft.target is None:
        raise ValueError(f"a {draft.kind} draft needs a name and a target")
    return draft.name, draft.target
