"""A loader when something is wrong, and its thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cnr_store import BadInput, StorageFailure
from cnr_store.errors import CorruptObject, TableNotFound, VersionNotFound
from cnr_store.serving import Loader, LoaderOptions
from tests.serving.loaders import DIM, ROWS, Flaky, Training, caught_up, until
from tests.support.loader_checks import check_is_snapshot, opened_loader, served
from tests.support.store_oracle import same_bits


def test_an_outage_is_told_once_and_ends_by_itself(
    training: Training, fs: Flaky, caplog: pytest.LogCaptureFixture
) -> None:
    first = training.save()
    with Loader(training.open(fs)) as loader:
        training.save()
        fs.fails()
        with caplog.at_level(logging.INFO, "cnr_store.serving"):
            for _ in range(4):
                poll = loader.poll()
                assert isinstance(poll.error, StorageFailure)
                assert (poll.version, training.value(loader)) == (first, 1)
            metrics = loader.metrics()
            assert (metrics.errors, metrics.failures, metrics.staleness_s) == (4, 4, 0)
            assert metrics.error is not None
            fs.arm(None)
            caught_up(loader, training.store)
        assert loader.metrics().failures == 0
        assert loader.metrics().error is None
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) <= 4
        assert "again" in caplog.records[-1].message


def test_a_damaged_delta_leaves_what_is_served_until_a_way_past_it(training: Training) -> None:
    first = training.save()
    with Loader(training.open()) as loader:
        rows = served(loader)
        before = set(training.files.find("/root/data"))
        training.save()
        (codes,) = [path for path in set(training.files.find("/root/data")) - before if ".codes/c" in path]
        training.files.pipe_file(codes, bytes(reversed(training.files.cat_file(codes))))
        for _ in range(2):
            assert isinstance(loader.poll().error, CorruptObject)
            assert loader.version == first
            assert same_bits(served(loader)["user"], rows["user"])
            assert loader.staleness_s > 0
        training.full()
        caught_up(loader, training.store)


def test_the_thread_asks_for_news_but_lets_what_failed_rest(training: Training, fs: Flaky) -> None:
    training.save()
    with Loader(training.open(fs), options=LoaderOptions(poll_interval_s=60)) as loader:
        before = set(training.files.find("/root/data"))
        training.save()
        (codes,) = [path for path in set(training.files.find("/root/data")) - before if ".codes/c" in path]
        training.files.pipe_file(codes, b"")
        failed = loader._follower.look(is_patient=True)
        assert isinstance(failed.error, CorruptObject)
        calls = len(fs.calls)
        rested = loader._follower.look(is_patient=True)
        assert len(fs.calls) == calls + 1
        assert rested.error is failed.error
        assert loader.metrics().failures == 1
        training.full()
        assert loader._follower.look(is_patient=True).error is None
        check_is_snapshot(loader, training.store.snapshot())


def test_staleness_counts_from_the_first_version_that_is_lacked(training: Training, monkeypatch: Any) -> None:
    refused: set[int] = set()
    training.save()
    with Loader(
        training.open(), options=LoaderOptions(validate=lambda candidate: candidate.step not in refused)
    ) as loader:
        assert loader.staleness_s == 0
        refused |= {2, 3}
        first = training.store.record(training.save()).ts_ms
        loader.poll()
        training.save()
        loader.poll()
        for module in ("loader", "version_follower"):
            monkeypatch.setattr(f"cnr_store.serving.{module}.wall_ms", lambda: first + 90_000)
        assert loader.staleness_s == 90
        served_ms = training.store.record(loader.version).ts_ms
        assert loader.metrics().age_s == (first + 90_000 - served_ms) / 1000
        training.save()
        caught_up(loader, training.store)
        assert loader.staleness_s == 0


def test_readers_on_threads_see_one_version_at_a_time(training: Training) -> None:
    """Every row of both tables is written with its step, so a batch of two versions shows."""
    rows = tuple(range(ROWS))
    mixed: list[Any] = []
    ended = threading.Event()
    counts = [0, 0]

    def read(number: int) -> None:
        with np.errstate(all="raise"):
            while not ended.is_set():
                batch = loader.lookup_many({"user": rows, "item": rows[::-1]}, dense=["w"])
                found = {*batch.rows["user"].ravel(), *batch.rows["item"].ravel(), *batch.dense["w"]}
                if found != {float(batch.step)}:
                    mixed.append((batch.version, found))
                counts[number] += 1

    def save_all() -> None:
        training.step += 1
        with training.writer.begin(training.step) as txn:
            for table in ("user", "item"):
                txn.write_rows(table, np.asarray(rows), np.full((ROWS, DIM), training.step, np.float32))
            txn.put_dense({"w": np.full(3, training.step, np.float32)})

    save_all()
    with Loader(training.open(), options=LoaderOptions(poll_interval_s=0.001)) as loader:
        readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        for reader in readers:
            reader.start()
        loader.start()
        try:
            for _ in range(25):
                save_all()
            until(loader, lambda: loader.step == training.step and min(counts) > 200)
        finally:
            ended.set()
            for reader in readers:
                reader.join()
    assert not mixed


def test_a_version_without_a_table_that_is_wanted_is_not_served(training: Training) -> None:
    first = training.save()
    with Loader(training.open(), ["user"]) as loader:
        with training.writer.begin(50) as txn:
            txn.drop_table("user")
        assert isinstance(loader.poll().error, TableNotFound)
        assert loader.version == first
        training.full()
        assert loader.poll().error is None


def test_a_closed_loader_says_so(training: Training) -> None:
    loader = Loader(training.open())
    loader.close()
    loader.close()
    calls: list[Callable[[], Any]] = [loader.poll, loader.start, loader.pin, lambda: loader.rollback(0)]
    for call in calls:
        with pytest.raises((BadInput, VersionNotFound)):
            call()
    with pytest.raises(VersionNotFound, match="any more: the loader is closed"):
        loader.lookup("user", [1])


@pytest.mark.parametrize(
    "wrong", [{"publish": "now"}, {"poll_interval_s": 0}, {"served": "float8"}, {"kept_as": "all"}]
)
def test_misuse_is_refused(training: Training, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        opened_loader(training.open(), **wrong)


def test_the_thread_follows_and_ends_when_told(training: Training) -> None:
    with Loader(training.open(), options=LoaderOptions(poll_interval_s=0.01)) as loader:
        loader.start()
        loader.start()
        assert sum(thread.name == "cnr-loader" for thread in threading.enumerate()) == 1
        for _ in range(3):
            version = training.save()
            until(loader, lambda version=version: loader.version == version)  # type: ignore[misc]
        loader.stop()
        loader.stop()
        version = training.save()
        assert loader.version < version
        loader.start()
        until(loader, lambda: loader.version == version)
        # An overlay that nothing newer follows is merged behind it.
        until(loader, lambda: not loader._queue.view.has_overlays)
        check_is_snapshot(loader, training.store.snapshot())
    assert not any(thread.name == "cnr-loader" for thread in threading.enumerate())


def test_the_thread_lives_through_errors_and_bugs(training: Training, fs: Flaky, monkeypatch: Any) -> None:
    first = training.save()
    with Loader(training.open(fs), options=LoaderOptions(poll_interval_s=0.01)) as loader:
        fs.fails()
        loader.start()
        until(loader, lambda: loader.metrics().errors >= 2)
        assert loader.version == first
        fs.arm(None)
        until(loader, lambda: loader.metrics().failures == 0)
        monkeypatch.setattr(loader._follower, "_follow", lambda **_: 1 / 0)
        errors = loader.metrics().errors
        until(loader, lambda: loader.metrics().errors >= errors + 2)
        assert "ZeroDivisionError" in str(loader.metrics().error)
        monkeypatch.undo()
        version = training.save()
        until(loader, lambda: loader.version == version)


def test_the_thread_ends_with_the_loader(training: Training) -> None:
    loader = Loader(training.open(), options=LoaderOptions(poll_interval_s=0.01))
    loader.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "cnr-loader"]
    gone = weakref.ref(loader)
    until(loader, lambda: gone().metrics().polls > 0)  # type: ignore[union-attr]
    del loader
    for _ in range(600):
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            break
    assert not thread.is_alive()
    assert gone() is None


def test_an_event_loop_goes_on_while_it_polls(training: Training) -> None:
    async def serve() -> int:
        async with Loader(training.open()) as loader:
            training.save()
            poll, _ = await asyncio.gather(loader.poll_async(), asyncio.sleep(0))
            check_is_snapshot(loader, training.store.snapshot())
            return poll.rows

    assert asyncio.run(serve()) == 3


def test_counts_add_up(training: Training) -> None:
    with Loader(training.open()) as loader:
        for _ in range(3):
            training.save()
            loader.poll()
        loader.lookup("user", [1])
        loader.lookup_many({"user": [1]})
        metrics = loader.metrics()
        assert (metrics.polls, metrics.updates, metrics.rows) == (3, 3, 9)
        assert (metrics.lookups, metrics.errors, metrics.refused, metrics.error) == (2, 0, 0, None)
        assert metrics.load_s > 0
        assert metrics.size_bytes > 0
        assert metrics.apply_s > 0
        assert metrics.age_s >= 0
        assert (metrics.version, metrics.step) == (loader.version, 3)
