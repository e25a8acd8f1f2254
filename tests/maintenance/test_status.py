"""The state of a store for monitors."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_store import Store
from cnr_store.format import layout
from cnr_store.format.commit_record import is_live
from cnr_store.format.records import CommitRecord, Pin, WriterInfo
from cnr_store.maintenance.status import (
    LastMaintenance,
    count_live,
    head_status,
    put_last_maintenance,
    read_last_maintenance,
    read_status,
)

HEAD = 12
LAST = LastMaintenance(
    ended_ms=1_000, duration_s=2.5, outcome="done", rewritten_bytes=3, deleted_bytes=4, pending_delete_bytes=5
)
versions = st.integers(0, HEAD)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "s"), fsync=False, threads=1)
    values = np.ones((50, 4), np.float32)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("user", values)
        with writer.begin(step=2) as txn:
            txn.write_rows("user", np.arange(5), values[:5] + 1)
    return store


@given(
    floor=versions,
    kept=st.frozensets(versions),
    expired=st.frozensets(versions),
    named=st.tuples(*[st.dictionaries(st.text("ab", min_size=1, max_size=2), versions, max_size=3)] * 3),
)
def test_live_versions_are_counted_as_readers_see_them(
    floor: int, kept: frozenset[int], expired: frozenset[int], named: tuple[dict[str, int], ...]
) -> None:
    tags, channels, pins = named
    head = CommitRecord(
        v=HEAD, kind="tag", commit_uuid="", store_uuid="", parent_digest="", epoch=0, checkpoint=0, step=0, ts_ms=0,
        writer=WriterInfo(host="", lib="", run_id=""), floor=floor, kept=tuple(sorted(kept)),
        expired=tuple(sorted(expired)), tags=tags, channels=channels,
        pins={name: Pin(version=version, name=name) for name, version in pins.items()},
    )  # fmt: skip

    assert count_live(head) == sum(is_live(head, version) for version in range(HEAD + 1))


def test_a_heads_status_is_its_newest_checkpoints_whatever_comes_after(store: Store) -> None:
    checkpoint = store.head().record
    store.tag("release")

    status = head_status(store)

    assert (status.branch, status.version, status.step, status.checkpoint) == (None, checkpoint.v + 1, 2, 2)
    assert status.checkpoint_ms == checkpoint.ts_ms
    assert (status.chain_length, status.live_versions, status.pending_delete) == (2, checkpoint.v + 2, 0)
    sizes = [entry.size_bytes for entry in checkpoint.chain]
    assert (status.baseline_bytes, status.chain_bytes) == (sizes[0], sum(sizes))
    assert status.restore_ratio == sum(sizes) / sizes[0]


def test_an_empty_store_has_a_status() -> None:
    with Store.create("memory://empty-status") as store:
        status = head_status(store)

    assert (status.chain_length, status.checkpoint_ms, status.restore_ratio) == (0, None, None)


def test_a_monitor_reads_how_the_last_maintenance_ended(store: Store) -> None:
    assert read_last_maintenance(store) is None

    put_last_maintenance(store, LAST)

    assert read_last_maintenance(store) == LAST


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[" * 5_000, msgspec.json.encode(LAST)[:-3]])
def test_what_is_left_of_a_damaged_note_is_no_note(store: Store, data: bytes) -> None:
    put_last_maintenance(store, LAST)
    store.storage.put(layout.LAST_MAINTENANCE, data)

    assert read_last_maintenance(store) is None
    assert store.latest_version() == 3


def test_a_stores_status_has_every_branch_that_is_open(store: Store) -> None:
    store.fork("trial").close()
    store.fork("over", ttl_s=0.001).close()
    time.sleep(0.01)

    whole, one = read_status(store), read_status(store.on_branch("trial"))

    assert [head.branch for head in whole.heads] == [None, "trial"]
    assert whole.segments == 2
    assert whole.heads[1] == one.heads[0]
    assert (one.heads[0].version, one.heads[0].step, one.heads[0].chain_length) == (0, 2, 2)
