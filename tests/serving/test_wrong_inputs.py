"""Errors for wrong arguments of loaders, streams and relays."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store import BadInput, Store
from cnr_store.changes import catch_up, changes, recorded_cursor, write_parquet
from cnr_store.errors import BadRowIds, MissingDependency, VersionNotFound
from cnr_store.relay import Relay
from cnr_store.serving import AttachedTables, Loader, RowRange
from cnr_store.serving.sinks import DeviceTables, FusedRows
from tests.support.loader_checks import opened_loader


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.create(f"memory://wrong-inputs-{uuid.uuid4().hex}") as store:
        with store.writer() as writer, writer.begin(step=10) as txn:
            for table in ("user", "item"):
                txn.write_table(table, np.ones((10, 2), np.float32))
        yield store


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tables": "user"}, r"give \['user'\]"),
        ({"dense": "bias"}, r"give \['bias'\]"),
        ({"shard": (0, 5)}, r"RowRange\(start, stop\) or HashShard\(index, count\), found \(0, 5\)"),
        ({"shard": {"user": (0, 5)}}, "RowRange"),
        ({"tables": ["user"], "shard": {"usr": RowRange(0, 5)}}, r"shard names 'usr', .* \['user'\]"),
        ({"tables": ["user"], "served": {"item": "float16"}}, "served names 'item'"),
        ({"tables": ["user"], "kept_as": {"usr": "codes"}}, "kept_as names 'usr'"),
        ({"version": "3"}, "a version must be a whole number; found '3'"),
    ],
)
def test_a_loader_refuses_arguments_that_would_mean_nothing(store: Store, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        opened_loader(store, **arguments)


def test_rows_go_into_an_array_or_a_tensor(store: Store) -> None:
    wrong: Any = [[0.0, 0.0]]
    with Loader(store) as loader, pytest.raises(BadInput, match="numpy array or a CPU tensor, found list"):
        loader.lookup("user", [1], out=wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dense": "bias"}, r"dense takes a list of names, found 'bias'; give \['bias'\]"),
        ({"by_raw_id": "user"}, r"give \['user'\]"),
        ({"out": {"usr": np.zeros((1, 2), np.float32)}}, r"out has \['usr'\]"),
    ],
)
def test_a_lookup_refuses_arguments_that_would_mean_nothing(store: Store, arguments: dict[str, Any], said: str) -> None:
    """A regression: an array for a table that was not looked up stayed as it was, and a name was taken as letters."""
    with Loader(store) as loader, pytest.raises(BadInput, match=said):
        loader.lookup_many({"user": [1]}, **arguments)


@pytest.mark.parametrize("by_raw_id", ["user", ["user"]])
def test_device_tables_take_a_list_of_tables_with_raw_ids(store: Store, by_raw_id: Any) -> None:
    """A regression: one name was taken as letters, so raw ids were taken as ids of rows, unchecked."""
    tables = DeviceTables("cpu")
    with Loader(store) as loader:
        loader.add_sink(tables, start=False).push()
    with pytest.raises(BadInput, match="by_raw_id"):
        tables.lookup_many({"user": [1]}, by_raw_id=by_raw_id)


@pytest.mark.parametrize("ids", [[[1], [2, 3]], torch.ones(2, requires_grad=True)], ids=["ragged", "of a graph"])
def test_ids_that_are_no_array_are_bad_row_ids(store: Store, ids: Any) -> None:
    with Loader(store) as loader, pytest.raises(BadRowIds, match="row ids of table 'user'"):
        loader.lookup("user", ids)


def test_a_lookup_in_a_closed_loader_says_that_it_is_closed(store: Store) -> None:
    loader = Loader(store)
    loader.close()

    with pytest.raises(VersionNotFound, match="the loader is closed"):
        loader.lookup("user", [1])
    with pytest.raises(BadInput, match="the loader is closed"):
        loader.rollback(1)


@pytest.mark.parametrize(
    "begin", [lambda url: changes(url), lambda url: catch_up(url, {}), lambda url: Relay(url, "memory://near")]
)
def test_what_takes_an_open_store_says_how_to_open_one(begin: Callable[[Any], object]) -> None:
    with pytest.raises(BadInput, match=r"takes an open store, found 'run-7'; give Store.open\(url\)"):
        begin("run-7")


def test_a_saved_cursor_is_parsed_before_a_stream_takes_it(store: Store) -> None:
    saved: Any = "{}"
    with pytest.raises(BadInput, match=r"ChangeCursor\.from_json"):
        changes(store, saved)


def test_fused_tensors_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(MissingDependency, match=r'pip install "cnr-store\[train\]"'):
        FusedRows()


def test_changes_are_written_to_a_folder(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "lake"
    file.write_text("")

    for begin in (lambda: write_parquet(changes(store), file), lambda: recorded_cursor(file)):
        with pytest.raises(BadInput, match="lake is a file; changes are written to a folder"):
            begin()


def test_a_loader_and_tables_of_another_process_are_asked_alike(store: Store, tmp_path: Path) -> None:
    with Loader(store, shared=tmp_path / "shared") as loader, AttachedTables(tmp_path / "shared") as attached:
        out = np.empty((2, 2), np.float32)

        assert attached.lookup("user", [7, 1], out=out) is out
        assert (out == loader.lookup("user", [7, 1])).all()
        tensor = pytest.importorskip("torch").empty((2, 2))
        assert attached.lookup("user", [7, 1], out=tensor) is tensor
        assert (tensor.numpy() == out).all()
        assert attached.lookup_many({"item": [3]}).version == loader.lookup_many({"item": [3]}).version


def test_a_store_made_anew_in_its_place_is_told_of_as_such(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    for values in (1, 2):
        with Store.create(place) as store, store.writer() as writer:
            for step in range(3 if values == 2 else 1):
                with writer.begin(step) as txn:
                    rows = np.full((10, 2), values, np.float32)
                    if step:
                        txn.write_rows("t", np.arange(10), rows)
                    else:
                        txn.write_table("t", rows)
        if values == 1:
            loader = Loader(place)
            shutil.rmtree(place)
    with loader:
        assert "another one was made in its place: open it again" in str(loader.poll().error)
        assert loader.lookup("t", [0])[0, 0] == 1
