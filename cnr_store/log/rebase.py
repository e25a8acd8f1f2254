"""What a record that lost its log position becomes behind the record that won it (spec, section 7).

Every function takes a draft and one intervening record and returns the draft for the position after it, or
raises because the two do not commute. The rules are pure; `log.CommitLog.append` applies one to every
intervening record in order. A training state never moves onto another training state: a delta means something
only on the exact state it was trained from.
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
"""Kinds that leave the training state as it is, so a data record may follow them unchanged."""


def leaves_state(record: CommitRecord) -> bool:
    """Return whether the training state behind ``record`` is the one before it, and its writer still the same. Pure."""
    return record.kind in _COMMUTING_KINDS


def draft_after(head: CommitRecord, kind: RecordKind, writer: WriterInfo, **changes: Any) -> CommitRecord:
    """Return a draft of ``kind`` that carries over everything of ``head`` but the given ``changes``.

    Position, uuid, parent digest and time are filled in by the append. Pure.

    Raises
    ------
    BranchNotFound
        The head closes a branch: nothing follows it.
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
    """Return the draft of log position 0; its parent is the store's identity, of which the sha256 is given. Pure."""
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
    """Return the draft of position 0 of the branch of uuid ``branch``, which goes on from ``point``. Pure.

    The state and its features are the fork point's. Its names, pins and expiries are about versions of its own log.
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
    """Return a ``baseline`` or ``delta`` draft moved behind a record that left the training state alone.

    The draft's own segment (the last of its chain, named by ``txn``) is put on the new chain. Pure.

    Raises
    ------
    Fenced
        The record has a higher epoch, or is a fence.
    TransactionAborted
        The record's abort list names ``txn``.
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
    """Refuse to go on with a transaction that a record has given up, or may have: its lists were collected. Pure.

    Raises
    ------
    TransactionAborted
    """
    if txn in record.aborted or record.state is not None:
        raise TransactionAborted(
            f"transaction {txn} was declared dead by commit record {record.v}; begin it again",
            version=record.v,
            found=txn,
        )


def rebase_rollback(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``rollback`` draft moved behind a record that left the training state alone. Pure.

    The chain is the target's and stays as it is.

    Raises
    ------
    Fenced, Conflict
        As `rebase_data`.
    VersionExpired
        The record expired the target.
    """
    record = intervening.record
    _check_epoch(draft, record)
    _check_commutes(draft, record)
    _check_target_lives(draft, record)
    return _adopt(draft, record, chain=draft.chain, checkpoint=draft.checkpoint, step=draft.step)


def rebase_fence(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``fence`` draft behind any record: the newest state, one epoch above it. Pure."""
    return _adopt(draft, intervening.record, epoch=intervening.record.epoch + 1)


def rebase_succession(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return the ``fence`` draft of a writer that has its state already, behind a record that left that alone. Pure.

    Raises
    ------
    Conflict
        The record is data, or the fence of another writer: one that goes on from the same state.
    BranchNotFound
        The branch was closed.
    """
    record = intervening.record
    _check_goes_on(record)
    if not leaves_state(record):
        raise Conflict(
            f"another writer has gone on from the state that was restored here, with commit record {record.v} "
            f"({record.kind}): {author_of(record)}. Nothing of this run was saved since. If the other one is to go on, "
            "stop this one; else stop the other and restore here again",
            version=record.v, found=record.kind,
        )  # fmt: skip
    return rebase_fence(draft, intervening)


def rebase_tag(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``tag`` draft (``name``, ``target``) behind any record, after checking both again. Pure.

    Raises
    ------
    VersionExpired
        The record expired the target.
    TagExists
        The name now points to another version.
    """
    record = intervening.record
    _check_target_lives(draft, record)
    name, target = _named(draft)
    if name in record.channels:
        raise TagExists(
            f"{name!r} is a channel since commit record {record.v}; a tag needs a name of its own", version=record.v
        )
    if record.tags.get(name, target) != target:
        raise TagExists(
            f"tag {name!r} points to version {record.tags[name]} since commit record {record.v}; "
            "tags do not move, choose another name or untag it first",
            version=record.v,
            expected=target,
            found=record.tags[name],
        )
    return _adopt(draft, record, tags={**record.tags, name: target})


def rebase_untag(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return an ``untag`` draft (``name``) behind any record. Pure.

    Raises
    ------
    TagNotFound
        The record removed the tag already.
    """
    record = intervening.record
    if draft.name not in record.tags:
        raise TagNotFound(
            f"tag {draft.name!r} was removed by commit record {record.v}", version=record.v, found=draft.name
        )
    return _adopt(draft, record, tags={key: v for key, v in record.tags.items() if key != draft.name})


def rebase_channel(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``channel`` draft (``name``, ``target``; no target removes it) behind any record. Pure.

    A channel moves: behind another move of the same one this draft is the later one, and wins.

    Raises
    ------
    VersionExpired
        The record expired the target.
    TagExists
        The name is a tag since that record.
    """
    record = intervening.record
    _check_target_lives(draft, record)
    name = draft.name or ""
    if name in record.tags:
        raise TagExists(
            f"{name!r} is a tag since commit record {record.v}; a channel needs a name of its own",
            version=record.v,
            found=record.tags[name],
        )
    others = {key: version for key, version in record.channels.items() if key != name}
    return _adopt(draft, record, channels=others if draft.target is None else {**others, name: draft.target})


def rebase_fork(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Return a ``fork`` draft (``name`` = branch uuid, ``target``; no target unpins it) behind any record. Pure.

    Raises
    ------
    VersionExpired
        The record expired the target.
    BranchExists
        Another branch of that name was forked meanwhile.
    BranchNotFound
        The branch to unpin was unpinned meanwhile.
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
    """Return a ``compact`` draft with the segments ``run`` of the newest chain replaced by ``merged``. Pure.

    Raises
    ------
    TransactionAborted
        The record's abort list names the merged segment's transaction.
    Conflict
        The run is no longer contiguous in the record's chain: the merged segment replaces nothing.
    """
    record = intervening.record
    check_not_given_up(record, merged.seg.rpartition("-")[2])
    return _adopt(draft, record, chain=replace_run(record, merged, run))


def rebase_expire(draft: CommitRecord, intervening: LogEntry) -> CommitRecord:
    """Refuse: what an ``expire`` may name depends on every record before it, so it is planned again.

    Raises
    ------
    Conflict
        Always.
    """
    raise Conflict(
        f"commit record {intervening.record.v} landed while the {draft.kind} was planned; plan it again",
        version=intervening.record.v,
        found=intervening.record.kind,
    )


def replace_run(head: CommitRecord, merged: ChainEntry, run: Sequence[str]) -> tuple[ChainEntry, ...]:
    """Return the chain of ``head`` with the contiguous segments ``run`` replaced by ``merged``. Pure.

    Raises
    ------
    Conflict
        If the chain does not hold exactly that run, from ``merged.l0`` to ``merged.l1``.
    """
    names = [entry.seg for entry in head.chain]
    start = names.index(run[0]) if run and run[0] in names else len(names)
    stop = start + len(run)
    replaced = head.chain[start:stop]
    is_same = bool(replaced) and names[start:stop] == list(run)
    if not is_same or (replaced[0].l0, replaced[-1].l1) != (merged.l0, merged.l1):
        raise Conflict(
            f"the run of {len(run)} segments that was compacted is no longer in the chain of commit record "
            f"{head.v}; abandon the merged segment and plan again",
            version=head.v,
        )
    return (*head.chain[:start], merged, *head.chain[stop:])


def _adopt(draft: CommitRecord, newest: CommitRecord, **own: Any) -> CommitRecord:
    """Everything of ``newest`` except what makes the draft what it is."""
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
            f"the branch was dropped with its commit record {record.v}; stop this writer",
            version=record.v,
            expected=draft.epoch,
            found=record.epoch,
        )
    if record.epoch > draft.epoch or record.kind == "fence":
        raise fenced_by(record, draft.epoch)


def _check_goes_on(record: CommitRecord) -> None:
    if record.kind == "close":
        raise BranchNotFound(
            f"the branch was dropped with its commit record {record.v}; fork another", version=record.v
        )


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
            f"version {target} expired with commit record {record.v}; choose a later one",
            version=target,
            expected=record.floor,
            found=target,
        )


def _chain_up_to(record: CommitRecord, own: ChainEntry) -> tuple[ChainEntry, ...]:
    """The part of the chain whose state the delta starts from."""
    for index, entry in enumerate(record.chain):
        if entry.l1 == own.l0:
            return record.chain[: index + 1]
    raise DoesNotApply(
        f"segment {own.seg} starts at checkpoint {own.l0}, where no segment of commit record {record.v} ends "
        "any more: compaction merged it into a later one; save again",
        version=record.v,
        expected=own.l0,
        found=[entry.l1 for entry in record.chain],
    )


def _named(draft: CommitRecord) -> tuple[str, int]:
    if draft.name is None or draft.target is None:
        raise ValueError(f"a {draft.kind} draft has a name and a target")
    return draft.name, draft.target
