"""A store's life on every backend that can run here: local disk, memory, SeaweedFS (S3), Azurite (Azure)."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Conflict, Store, TableOptions
from tests.support.servers import Place, web_server

BACKENDS = [
    "local",
    "memory",
    pytest.param("s3", marks=pytest.mark.servers),
    pytest.param("azure", marks=pytest.mark.servers),
]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "store"), {})
    if request.param == "memory":
        return Place(f"memory://{uuid.uuid4().hex}", {})
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.mark.parametrize("place", BACKENDS, indirect=True)
def test_a_store_lives_through_save_tag_rollback_and_restore(place: Place) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3000, 8)).astype(np.float32)
    rows = np.sort(rng.choice(3000, 300, replace=False)).astype(np.int64)
    store = Store.create(place.url, storage_options=place.storage_options)

    with store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("user", values, options=TableOptions.exact())
            txn.put_dense({"bias": np.arange(3, dtype=np.float32)})
        assert txn.version is not None
        store.tag("first", txn.version)
        before = values.copy()
        values[rows] += 1
        with writer.begin(2) as txn:
            txn.write_rows("user", rows, values[rows])
    reopened = Store.open(place.url, storage_options=place.storage_options)

    assert np.array_equal(reopened.snapshot().table("user").read(), values)
    assert np.array_equal(reopened.snapshot().table("user").read_rows(rows[:5]), values[rows[:5]])
    assert np.array_equal(reopened.snapshot(tag="first").table("user").read(), before)
    assert np.array_equal(reopened.snapshot().read_dense("bias"), np.arange(3, dtype=np.float32))
    reopened.rollback(reopened.tags()["first"])
    restored = np.empty_like(values)
    with reopened.writer() as writer:
        writer.restore({"user": {"values": restored}})
        assert np.array_equal(restored, before)
        with writer.begin(3) as txn:
            txn.write_rows("user", rows, restored[rows] + 2)
    assert np.array_equal(reopened.snapshot().table("user").read()[rows], before[rows] + 2)
    assert [record.kind for record in reopened.log()][::-1] == [
        "init", "fence", "baseline", "tag", "delta", "rollback", "fence", "delta",
    ]  # fmt: skip


@pytest.mark.parametrize("place", BACKENDS, indirect=True)
def test_of_two_racing_writers_one_wins_and_the_other_is_told(place: Place) -> None:
    store = Store.create(place.url, storage_options=place.storage_options)
    values = np.zeros((10, 2), np.float32)
    outcomes: list[str] = []
    gate = threading.Barrier(2)

    def race(number: int) -> None:
        mine = Store.open(place.url, storage_options=place.storage_options)
        writer = mine.writer()
        gate.wait()
        try:
            with writer.begin(number) as txn:
                txn.write_table("t", values + number, options=TableOptions(scale=1.0))
            outcomes.append(f"won {number}")
        except Conflict as error:
            outcomes.append(error.kind)

    threads = [threading.Thread(target=race, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    won = [outcome for outcome in outcomes if outcome.startswith("won")]
    assert len(outcomes) == 2
    assert len(won) == 1
    assert "fenced" in outcomes
    assert store.snapshot().table("t").read()[0, 0] == float(won[0][-1])


@pytest.mark.parametrize("place", BACKENDS[2:], indirect=True)
def test_a_forked_process_reads_the_store_of_its_parent(place: Place) -> None:
    """A regression: a worker of a DataLoader got "StorageFailure ... (RuntimeError)" from every object store."""
    store = Store.create(place.url, storage_options=place.storage_options)
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    snapshot = store.snapshot()

    check_in_fork(lambda: snapshot.table("t").read().sum() == 8)

    assert store.snapshot().table("t").read().sum() == 8


def test_a_forked_process_reads_by_http_what_its_parent_opened(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as written, written.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    with web_server(tmp_path) as url, Store.open(f"{url}/store") as store:
        snapshot = store.snapshot()

        check_in_fork(lambda: snapshot.table("t").read().sum() == 8)

        assert store.snapshot().table("t").read().sum() == 8


def check_in_fork(check: Callable[[], bool]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a driver without its thread waits without end
        passed = False
        try:
            passed = check()
        finally:
            os._exit(0 if passed else 1)
    assert os.waitpid(child, 0) == (child, 0)


@pytest.mark.parametrize("place", BACKENDS[2:], indirect=True)
def test_credentials_are_in_no_object(place: Place) -> None:
    store = Store.create(place.url, storage_options=place.storage_options)
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("t", np.ones((4, 2), np.float32), options=TableOptions(scale=1.0))
    secrets = [text for text in json.dumps(place.storage_options).split('"') if len(text) > 12 and ":" not in text[:8]]

    objects = [store.storage.read(stat.key) or b"" for stat in store.storage.list_objects("")]

    assert secrets
    assert len(objects) > 5
    assert not [secret for secret in secrets for data in objects if secret.encode() in data]
