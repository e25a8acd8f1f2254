"""What a commit, a poll and an open cost in storage calls, counted: they grow with what changed, never with history."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from cnr_store import Store, TableOptions, Writer
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import FaultyFileSystem, IsolatedMemoryFileSystem

ROOT = "/root"
OPTIONS = TableOptions(scale=0.25)


def make(tables: int, rows: int = 400) -> tuple[FaultyFileSystem, Store, Writer]:
    fs = FaultyFileSystem(IsolatedMemoryFileSystem())
    store = Store.create_on(storage_from_filesystem(fs, ROOT), threads=1)
    writer = store.writer()
    with writer.begin(0) as txn:
        for k in range(tables):
            txn.write_table(f"t{k}", np.zeros((rows, 2), np.float32), options=OPTIONS)
    return fs, store, writer


def save(writer: Writer, step: int, tables: tuple[str, ...] = ("t0",), rows: int = 100) -> None:
    ids = np.arange(0, 3 * rows, 3, dtype=np.int64)
    with writer.begin(step) as txn:
        for table in tables:
            txn.write_rows(table, ids, np.full((rows, 2), step % 50 + 1, np.float32))


def cost(fs: FaultyFileSystem, call: Any) -> Counter[str]:
    """Number of calls by operation, and the resulting objects."""
    before, objects = len(fs.calls), len(fs.inner.find(ROOT))
    call()
    counted: Counter[str] = Counter(call.operation for call in fs.calls[before:])
    counted["objects"] = len(fs.inner.find(ROOT)) - objects
    return counted


def test_a_poll_for_news_is_one_request() -> None:
    fs, store, writer = make(1)
    head = store.head()
    assert cost(fs, lambda: store.poll(head)) == Counter(read=1, objects=0)
    save(writer, 1)
    before = len(fs.calls)
    news = store.poll(head)
    assert news is not None
    assert len(fs.calls) == before + 1


def test_a_commit_costs_the_same_after_ten_and_after_a_thousand_versions() -> None:
    fs, store, writer = make(1)
    costs: dict[int, Counter[str]] = {}
    for version in (10, 1_000):
        while writer.head.record.v < version or len(writer.head.record.chain) < 5:
            writer.begin(writer.head.record.step + 1).commit()
        costs[version] = cost(fs, partial(save, writer, 5_000 + version))
        assert writer.head.record.kind == "delta"

    assert costs[10] == costs[1_000]
    assert costs[10]["read"] == costs[10]["list"] == costs[10]["stat"] == 0
    assert store.latest_version() == writer.head.record.v > 1_000


def test_a_commit_costs_what_it_touches_not_how_many_tables_there_are() -> None:
    one_fs, _, one = make(1)
    fs, _, writer = make(10)
    alone = cost(one_fs, lambda: save(one, 1))

    assert cost(fs, lambda: save(writer, 1, ("t3",))) == alone
    empty = cost(fs, lambda: writer.begin(2).commit())
    assert cost(fs, lambda: save(writer, 3, ("t3", "t7"))) == alone, "tables of one shape share arrays"
    # Rows and codes with one document and one chunk each.
    assert alone["objects"] - empty["objects"] == 4


@pytest.mark.parametrize("deltas", [0, 1, 7])
def test_opening_a_snapshot_reads_one_manifest_per_segment(deltas: int) -> None:
    fs, _, writer = make(2)
    for step in range(1, deltas + 1):
        save(writer, step)
    store = Store.open_on(storage_from_filesystem(fs, ROOT), threads=1)

    before = len(fs.calls)
    head = store.head()
    finding = fs.calls[before:]
    before = len(fs.calls)
    snapshot = store.snapshot()
    opening = fs.calls[before:]

    manifests = [call.path for call in opening if call.path.endswith("_segment.json.zst")]
    assert len(manifests) == len(set(manifests)) == deltas + 1 == len(snapshot.readers)
    assert len(opening) - len(manifests) == len(finding) <= 3
    assert {call.operation for call in opening} == {"read"}
    assert snapshot.version == head.record.v


def test_a_range_reads_only_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cnr_store.format.arrays.CHUNK_BYTES", 400)
    fs, store, writer = make(1)
    save(writer, 1)
    view = store.snapshot().table("t0")
    before = len(fs.calls)
    view.read()
    whole = len(fs.calls) - before
    before = len(fs.calls)
    view.read(10, 20)
    view_calls = fs.calls[before:]
    assert len(view_calls) <= 3 < whole
    before = len(fs.calls)
    assert view.read_rows(np.asarray([399, 399]))[:, 0].tolist() == [0, 0]
    assert len(fs.calls) - before == 1  # no delta holds it, and a baseline's ids are a range
