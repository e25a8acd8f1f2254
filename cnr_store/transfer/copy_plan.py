"""Decides which records the copy of a store has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cnr_store.format.commit_record import LogEntry
from cnr_store.format.records import CommitRecord, WriterInfo
from cnr_store.log.rebase import draft_after


@dataclass(frozen=True, slots=True)
class CopiedState:
    """A state of the source that gets a record at the copy, and the source's versions that have this state.

    ``entry`` is the first of these versions: the save, if it is live.
    """

    entry: LogEntry
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """The draft of one record of the copy, and the unknown fields that it takes over from the source's."""

    draft: CommitRecord
    extra: dict[str, Any]

    def is_like(self, found: CommitRecord) -> bool:
        """Return whether a record at the copy is this one; its time and the fields of its position may differ."""
        return _content(self.draft) == _content(found)


def distinct_states(entries: Iterable[LogEntry]) -> list[CopiedState]:
    """Return the states of some versions, given in ascending order; versions before the first save have none. Pure."""
    states: list[CopiedState] = []
    for entry in entries:
        if not entry.record.chain:
            continue
        if states and states[-1].entry.record.chain == entry.record.chain:
            last = states.pop()
            states.append(CopiedState(last.entry, (*last.versions, entry.record.v)))
        else:
            states.append(CopiedState(entry, (entry.record.v,)))
    return states


def record_times(states: Sequence[CopiedState], now_ms: int) -> list[int]:
    """Return the times of the copy's records in ms: the source's, ascending, and none after ``now_ms``. Pure.

    Only where a wrong clock stamped a record too late, it gets an earlier time.
    """
    times: list[int] = []
    for state in reversed(states):
        now_ms = min(now_ms, state.entry.record.ts_ms)
        times.append(now_ms)
        now_ms -= 1
    return times[::-1]


def plan_records(
    states: Sequence[CopiedState], times_ms: Sequence[int], head: CommitRecord, writer: WriterInfo
) -> list[PlannedRecord]:
    """Return the records of the copy from position 1 on: one for each state, then one for each name of them. Pure.

    A state whose chain has one segment becomes a ``baseline``, every other one a ``delta``.

    Parameters
    ----------
    head
        The record of the source that has the tags and channels.
    writer
        The writer of the names' records; a state's record keeps the source's.
    """
    planned = [
        PlannedRecord(_state_draft(state.entry.record, time_ms), state.entry.extra)
        for state, time_ms in zip(states, times_ms, strict=True)
    ]
    versions = {version: at for at, state in enumerate(states, start=1) for version in state.versions}
    extra = planned[-1].extra
    record = planned[-1].draft
    for name, target in _copied_names(head.tags, versions):
        record = draft_after(record, "tag", writer, name=name, target=target, tags={**record.tags, name: target})
        planned.append(PlannedRecord(record, extra))
    for name, target in _copied_names(head.channels, versions):
        channels = {**record.channels, name: target}
        record = draft_after(record, "channel", writer, name=name, target=target, channels=channels)
        planned.append(PlannedRecord(record, extra))
    return planned


def _state_draft(record: CommitRecord, time_ms: int) -> CommitRecord:
    return CommitRecord(
        v=0,
        kind="baseline" if len(record.chain) == 1 else "delta",
        commit_uuid="",
        store_uuid="",
        parent_digest="",
        epoch=0,
        checkpoint=record.checkpoint,
        step=record.step,
        ts_ms=time_ms,
        chain=record.chain,
        reader_features=record.reader_features,
        writer_features=record.writer_features,
        writer=record.writer,
        user=record.user,
    )


def _copied_names(names: Mapping[str, int], versions: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return the names of copied versions, each with the version of the copy, in the order of these."""
    return sorted(((name, versions[v]) for name, v in names.items() if v in versions), key=lambda item: item[::-1])


def _content(record: CommitRecord) -> CommitRecord:
    return msgspec.structs.replace(
        record, v=0, commit_uuid="", store_uuid="", parent_digest="", ts_ms=0, state=None, removed=msgspec.UNSET,
        writer=_NOBODY,
    )  # fmt: skip


_NOBODY = WriterInfo(host="", lib="", run_id="")
