"""Tables and change streams go into other engines by the Arrow PyCapsule interface, value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from cnr_store import BadInput, Store, TableOptions
from cnr_store.changes import changes
from cnr_store.read import arrow_stream


@pytest.fixture
def store(tmp_path: Path) -> Store:
    random = np.random.default_rng(3)
    store = Store.create(str(tmp_path / "store"), fsync=False)
    with store.writer() as writer:
        with writer.begin(step=1) as txn:
            slots = {"sum": random.random(50).astype(np.float32), "avg": random.random((50, 4)).astype(np.float32)}
            values = random.normal(size=(50, 4)).astype(np.float32)
            txn.write_table("user", values, slots=slots, options=TableOptions.exact())
            txn.write_table("half", values[:7].astype(np.float16))
            txn.create_table("hashed", dim=2, options=TableOptions(scale=2**-10))
            txn.write_rows("hashed", np.asarray([-7, 10**17]), np.ones((2, 2), np.float32))
        with writer.begin(step=2) as txn:
            rows = np.asarray([7, 42])
            slots = {"sum": np.ones(2, np.float32), "avg": np.ones((2, 4), np.float32)}
            txn.write_rows("user", rows, np.full((2, 4), 9.5, np.float32), slots=slots)
    return store


def floats(column: Any) -> np.ndarray[Any, Any]:
    return np.asarray(column.to_pylist())


@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
def test_a_table_is_an_arrow_stream(store: Store, monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    monkeypatch.setattr(arrow_stream, "WINDOW_BYTES", window_bytes)
    for name in ("user", "half"):
        view = store.snapshot().table(name)
        found = pa.table(view)
        assert found["row_id"].to_pylist() == list(range(view.shape[0]))
        assert np.array_equal(floats(found["values"]), view.read())
        for slot in view.schema.slots:
            assert np.array_equal(floats(found[f"slot_{slot}"]), view.read(slot=slot))
    assert pa.table(store.snapshot().table("hashed"))["row_id"].to_pylist() == [-7, 10**17]


def test_duckdb_queries_a_table_and_the_changes_of_one(store: Store) -> None:
    user = store.snapshot().table("user")
    changed = changes(store, 2, tables=["user"], slots=True)  # noqa: F841 - DuckDB finds it by its name

    total = duckdb.sql("select count(*), sum(slot_sum), max(values[1]) from user").fetchall()
    rows = duckdb.sql("select row_id, op, values[1], slot_sum from changed order by row_id").fetchall()

    assert total[0] == pytest.approx((50, float(user.read(slot="sum").sum(dtype=np.float64)), 9.5))
    assert rows == [(7, "upsert", 9.5, 1.0), (42, "upsert", 9.5, 1.0)]


def test_polars_and_pandas_take_a_table(store: Store) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    view = store.snapshot().table("user")

    assert polars.DataFrame(view)["slot_sum"].to_list() == view.read(slot="sum").tolist()
    assert pandas.DataFrame.from_arrow(view)["slot_sum"].tolist() == view.read(slot="sum").tolist()


def test_a_stream_of_several_tables_is_refused_with_the_remedy(store: Store) -> None:
    with pytest.raises(BadInput, match="name one"):
        pa.table(changes(store, 2))


def test_objects_show_what_they_are_in_a_shell_and_a_notebook(store: Store) -> None:
    snapshot = store.snapshot()

    assert repr(store) == f"<Store {store.url}>"
    assert repr(snapshot) == "<Snapshot version 3, step 2, 3 tables>"
    assert repr(snapshot.table("user")) == "<TableView 'user': 50 rows x 4, float32 as float_bits, slots avg, sum>"
    assert repr(snapshot.table("hashed")) == "<TableView 'hashed': hashed rows x 2, float32 as lattice>"
    assert "<td>delta</td>" in store._repr_html_()
    assert "<td>user</td><td>50</td>" in snapshot._repr_html_()
    assert snapshot.table("user")._repr_html_().count("<tr>") == 6
    assert "<tbody></tbody>" in snapshot.table("hashed")._repr_html_()
