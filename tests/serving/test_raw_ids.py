"""Rows by raw id: the map that was saved with them finds them, never that of another version.

The maps of real modules are in `tests/training/torchrec/collisions.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cnr_store import Store, TableOptions, read_id_map
from cnr_store.errors import BadInput, DoesNotApply, TableNotFound
from cnr_store.serving import AttachedTables, Loader
from cnr_store.serving.sinks import DeviceTables
from tests.serving.test_device_tables import DEVICES

ROWS = 16
FREE = np.iinfo(np.int64).max
EXACT = TableOptions.exact()
KNOWN = np.array([-4, 0, 3, 10**18, 7])
"""Raw ids that have a row at every step, each at another row."""
UNKNOWN = np.array([5, -(2**63)])


def module(owner: str, table: str) -> str:
    return f"{owner}._managed_collision_collection._managed_collision_modules.{table}"


def map_of(step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return raw ids in order, free places behind them, and the row of each; the last row belongs to no id."""
    rows = np.roll(np.arange(ROWS - 1), step)
    raw_ids = np.full(ROWS, FREE)
    raw_ids[: len(KNOWN)] = np.sort(KNOWN)
    return raw_ids, np.append(rows, ROWS - 1)


def rows_of(step: int) -> npt.NDArray[np.float32]:
    """Return rows that say which raw id they are of (by its place), and of which step; -1 for no id."""
    values = np.full((ROWS, 2), -1, np.float32)
    values[map_of(step)[1][: len(KNOWN)], 0] = np.arange(len(KNOWN))
    values[:, 1] = step
    return values


def expected(step: int) -> npt.NDArray[np.float32]:
    place = np.searchsorted(np.sort(KNOWN), KNOWN).astype(np.float32)
    own = np.stack([place, np.full(len(KNOWN), step, np.float32)], axis=1)
    return np.concatenate([own, np.full((len(UNKNOWN), 2), (-1, step), np.float32)])


def save(store: Store, step: int, owners: tuple[str, ...] = ("a",)) -> None:
    with store.writer() as writer:
        if not store.snapshot().is_empty:
            writer.restore()
        with writer.begin(step, "delta" if step > 1 else "baseline") as txn:
            for number, owner in enumerate(owners):
                table = f"{owner}._embedding_module.embedding_bags.t.weight"
                if step > 1:
                    txn.write_rows(table, np.arange(ROWS), rows_of(step + number))
                else:
                    txn.write_table(table, rows_of(step + number), options=EXACT)
                raw_ids, rows = map_of(step + number)
                base = module(owner, "t")
                txn.put_dense({f"{base}._mch_sorted_raw_ids": raw_ids, f"{base}._mch_remapped_ids_mapping": rows})
            txn.put_dense({"other": np.ones(3, np.float32)})


TABLE = "a._embedding_module.embedding_bags.t.weight"
ASKED = np.concatenate([KNOWN, UNKNOWN])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(str(tmp_path / "store"), fsync=False, threads=1) as made:
        save(made, 1)
        yield made


def test_a_snapshot_finds_the_rows_of_raw_ids_by_its_own_map(store: Store) -> None:
    first = store.snapshot()
    save(store, 2)

    for snapshot, step in ((first, 1), (store.snapshot(), 2)):
        row_ids, is_known = read_id_map(snapshot, TABLE).find(ASKED)

        assert (snapshot.table(TABLE).read_rows(row_ids) == expected(step)).all()
        assert is_known.tolist() == [True] * len(KNOWN) + [False] * len(UNKNOWN)


def test_a_loader_finds_them_and_marks_ids_without_a_row(store: Store) -> None:
    with Loader(store) as loader:
        batch = loader.lookup_many({TABLE: ASKED}, by_raw_id=[TABLE])
        of_known = loader.lookup_many({TABLE: KNOWN}, by_raw_id=[TABLE])
        by_row = loader.lookup_many({TABLE: np.arange(ROWS)})

    assert (batch.rows[TABLE] == expected(1)).all()
    missing = batch.missing[TABLE]
    assert missing is not None
    assert missing.tolist() == [False] * len(KNOWN) + [True] * len(UNKNOWN)
    assert of_known.missing[TABLE] is None
    assert (by_row.rows[TABLE] == rows_of(1)).all()


def test_another_process_finds_them_in_the_loaders_memory(store: Store, tmp_path: Path) -> None:
    with Loader(store, shared=tmp_path / "shared"), AttachedTables(tmp_path / "shared") as attached:
        batch = attached.lookup_many({TABLE: ASKED}, by_raw_id={TABLE})

    assert (batch.rows[TABLE] == expected(1)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_tables_on_a_device_find_them_too(store: Store, device: str) -> None:
    import torch

    with Loader(store) as loader:
        tables = DeviceTables(device, by_raw_id=[TABLE], store=loader.store)
        feed = loader.add_sink(tables, start=False)
        for step in (1, 2, 3):
            loader.poll()
            save(store, step + 1)  # the store is ahead of the rows
            feed.push()
            asked = torch.from_numpy(ASKED).to(device) if step > 1 else ASKED

            batch = tables.lookup_many({TABLE: asked}, by_raw_id=[TABLE])

            assert (batch.rows[TABLE].cpu().numpy() == expected(step)).all()
            assert batch.missing[TABLE].tolist() == [False] * len(KNOWN) + [True] * len(UNKNOWN)
        by_row = tables.lookup_many({TABLE: np.arange(ROWS)})

    assert (by_row.rows[TABLE].cpu().numpy() == rows_of(3)).all()
    assert not by_row.missing
    assert tables.nbytes == ROWS * (2 * 4 + 2 * 8)


def test_a_device_without_the_map_says_what_to_do(store: Store) -> None:
    with pytest.raises(BadInput, match="store="):
        DeviceTables("cpu", by_raw_id=[TABLE])
    bare, other = DeviceTables("cpu"), DeviceTables("cpu", by_raw_id=["nobody"], store=store)
    with Loader(store) as loader:
        loader.add_sink(bare, start=False).push()
        with pytest.raises(BadInput, match="by_raw_id"):
            bare.lookup_many({TABLE: ASKED}, by_raw_id=[TABLE])
        with pytest.raises(TableNotFound, match="nobody"):
            loader.add_sink(other, start=False).push()


def test_no_lookup_mixes_the_map_of_a_version_with_rows_of_another(store: Store) -> None:
    mixed: list[object] = []
    steps: set[int] = set()
    with Loader(store) as loader:
        is_over = threading.Event()
        tables = DeviceTables("cpu", by_raw_id=[TABLE], store=store)
        feed = loader.add_sink(tables, start=False)
        feed.push()

        def look_up(source: Loader | DeviceTables) -> None:
            while not is_over.is_set():
                batch = source.lookup_many({TABLE: ASKED}, by_raw_id=[TABLE])
                steps.add(batch.step)
                if not (np.asarray(batch.rows[TABLE]) == expected(batch.step)).all():
                    mixed.append(batch)

        threads = [threading.Thread(target=look_up, args=(source,)) for source in (loader, loader, tables)]
        for thread in threads:
            thread.start()
        for step in range(2, 9):
            save(store, step)
            loader.poll()
            feed.push()
        is_over.set()
        for thread in threads:
            thread.join()

    assert not mixed
    assert len(steps) > 1


def test_the_map_is_that_of_the_module_that_has_the_table(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "two"), fsync=False) as store:
        save(store, 1, owners=("a", "a.b"))

        snapshot = store.snapshot()

        for number, owner in enumerate(("a", "a.b")):
            found = read_id_map(snapshot, f"{owner}._embedding_module.embedding_bags.t.weight")
            assert (found.row_ids == map_of(1 + number)[1]).all()


def test_a_table_without_a_map_and_a_map_of_another_size_are_refused(store: Store) -> None:
    with store.writer() as writer:
        writer.restore()
        with writer.begin(2) as txn:
            txn.write_table("plain", np.ones((3, 2), np.float32))
            txn.write_table("b.t2.weight", np.ones((3, 2), np.float32))
            raw_ids, rows = map_of(1)
            base = module("b", "t2")
            txn.put_dense({f"{base}._mch_sorted_raw_ids": raw_ids, f"{base}._mch_remapped_ids_mapping": rows})

    with Loader(store) as loader:
        for table, error in (("plain", TableNotFound), ("b.t2.weight", DoesNotApply)):
            with pytest.raises(error, match=table):
                read_id_map(store.snapshot(), table)
            with pytest.raises(error, match=table):
                loader.lookup_many({table: [1]}, by_raw_id=[table])


@pytest.mark.parametrize("fault", ["order", "twice", "row"])
def test_a_map_that_would_find_no_row_or_one_outside_the_table_is_refused(store: Store, fault: str) -> None:
    raw_ids, rows = map_of(1)
    if fault == "order":
        raw_ids[:2] = raw_ids[1::-1]
    elif fault == "twice":
        raw_ids[1] = raw_ids[0]
    else:
        rows[3] = ROWS
    with store.writer() as writer:
        writer.restore()
        with writer.begin(2, "delta") as txn:
            base = module("a", "t")
            txn.put_dense({f"{base}._mch_sorted_raw_ids": raw_ids, f"{base}._mch_remapped_ids_mapping": rows})

    with pytest.raises(DoesNotApply, match="row 16, and the table" if fault == "row" else "do not ascend"):
        read_id_map(store.snapshot(), TABLE)
