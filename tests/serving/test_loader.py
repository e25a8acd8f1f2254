"""What a loader serves, what a poll costs, and what becomes of it when something is wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store import (
    BadInput,
    CompactionPolicy,
    Conflict,
    CorruptStore,
    RetentionPolicy,
    StorageFailure,
    Store,
    TableOptions,
    VersionRefused,
    Writer,
    collect_garbage,
)
from cnr_store.errors import (
    BadDtype,
    BadRowIds,
    BadShape,
    BranchNotFound,
    ChannelNotFound,
    CorruptObject,
    TableNotFound,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format.layout import commit_key
from cnr_store.maintenance.compaction import compact_run
from cnr_store.relay import Relay
from cnr_store.serving import AttachedTables, Candidate, HashShard, Loader, LoaderOptions, RowRange
from cnr_store.serving.rows.shards import rows_in_shard
from cnr_store.serving.sinks import SinkState
from cnr_store.storage import storage_from_filesystem
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.support.loader_checks import check_is_snapshot, opened_loader, served
from tests.support.store_oracle import same_bits

ROWS, DIM = 50, 4
OPTIONS = TableOptions(scale=0.25)


class Flaky(FaultyFileSystem):
    """A process's view of the files that fails when told to."""

    def fails(self, calls: int = 10**6) -> None:
        self.arm(Fault(FaultKind.FAIL_BEFORE, len(self.calls), calls=calls))


class Training:
    """A store of two tables and a dense tensor, and who writes it."""

    def __init__(self) -> None:
        self.files = IsolatedMemoryFileSystem()
        self.store = Store.create_on(storage_from_filesystem(self.files, "/root"), threads=1)
        self.writer: Writer = self.store.writer()
        self.step = 0
        self.opened: list[Store] = []
        with self.writer.begin(0) as txn:
            txn.write_table("user", np.zeros((ROWS, DIM), np.float32), options=OPTIONS)
            txn.write_table("item", np.ones((ROWS, DIM), np.float32), options=OPTIONS)
            txn.put_dense({"w": np.zeros(3, np.float32)})

    def save(self, rows: tuple[int, ...] = (1, 7, 30), table: str = "user") -> int:
        """Save rows whose values are the step; returns the version."""
        self.step += 1
        with self.writer.begin(self.step) as txn:
            txn.write_rows(table, np.asarray(rows), np.full((len(rows), DIM), self.step, np.float32))
            txn.put_dense({"w": np.full(3, self.step, np.float32)})
        return self.writer.head.record.v

    def full(self) -> int:
        """Save everything anew, with another scale."""
        self.step += 1
        with self.writer.begin(self.step, "baseline") as txn:
            for table in ("user", "item"):
                txn.write_table(
                    table, np.full((ROWS, DIM), self.step, np.float32), options=TableOptions(scale=0.5)
                )  # fmt: skip
            txn.put_dense({"w": np.full(3, self.step, np.float32)})
        return self.writer.head.record.v

    def merge(self) -> int:
        assert compact_run(self.store, policy=CompactionPolicy(max_chain=1), force=True).outcome == "committed"
        return self.store.latest_version()

    def forget(self) -> None:
        """Expire and delete all but the newest and what is named or held."""
        collect_garbage(
            self.store, policy=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, dry_run=False, force=True
        )

    def open(self, fs: Any = None) -> Store:
        """The store as another process sees it."""
        self.opened.append(Store.open_on(storage_from_filesystem(self.files if fs is None else fs, "/root"), threads=1))
        return self.opened[-1]

    def value(self, loader: Loader, row: int = 1, table: str = "user") -> float:
        return float(loader.lookup(table, [row])[0, 0])


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.writer.close()
    for store in [made.store, *made.opened]:
        store.close()


@pytest.fixture
def fs(training: Training) -> Flaky:
    return Flaky(training.files)


def caught_up(loader: Loader, store: Store) -> None:
    """One poll is enough, and what is served is the snapshot."""
    poll = loader.poll()
    assert poll.error is None
    check_is_snapshot(loader, store.snapshot(loader.version))


# What is served.


def test_the_newest_state_is_served_and_followed(training: Training) -> None:
    training.save()
    with Loader(training.open()) as loader:
        caught_up(loader, training.store)
        for _ in range(3):
            version = training.save()
            caught_up(loader, training.store)
            assert loader.version == version
        assert loader.metrics().updates == 3


def test_a_loader_behind_a_deleted_record_says_so_within_60_looks(training: Training) -> None:
    with Loader(training.open()) as loader:
        served_version = loader.version
        lost = training.save()
        training.save()
        training.files.rm_file(f"/root/{commit_key(lost)}")

        *_, error = [loader.poll().error for _ in range(60)]

        assert isinstance(error, CorruptStore)
        assert f"position {lost} is empty" in str(error)
        assert loader.version == served_version


def test_a_lookup_takes_any_ids_and_fills_what_is_given(training: Training) -> None:
    training.save()
    with Loader(training.open()) as loader:
        out = np.empty((3, DIM), np.float32)
        assert loader.lookup("user", [30, 1, 30], out) is out
        assert out[:, 0].tolist() == [1, 1, 1]
        tensor = torch.empty((2, DIM))
        assert loader.lookup("user", torch.tensor([0, 7]), tensor) is tensor
        assert tensor[:, 0].tolist() == [0, 1]
        batch = loader.lookup_many({"user": [7], "item": [7]}, dense=["w"], out={"item": torch.empty((1, DIM))})
        assert batch.version == loader.version
        assert batch.rows["item"].tolist() == [[1.0] * DIM]
        assert batch.dense["w"].tolist() == [1, 1, 1]
        for ids, error in (([ROWS], BadRowIds), ([-1], BadRowIds), ([0.5], BadRowIds)):
            with pytest.raises(error):
                loader.lookup("user", ids)
        with pytest.raises(TableNotFound):
            loader.lookup("nobody", [1])
        with pytest.raises(BadShape):
            loader.lookup("user", [1, 2], np.empty((1, DIM), np.float32))
        with pytest.raises(BadDtype):
            loader.lookup("user", [1], np.empty((1, DIM), np.float64))
        with pytest.raises(BadInput):
            loader.lookup("user", [1], torch.empty((1, DIM), device="meta"))


def test_bfloat16_rows_are_looked_up_into_a_tensor(training: Training) -> None:
    training.save()
    with Loader(training.open(), ["user"], options=LoaderOptions(served="bfloat16")) as loader:
        tensor = torch.empty((2, DIM), dtype=torch.bfloat16)
        loader.lookup("user", [1, 0], tensor)
        assert tensor.tolist() == [[1.0] * DIM, [0.0] * DIM]
        for _ in range(2):
            training.save()
            assert loader.poll().error is None
        assert loader.lookup("user", [1], tensor[:1])[0, 0] == 3


@pytest.mark.parametrize("served_as", ["float32", "float16", "bfloat16", "int8", None])
@pytest.mark.parametrize("holds", ["auto", "codes"])
def test_served_rows_are_the_same_after_deltas_as_after_a_load(training: Training, served_as: Any, holds: Any) -> None:
    with Loader(training.open(), options=LoaderOptions(served=served_as, holds=holds)) as loader:
        for _ in range(3):
            training.save()
            assert loader.poll().error is None
            with Loader(training.open(), options=LoaderOptions(served=served_as, holds=holds)) as fresh:
                assert all(same_bits(rows, served(fresh)[name]) for name, rows in served(loader).items())


def test_some_tables_and_tensors_are_held_and_no_others(training: Training) -> None:
    with Loader(training.open(), ["item"], options=LoaderOptions(dense=[])) as loader:
        assert set(loader.tables) == {"item"}
        assert not loader.dense
        training.save(table="user")
        poll = loader.poll()
        assert (poll.is_updated, poll.rows, poll.error) == (True, 0, None)
        training.save(table="item")
        assert loader.poll().rows == 3
        assert training.value(loader, table="item") == 2
    with pytest.raises(TableNotFound):
        Loader(training.open(), ["nobody"])


def test_shards_hold_their_rows_and_refuse_others(training: Training) -> None:
    training.save()
    every = np.arange(ROWS)
    with Loader(training.open(), options=LoaderOptions(shard=RowRange(5, 31))) as loader:
        training.save((4, 5, 30, 31))
        assert loader.poll().rows == 2
        assert loader.lookup("user", [5, 30, 7])[:, 0].tolist() == [2, 2, 1]
        for row in (4, 31):
            with pytest.raises(BadRowIds):
                loader.lookup("user", [row])
    shards = [HashShard(index, 3) for index in range(3)]
    found = []
    for shard in shards:
        with Loader(training.open(), options=LoaderOptions(shard={"user": shard})) as loader:
            training.save(tuple(range(0, ROWS, 7)))
            assert loader.poll().error is None
            mine = rows_in_shard(shard, every)
            found.extend(mine.tolist())
            assert same_bits(loader.lookup("user", mine), training.store.snapshot().table("user").read_rows(mine))
            assert training.value(loader, table="item") == 1
            with pytest.raises(BadRowIds):
                loader.lookup("user", np.setdiff1d(every, mine)[:1])
    assert sorted(found) == every.tolist()
    with pytest.raises(BadInput):
        Loader(training.open(), options=LoaderOptions(shard=HashShard(3, 3)))


def test_a_store_without_a_save_is_waited_for() -> None:
    files = IsolatedMemoryFileSystem()
    store = Store.create_on(storage_from_filesystem(files, "/root"), threads=1)
    with store, Loader(store, ["user"]) as loader, store.writer() as writer:
        assert loader.tables == {}
        assert loader.poll().error is None
        with writer.begin(1) as txn:
            txn.write_table("user", np.ones((3, 2), np.float32), options=OPTIONS)
        assert loader.poll().error is None
        assert loader.lookup("user", [2]).tolist() == [[1, 1]]


def test_a_loader_opens_what_a_url_names(tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "s"), fsync=False) as store, store.writer() as writer:
        with writer.begin(1) as txn:
            txn.write_table("user", np.ones((3, 2), np.float32), options=OPTIONS)
        store.fork("try").close()
        with Loader(tmp_path / "s", branch="try", threads=1) as loader:
            assert loader.store.branch == "try"
            assert loader.lookup("user", [2]).tolist() == [[1, 1]]
            store.drop_branch("try")
            poll = loader.poll()
            assert isinstance(poll.error, BranchNotFound)
            assert loader.lookup("user", [2]).tolist() == [[1, 1]]
        with pytest.raises(BadInput):
            Loader(store, branch="try")


# What it follows.


def test_a_version_a_tag_and_a_channel_are_served(training: Training) -> None:
    first, second = training.save(), training.save()
    training.store.tag("good", first)
    training.store.set_channel("prod", first)
    with (
        Loader(training.open(), version=first) as fixed,
        Loader(training.open(), tag="good") as tagged,
        Loader(training.open(), channel="prod") as channel,
        Loader(training.open(), follow=False) as still,
    ):
        assert [one.version for one in (fixed, tagged, channel)] == [first, first, first]
        training.save()
        training.store.set_channel("prod", second)
        assert not fixed.poll().is_updated
        assert not tagged.poll().is_updated
        assert channel.poll().is_updated
        assert channel.version == second
        training.store.set_channel("prod", first)
        assert channel.poll().version == first  # a channel may move back
        check_is_snapshot(channel, training.store.snapshot(first))
        assert not still.poll().is_updated
        still.unpin()
        caught_up(still, training.store)
    for wrong, error in (({"channel": "no"}, ChannelNotFound), ({"version": 99}, VersionNotFound)):
        with pytest.raises(error):
            opened_loader(training.open(), **wrong)
    with pytest.raises(BadInput):
        Loader(training.open(), version=1, tag="good")


def test_a_dropped_channel_is_told_and_what_it_was_stays(training: Training) -> None:
    version = training.save()
    training.store.set_channel("prod")
    with Loader(training.open(), channel="prod") as loader:
        training.store.drop_channel("prod")
        for _ in range(2):
            assert isinstance(loader.poll().error, ChannelNotFound)
        assert loader.version == version
        later = training.save()
        training.store.set_channel("prod", later)
        caught_up(loader, training.store)
        assert loader.version == later


def test_compaction_rebaselining_rollback_and_records_without_a_state_are_followed(training: Training) -> None:
    first = training.save()
    with Loader(training.open()) as loader:
        for act in (
            training.save, training.merge, training.save, training.full, training.save,
            lambda: training.store.tag("a", first), lambda: training.store.rollback(first), training.forget,
        ):  # fmt: skip
            act()
            caught_up(loader, training.store)
        assert training.value(loader) == 1
        training.writer.restore()
        for act in (training.save, training.merge, training.forget, training.save):
            act()
            caught_up(loader, training.store)


def test_a_record_that_changes_nothing_costs_one_request_more_and_reads_nothing(training: Training, fs: Flaky) -> None:
    training.save()
    training.save()
    with Loader(training.open(fs)) as loader:
        training.merge()
        before = len(fs.calls)
        assert loader.poll().is_updated
        assert [call.operation for call in fs.calls[before:]] == ["read", "read"]
        assert all("/commits/" in call.path for call in fs.calls[before:])


def test_a_poll_without_news_is_one_request(training: Training, fs: Flaky) -> None:
    training.save()
    for options in ({}, {"version": 2}, {"publish": "apply"}, {"cursor": "me"}, {"follow": False}):
        with opened_loader(training.open(fs), **options) as loader:
            for _ in range(3):
                before = len(fs.calls)
                loader.poll()
                assert [call.operation for call in fs.calls[before:]] == ["read"]


def test_a_poll_reads_what_changed_and_no_more(training: Training, fs: Flaky) -> None:
    """Two records, and of the delta its manifest, its dense tensor, and rows and codes of the one table."""
    with Loader(training.open(fs)) as loader:
        for _ in range(3):
            training.save()
            before = len(fs.calls)
            assert loader.poll().rows == 3
            assert len(fs.calls) - before <= 2 + 1 + 1 + 2
            assert {call.operation for call in fs.calls[before:]} == {"read"}


def test_one_far_behind_goes_to_the_newest_at_once(training: Training, fs: Flaky) -> None:
    with Loader(training.open(fs)) as loader:
        for _ in range(12):
            training.save()
        training.merge()
        training.forget()
        caught_up(loader, training.store)
        assert loader.metrics().updates == 1
        for _ in range(5):
            training.save()
        caught_up(loader, training.store)
        assert loader.metrics().updates == 6


def test_what_expired_and_was_deleted_on_the_way_is_passed_over(training: Training) -> None:
    with Loader(training.open()) as loader:
        training.save()
        training.save()
        training.full()
        training.forget()
        caught_up(loader, training.store)


def test_versions_are_pinned_rolled_back_and_followed_again(training: Training) -> None:
    first, second, third = training.save(), training.save(), training.save()
    with Loader(training.open()) as loader:
        loader.rollback(first)
        assert (loader.version, training.value(loader), loader.staleness_s) == (first, 1, 0)
        training.save()
        assert not loader.poll().is_updated
        loader.pin(second)
        check_is_snapshot(loader, training.store.snapshot(second))
        with pytest.raises(BadInput):
            loader.rollback(third)
        with pytest.raises(VersionNotFound):
            loader.pin(99)
        assert loader.version == second
        assert not loader.poll().is_updated
        loader.unpin()
        caught_up(loader, training.store)
        assert training.value(loader) == 4
        loader.pin()
        training.save()
        assert not loader.poll().is_updated


@pytest.mark.parametrize("holds", ["auto", "codes"])
def test_a_rollback_to_before_a_finer_scale_reads_the_coarser_codes(training: Training, holds: Any) -> None:
    """Codes that are all even at the finer scale became zeros."""
    before = training.save()
    training.writer.restore()
    with training.writer.begin(9) as txn:
        txn.refine_scale("user")
        txn.write_rows("user", np.asarray([4]), np.full((1, DIM), 8, np.float32))
    with Loader(training.open(), options=LoaderOptions(holds=holds)) as loader:
        assert loader.tables["user"].shift == 1
        loader.rollback(before)
        check_is_snapshot(loader, training.store.snapshot(before))
        loader.unpin()
        caught_up(loader, training.store)


def test_a_version_that_expired_cannot_be_rolled_back_to(training: Training) -> None:
    first = training.save()
    with Loader(training.open()) as loader:
        training.full()
        training.forget()
        loader.poll()
        with pytest.raises(VersionExpired):
            loader.rollback(first)
        caught_up(loader, training.store)


def test_a_pinned_version_that_expires_stays_and_is_told(training: Training) -> None:
    first = training.save()
    with Loader(training.open(), follow=False) as loader:
        rows = served(loader)
        training.full()
        training.forget()
        assert isinstance(loader.poll().error, VersionExpired)
        assert loader.version == first
        assert same_bits(served(loader)["user"], rows["user"])


# When it becomes visible.


def test_staged_versions_wait_for_apply_and_become_one(training: Training) -> None:
    first = training.save((1, 2))
    with Loader(training.open(), publish="apply") as loader:
        assert loader.apply() == first
        second = training.save((2, 3))
        poll = loader.poll()
        assert (poll.version, poll.staged, poll.is_updated) == (first, second, True)
        third = training.save((3, 4))
        assert loader.poll().staged == third
        assert loader.staleness_s >= 0
        assert loader.lookup("user", [1, 2, 3, 4])[:, 0].tolist() == [1, 1, 0, 0]
        assert loader.apply() == third
        assert loader.lookup("user", [1, 2, 3, 4])[:, 0].tolist() == [1, 2, 3, 3]
        check_is_snapshot(loader, training.store.snapshot(third))
        assert loader.metrics().staged is None
        training.save()
        loader.poll()
        loader.pin()
        assert loader.apply() == third


def test_apply_does_not_wait_for_a_poll(training: Training, fs: Flaky) -> None:
    with Loader(training.open(fs), publish="apply") as loader:
        second = training.save()
        loader.poll()
        training.save()
        is_reading, may_go_on = threading.Event(), threading.Event()

        def on_call(call: Any) -> None:
            if "data/" in call.path:
                is_reading.set()
                assert may_go_on.wait(60)

        fs._on_call = on_call
        poll = threading.Thread(target=loader.poll)
        poll.start()
        assert is_reading.wait(60)
        assert loader.apply() == second
        may_go_on.set()
        poll.join()
        loader.apply()
        check_is_snapshot(loader, training.store.snapshot())


# Who decides.


def test_a_refused_version_is_passed_over_and_not_asked_about_again(training: Training) -> None:
    asked: list[tuple[int, int | None]] = []

    def validate(candidate: Candidate) -> bool:
        asked.append((candidate.version, candidate.serving))
        return bool(candidate.lookup("user", [1])[0, 0] != 2)

    first = training.save()
    with Loader(training.open(), options=LoaderOptions(validate=validate)) as loader:
        refused = training.save()
        poll = loader.poll()
        assert isinstance(poll.error, VersionRefused)
        assert poll.error.version == refused
        assert (loader.version, training.value(loader)) == (first, 1)
        training.store.tag("same")
        training.merge()
        assert isinstance(loader.poll().error, VersionRefused)
        assert asked == [(first, None), (refused, first)]
        assert loader.metrics().refused == 1
        assert loader.staleness_s > 0
        newer = training.save()
        caught_up(loader, training.store)
        assert asked[2:] == [(newer, first)]
        with pytest.raises(VersionRefused):
            loader.rollback(refused)
        assert loader.version == newer


def test_a_refused_rollback_does_not_bring_a_refused_version_back(training: Training) -> None:
    allowed = True
    first = training.save()
    with Loader(training.open(), options=LoaderOptions(validate=lambda _: allowed)) as loader:
        second = training.save()
        loader.poll()
        allowed = False
        training.save()
        assert isinstance(loader.poll().error, VersionRefused)
        with pytest.raises(VersionRefused):
            loader.rollback(first)
        allowed = True
        assert isinstance(loader.poll().error, VersionRefused)  # it was not asked about again
        assert loader.version == second
        loader.pin(first)
        assert loader.version == first


def test_a_check_that_raises_refuses_and_its_error_is_the_cause(training: Training) -> None:
    def broken(candidate: Candidate) -> None:
        if candidate.serving is not None:
            raise RuntimeError("no")

    with Loader(training.open(), options=LoaderOptions(validate=broken)) as loader:
        training.save()
        error = loader.poll().error
        assert isinstance(error, VersionRefused)
        assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(VersionRefused):
        Loader(training.open(), options=LoaderOptions(validate=lambda _: False))


@pytest.mark.parametrize("publish", ["poll", "apply"])
def test_a_check_that_calls_its_loader_shows_nobody_the_version(training: Training, publish: Any) -> None:
    """`apply` in ``validate`` published the version that was being judged; `poll` began anew, and raised ValueError."""
    calls: list[Callable[[], Any]] = []

    def validate(candidate: Candidate) -> bool:
        for call in calls:
            call()
        return candidate.step != 1

    with Loader(training.open(), publish=publish, options=LoaderOptions(validate=validate)) as loader:
        before = loader.version
        training.save()
        calls = [loader.apply]
        assert isinstance(loader.poll().error, VersionRefused)
        assert loader.version == before
        assert training.value(loader) == 0
        for call in (loader.poll, loader.close, loader.pin, lambda: loader.rollback(0), loader.start):
            training.save()
            calls = [call]
            error = loader.poll().error
            assert error is not None
            assert isinstance(error.__cause__, BadInput)
            assert loader.version == before
        calls = []
        training.save()
        assert loader.poll().error is None
        loader.apply()
        check_is_snapshot(loader, training.store.snapshot())


def test_a_candidate_is_read_before_anybody_is_served_it(training: Training) -> None:
    seen: list[tuple[Any, ...]] = []

    def warm_up(candidate: Candidate) -> None:
        rows = candidate.lookup_many({"user": [1]}, dense=["w"])
        seen.append((candidate.version, candidate.step, rows.rows["user"][0, 0], len(candidate.row_ids("item"))))
        assert set(candidate.tables) == {"user", "item"}
        assert set(candidate.dense) == {"w"}

    first = training.save()
    with Loader(training.open(), options=LoaderOptions(warm_up=warm_up)) as loader:
        training.save()
        loader.poll()
        assert seen == [(first, 1, 1, ROWS)]
    with Loader(training.open(), options=LoaderOptions(warm_up=warm_up, warm_up_each=True)) as loader:
        third = training.save()
        loader.poll()
        assert seen[-1] == (third, 3, 3, ROWS)


# What is held in the store.


def test_a_cursor_goes_along_and_keeps_what_is_needed(training: Training) -> None:
    training.save()
    with Loader(training.open(), options=LoaderOptions(cursor="server")) as loader:
        assert training.store.cursors()["server"].version == loader.version
        version = training.save()
        loader.poll()
        assert training.store.cursors()["server"].version == version == loader.metrics().cursor
    with pytest.raises(BadInput):
        Loader(training.open(), options=LoaderOptions(cursor="no\nname"))


class NotToBeWritten(Flaky):
    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        raise PermissionError(path)


def test_a_store_that_may_not_be_written_is_served_all_the_same(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    files = NotToBeWritten(training.files)
    with Loader(training.open(files), options=LoaderOptions(cursor="server")) as loader:
        for _ in range(3):
            training.save()
            caught_up(loader, training.store)
        assert loader.metrics().cursor is None
        before = len(files.calls)
        loader.poll()
        assert len(files.calls) == before + 1  # it is not tried again as long as nothing is new
    assert training.store.cursors() == {}
    assert sum("cursor" in record.message for record in caplog.records) == 1


def test_leases_end_with_the_load(training: Training, fs: Flaky) -> None:
    with Loader(training.open(fs)) as loader:
        training.full()
        loader.poll()
    assert sum("leases/readers" in path for path in fs.paths("write")) == 2
    assert not training.files.find("/root/leases/readers")


# Where else its rows go.


def test_other_processes_look_up_in_its_memory(training: Training, tmp_path: Path) -> None:
    with Loader(training.open(), shared=tmp_path / "m") as loader:
        with AttachedTables(tmp_path / "m") as tables:
            for act in (training.save, training.full, training.save):
                act()
                caught_up(loader, training.store)
                batch = tables.lookup_many({"user": np.arange(ROWS)}, dense=["w"])
                assert batch.version == loader.version
                assert same_bits(batch.rows["user"], training.store.snapshot().table("user").read())
                assert batch.dense["w"].tolist() == [training.step] * 3
        with pytest.raises(BadInput):
            loader.bind(torch.nn.Embedding(ROWS, DIM))
        with pytest.raises(Conflict):
            Loader(training.open(), shared=tmp_path / "m")
    with pytest.raises(VersionNotFound):
        AttachedTables(tmp_path / "m")


def test_a_refused_or_failed_version_leaves_nothing_in_shared_memory(
    training: Training, fs: Flaky, tmp_path: Path
) -> None:
    with Loader(
        training.open(fs), shared=tmp_path / "m", options=LoaderOptions(validate=lambda c: c.step != 2)
    ) as loader:
        training.save()
        loader.poll()
        loader._queue.merge()
        before = sorted(path.name for path in (tmp_path / "m").rglob("*"))
        training.save()
        assert isinstance(loader.poll().error, VersionRefused)
        assert sorted(path.name for path in (tmp_path / "m").rglob("*")) == before
        training.save()
        for at in range(2, 7):  # behind the two records: of what it reads of the version
            fs.arm(Fault(FaultKind.FAIL_BEFORE, len(fs.calls) + at))
            assert isinstance(loader.poll().error, StorageFailure)
            assert sorted(path.name for path in (tmp_path / "m").rglob("*")) == before
        fs.arm(None)
        caught_up(loader, training.store)


def test_what_changed_is_forgotten_when_it_is_shown(training: Training, tmp_path: Path) -> None:
    """The ids of the last overlay kept all of its memory mapped until the next version came."""
    with Loader(training.open(), shared=tmp_path / "m") as loader:
        training.save()
        loader.poll()
        loader._queue.merge()
        gc.collect()
        gone = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        assert gone
        assert not [line for line in gone if line.endswith("(deleted)")]


FORKED = """
import os, signal, sys
import numpy as np
from cnr_store import CnrStoreError, Store
from cnr_store.serving import AttachedTables, Loader, LoaderOptions
store, shared = Store.create("memory://forked"), sys.argv[1] or None
writer = store.writer()

def save(step):
    with writer.begin(step) as txn:
        txn.write_table("t", np.full((9, 2), step, np.float32)) if step == 0 else txn.write_rows(
            "t", np.arange(9), np.full((9, 2), step, np.float32))

save(0)
loader = Loader(store, shared=shared, options=LoaderOptions(poll_interval_s=0.001))
loader.start()
readable, writable = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.read(readable, 1)
    loader.close()
    for call in (loader.poll, loader.pin, loader.start, lambda: print(loader.lookup("t", [1])[0, 0], flush=True)):
        try:
            call()
        except CnrStoreError as error:
            print(error.kind, flush=True)
    if shared:
        print(AttachedTables(shared).lookup("t", [1])[0, 0], flush=True)
    os._exit(0)
loader.stop()
for step in (1, 2, 3):
    save(step)
    loader.poll()
    loader._queue.merge()
os.write(writable, b"x")
assert os.waitpid(child, 0)[1] == 0
save(4)
assert loader.poll().error is None
assert loader.lookup("t", [1])[0, 0] == 4
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child_leaves_the_loader_to_its_parent(tmp_path: Path, shared: bool) -> None:
    """With shared memory a lookup of the child span for ever, and a poll of it wrote to its parent's rows."""
    folder = str(tmp_path / "m") if shared else ""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, folder], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    refused = ["bad_input"] * 3
    assert done.stdout.split() == [*refused, *(["version_not_found", "3.0"] if shared else ["0.0"])]


class Rows:
    """A sink that keeps everything it was given, in order."""

    name = "rows"

    def __init__(self) -> None:
        self.shown: SinkState | None = None
        self.rows: dict[str, dict[int, list[float]]] = {}
        self.pending: list[Callable[[], None]] = []

    def open(self) -> SinkState | None:
        return self.shown

    def begin(self, tables: Any, *, full: bool) -> None:
        self.pending = [self.rows.clear] if full else []

    def put(self, table: str, row_ids: Any, values: Any) -> None:
        fresh = dict(zip(row_ids.tolist(), values.tolist(), strict=True))
        self.pending.append(lambda: self.rows.setdefault(table, {}).update(fresh))

    def delete(self, table: str, row_ids: Any) -> None:
        ids = row_ids.tolist()
        self.pending.append(lambda: [self.rows[table].pop(row, None) for row in ids] and None)

    def commit(self, state: SinkState) -> None:
        for change in self.pending:
            change()
        self.shown = state

    def abort(self) -> None:
        self.pending = []


@pytest.mark.parametrize("options", [{}, {"served": "bfloat16"}, {"shard": HashShard(0, 2)}, {"publish": "apply"}])
def test_a_sink_gets_what_changed_and_a_rollback_too(training: Training, options: dict[str, Any]) -> None:
    sink = Rows()
    with opened_loader(training.open(), **options) as loader:
        feed = loader.add_sink(sink, start=False)
        first = feed.push()
        assert first is not None
        assert first.full
        acts = [training.save, training.save, training.full, training.save]
        for act in (*acts, lambda: loader.rollback(loader.version - 1)):
            act()
            loader.poll()
            loader.apply()
            assert feed.push() is not None
            assert sink.shown is not None
            assert sink.shown.version == loader.version
            for table, rows in sink.rows.items():
                ids = sorted(rows)
                assert len(ids) == len(loader._queue.view.table(table).row_ids())
                values = training.store.snapshot(loader.version).table(table).read_rows(np.asarray(ids))
                assert [rows[row] for row in ids] == values.tolist()
        assert feed.metrics().full_pushes <= 2


def test_a_sink_that_fails_stops_nobody(training: Training) -> None:
    class Broken(Rows):
        def begin(self, tables: Any, *, full: bool) -> None:
            raise StorageFailure("away")

    with Loader(training.open()) as loader:
        feed = loader.add_sink(Broken())
        training.save()
        caught_up(loader, training.store)
        until(loader, lambda: feed.metrics().failures > 0)


def test_a_loader_reads_from_a_relay(training: Training, tmp_path: Path) -> None:
    training.save()
    relay = Relay(training.store, str(tmp_path / "near"))
    relay.advance()
    with Loader(tmp_path / "near", options=LoaderOptions(cursor="server")) as loader:
        for act in (training.save, training.full, training.save):
            act()
            relay.advance()
            caught_up(loader, training.store)


# When something is wrong.


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


@pytest.mark.parametrize("wrong", [{"publish": "now"}, {"poll_interval_s": 0}, {"served": "float8"}, {"holds": "all"}])
def test_misuse_is_refused(training: Training, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        opened_loader(training.open(), **wrong)


# Behind the caller.


def until(loader: Loader, what: Callable[[], bool]) -> None:
    """Wait until it is so: for a thread whose pace is not the test's."""
    turn = threading.Event()
    for _ in range(6000):
        if what():
            return
        turn.wait(0.01)
    raise AssertionError(loader.metrics())


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
        assert metrics.bytes > 0
        assert metrics.apply_s > 0
        assert metrics.age_s >= 0
        assert (metrics.version, metrics.step) == (loader.version, 3)
