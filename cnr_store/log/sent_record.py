"""Turn a draft into the bytes of one log position: fill in what depends on the position, and check."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import msgspec

from cnr_store.errors import BadInput, CorruptRecord
from cnr_store.format.commit_record import LogEntry, check_statements, decode_record, encode_record
from cnr_store.format.documents import sha256
from cnr_store.format.layout import branch_of, state_key
from cnr_store.format.limits import MAX_LISTS_BYTES, MAX_RECORD_BYTES
from cnr_store.format.records import CommitRecord
from cnr_store.log.clock import MAX_SKEW_MS, check_clock
from cnr_store.log.layers import split_lists
from cnr_store.storage import Storage


@dataclass(frozen=True, slots=True)
class SentRecord:
    """A record that was, or may have been, sent to a log position."""

    entry: LogEntry
    data: bytes


def prepare_record(
    storage: Storage,
    store_uuid: str,
    prefix: str,
    parent: LogEntry | None,
    draft: CommitRecord,
    *,
    version: int,
    now_ms: int,
) -> SentRecord:
    """Complete the draft for a position after ``parent``, and write its new side object durably. Blocks.

    Raises
    ------
    BadInput
        The record exceeds the size limit, or readers would refuse it.
    WrongClock, StorageFailure
    """
    before = None if parent is None else parent.record
    record = msgspec.structs.replace(
        draft,
        v=version,
        commit_uuid=uuid.uuid4().hex,
        store_uuid=store_uuid,
        parent_digest=_digest_before(parent, draft),
        ts_ms=draft.ts_ms or _time_behind(storage, before, now_ms),
        state=None,
        removed=msgspec.UNSET,
    )
    extra = {} if parent is None else parent.extra
    # Position 0 of a branch has a parent in another log, and does not use that log's side objects.
    below = parent.layers if parent is not None and version > 0 else ()
    slim, layers, side_object = split_lists(record, below, branch_of(prefix))
    data = encode_record(slim, extra)
    if len(data) > MAX_RECORD_BYTES:
        raise BadInput(
            f"the {record.kind} record has {len(data)} bytes, at most {MAX_RECORD_BYTES} are allowed; "
            "make `user` smaller or compact the chain",
            version=record.v,
            expected=MAX_RECORD_BYTES,
            found=len(data),
        )
    _check_readable(record, data)
    if side_object is not None:
        key = state_key(layers[-1].digest)
        storage.put_document(key, side_object, MAX_LISTS_BYTES)
        storage.sync_folders([key])
    return SentRecord(LogEntry(record, sha256(data), dict(extra), layers), data)


def _time_behind(storage: Storage, before: CommitRecord | None, now_ms: int) -> int:
    """Return the time of the next record. If it is much later than the last, check this machine's clock."""
    if before is None:
        return now_ms  # The creator of the store has checked the clock.
    if now_ms > before.ts_ms + MAX_SKEW_MS:
        check_clock(storage, now_ms, head_ms=before.ts_ms, may_be_behind=True)
    return max(now_ms, before.ts_ms + 1)


def _check_readable(record: CommitRecord, data: bytes) -> None:
    """Check that readers accept the record."""
    try:
        decode_record(data, record.v)
        check_statements(record)
    except CorruptRecord as error:
        message = f"the record cannot be committed, because readers would refuse it: {error}"
        raise BadInput(message, version=record.v) from error


def _digest_before(parent: LogEntry | None, draft: CommitRecord) -> str:
    """Return the sha256 of the bytes at the position before the draft's."""
    if draft.supersedes is not None:
        return draft.supersedes.torn[-1]
    return draft.parent_digest if parent is None else parent.digest
