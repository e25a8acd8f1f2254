"""Whatever way a whole part is read, its codes have the state digest that the version names; of one life of a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store import CorruptStore, Store, TableOptions
from cnr_store.maintenance.compaction import compact_run
from cnr_store.read.snapshot import Snapshot

ROWS = np.array([1, 3], np.int64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=1)


def save(store: Store, *, with_delta: bool) -> None:
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            txn.write_table("t", np.ones((10, 2), np.float32), options=TableOptions(scale=1.0))
        if with_delta:
            with writer.begin(step=2) as txn:
                txn.write_rows("t", ROWS, np.full((2, 2), 4, np.float32))


def of_another_state(store: Store) -> Snapshot:
    """The head, whose last segment says that it leads to another state than it does."""
    snapshot = store.snapshot()
    last = snapshot.readers[-1]
    parts = tuple(msgspec.structs.replace(part, state_digest="0" * 16) for part in last.manifest.parts)
    last.manifest = msgspec.structs.replace(last.manifest, parts=parts)
    return snapshot


def read_mirror(snapshot: Snapshot) -> Any:
    return snapshot.table("t").load({}, allocate=np.zeros)


WAYS: dict[str, Callable[[Snapshot], Any]] = {
    "whole": lambda snapshot: snapshot.table("t").read(),
    "into": lambda snapshot: snapshot.table("t").read_rectangle(values=np.empty((10, 2), np.float32)),
    "mirror": read_mirror,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("with_delta", [False, True], ids=["settled", "delta"])
def test_codes_of_another_state_are_refused(store: Store, with_delta: bool, way: Callable[[Snapshot], Any]) -> None:
    save(store, with_delta=with_delta)
    way(store.snapshot())

    with pytest.raises(CorruptStore, match="decodes to state digest"):
        way(of_another_state(store))


def test_a_new_life_of_a_table_has_nothing_of_the_one_before(store: Store) -> None:
    save(store, with_delta=True)
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=3) as txn:
            txn.drop_table("t")
        with writer.begin(step=4) as txn:
            txn.write_table("t", np.full((10, 2), 2, np.float32), options=TableOptions(scale=2.0))
        with writer.begin(step=5) as txn:
            txn.write_rows("t", ROWS, np.full((2, 2), 6, np.float32))
    assert compact_run(store, run=(2, 4)).outcome == "committed"  # no segment is left that lacks the table

    snapshot = store.snapshot()

    assert [manifest.tables["t"].generation for manifest in snapshot.manifests] == [1, 1, 2, 2]
    assert snapshot.table("t").read()[:, 0].tolist() == [2, 6, 2, 6, 2, 2, 2, 2, 2, 2]


def test_a_key_in_two_lists_of_a_segment_is_refused(store: Store) -> None:
    with store.writer() as writer, writer.begin(step=1) as txn:
        txn.create_table("h", dim=2, options=TableOptions(scale=1.0))
        txn.write_rows("h", ROWS, np.ones((2, 2), np.float32))
    snapshot = store.snapshot()
    assert snapshot.table("h").read_all()[0].tolist() == ROWS.tolist()
    reader = snapshot.readers[0]
    part = reader.manifest.parts[0]
    assert part.set is not None
    twice = msgspec.structs.replace(part.set, group={"rows": part.set.group["rows"]})
    reader.manifest = msgspec.structs.replace(reader.manifest, parts=(msgspec.structs.replace(part, delete=twice),))

    with pytest.raises(CorruptStore, match="is in two row lists"):
        snapshot.table("h").read_all()
