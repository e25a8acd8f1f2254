"""What a loader serves, which versions it follows, and what a poll costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cnr_store import BadInput, CorruptStore, Store
from cnr_store.errors import (
    BadDtype,
    BadRowIds,
    BadShape,
    BranchNotFound,
    ChannelNotFound,
    TableNotFound,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format.layout import commit_key
from cnr_store.serving import HashShard, Loader, LoaderOptions, RowRange
from cnr_store.serving.rows.shards import rows_in_shard
from cnr_store.storage import storage_from_filesystem
from tests.serving.loaders import DIM, OPTIONS, ROWS, Flaky, Training, caught_up
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.loader_checks import check_is_snapshot, opened_loader, served
from tests.support.store_oracle import same_bits


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
@pytest.mark.parametrize("kept_as", ["auto", "codes"])
def test_served_rows_are_the_same_after_deltas_as_after_a_load(
    training: Training, served_as: Any, kept_as: Any
) -> None:
    with Loader(training.open(), options=LoaderOptions(served=served_as, kept_as=kept_as)) as loader:
        for _ in range(3):
            training.save()
            assert loader.poll().error is None
            with Loader(training.open(), options=LoaderOptions(served=served_as, kept_as=kept_as)) as fresh:
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


def test_compactions_baselines_rollbacks_and_tags_are_followed(training: Training) -> None:
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


def test_a_record_that_changes_nothing_costs_one_more_request_and_no_read(training: Training, fs: Flaky) -> None:
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


@pytest.mark.parametrize("kept_as", ["auto", "codes"])
def test_a_rollback_to_before_a_finer_scale_reads_the_coarser_codes(training: Training, kept_as: Any) -> None:
    """Codes that are all even at the finer scale became zeros."""
    before = training.save()
    training.writer.restore()
    with training.writer.begin(9) as txn:
        txn.refine_scale("user")
        txn.write_rows("user", np.asarray([4]), np.full((1, DIM), 8, np.float32))
    with Loader(training.open(), options=LoaderOptions(kept_as=kept_as)) as loader:
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


def test_a_pinned_version_that_expires_stays_and_is_told_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Each poll was an error, with a pause, and with a line in the log whenever the floor rose."""
    first = training.save()
    with Loader(training.open(), follow=False) as loader:
        rows = served(loader)
        assert not loader.metrics().is_expired
        for _ in range(3):
            training.full()
            training.forget()
            assert loader.poll().error is None
            assert loader.metrics().is_expired
        assert loader.version == first
        assert same_bits(served(loader)["user"], rows["user"])
        assert loader.metrics().errors == 0
        assert caplog.text.count(f"version {first} has expired") == 1

        loader.unpin()
        caught_up(loader, training.store)
        assert not loader.metrics().is_expired
