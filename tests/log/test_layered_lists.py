"""The lists of a log equal those of a plain model, at its newest record and at each that is live, whatever is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord, WriterInfo
from cnr_store.log import layers
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_after, draft_init, rebase_expire
from cnr_store.log.side_objects import delete_found
from cnr_store.maintenance.gc.deleting import unneeded_lists
from cnr_store.maintenance.gc.logs import LogScan, SegmentNames
from cnr_store.runtime.threads import Workers
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import IsolatedMemoryFileSystem

WRITER = WriterInfo(host="h", lib="l", run_id="r")
LISTS = ("tags", "channels", "kept", "expired", "aborted")

starts = st.integers(0, 30)
changes = st.one_of(
    st.tuples(st.just("tags"), starts, st.integers(1, 12)),
    st.tuples(st.just("untag"), starts, st.integers(1, 12)),
    st.tuples(st.just("channel"), starts, st.integers(0, 9)),
    st.tuples(st.just("aborted"), starts, st.integers(0, 3)),
    st.tuples(st.just("floor"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("expired"), st.integers(0, 9), st.booleans()),
    st.just(("collect",)),
    st.just(("reopen",)),
)


@contextmanager
def small() -> Iterator[None]:
    """So that some dozen names make several layers."""
    with mock.patch.object(layers, "MAX_INLINE_BYTES", 200), mock.patch.object(layers, "MAX_CHANGES_BYTES", 90):
        yield


def lists_of(record: CommitRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in LISTS}


def changed(head: CommitRecord, change: tuple[Any, ...]) -> dict[str, Any]:
    """The fields of the next record: what has expired never comes back (spec, CNR-GC-4)."""
    kind, key, value = change
    several = [f"name {number:02d}" for number in range(key, key + value)]
    if kind == "tags":
        return {"tags": {**head.tags, **dict.fromkeys(several, head.v)}}
    if kind == "untag":
        return {"tags": {name: version for name, version in head.tags.items() if name not in several}}
    if kind == "channel":
        target = value if value <= head.v and is_live(head, value) else head.v
        return {"channels": {**head.channels, f"channel {key}": target}}
    if kind == "aborted":
        aborted = {txn: ms for txn, ms in head.aborted.items() if txn != f"{key:032x}"}
        return {"aborted": {**aborted, f"{key:032x}": value} if value else aborted}
    if kind == "floor":
        floor = max(head.floor, head.v - key)
        kept = {*head.kept, *range(head.floor, floor, 2)} if value else {*head.kept} & {*range(0, floor, 3)}
        return {"floor": floor, "kept": tuple(sorted(kept))}
    return {"expired": tuple(sorted({*head.expired, min(head.v, key)}))}


@given(st.lists(changes, min_size=20, max_size=60))
def test_layered_lists_are_those_of_a_plain_model(plan: list[tuple[Any, ...]]) -> None:
    storage = storage_from_filesystem(IsolatedMemoryFileSystem(), "/store")
    with small(), Workers(1) as workers:
        log = CommitLog(storage, "5" * 32)
        head = log.append_first(draft_init(WRITER))
        model = {0: lists_of(head.record)}
        for change in plan:
            if change == ("collect",):
                view = LogScan(storage, log, "5" * 32, SegmentNames(), workers).read("", "", lambda _: None)
                delete_found(storage, unneeded_lists(storage, log, [view], older_than_ms=0))
            elif change == ("reopen",):
                log = CommitLog(storage, "5" * 32)
                head = log.latest()
            else:
                draft = draft_after(head.record, "expire", WRITER, **changed(head.record, change))
                head = log.append(head, draft, rebase_expire)
                model[head.record.v] = lists_of(head.record)

        other = CommitLog(storage, "5" * 32)
        assert lists_of(other.latest().record) == model[head.record.v]
        for entry in other.walk(other.latest()):
            if entry.record.state is None:
                assert lists_of(entry.record) == model[entry.record.v]
            else:
                assert not is_live(head.record, entry.record.v)
        assert len(head.layers) <= 6
