"""Channels: names that move, beside tags, which do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cnr_store import BadInput, Store, TableOptions
from cnr_store.errors import BadName, ChannelNotFound, TagExists, VersionExpired, VersionNotFound
from cnr_store.log.author import writer_info
from cnr_store.log.rebase import draft_after, rebase_expire

ROWS, DIM = 4, 2


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path / "store")
    made = Store.create(url)
    for step in (1, 2, 3):
        with made.writer() as writer, writer.begin(step, "baseline") as txn:
            txn.write_table("t", np.full((ROWS, DIM), step, np.float32), options=TableOptions(scale=1.0))
    return made


def version_of(store: Store, step: int) -> int:
    return store.snapshot(step=step).version


def test_a_channel_names_a_version_until_it_is_moved(store: Store) -> None:
    first, second = version_of(store, 1), version_of(store, 2)

    store.set_channel("serving", first)
    before = store.snapshot(channel="serving").table("t").read()
    store.set_channel("serving", second)
    after = store.snapshot(channel="serving").table("t").read()

    assert (before[0, 0], after[0, 0]) == (1, 2)
    assert store.channels() == {"serving": second}
    assert store.snapshot().step == 3


def test_a_channel_set_without_a_version_names_the_head(store: Store) -> None:
    head = store.latest_version()

    said_by = store.set_channel("serving")

    assert store.channels() == {"serving": head}
    assert (store.record(said_by).kind, store.record(said_by).name, store.record(said_by).target) == (
        "channel", "serving", head,
    )  # fmt: skip


def test_a_reader_that_polls_finds_the_move_in_the_next_record(store: Store) -> None:
    store.set_channel("serving", version_of(store, 1))
    seen = store.head()

    Store.open(store.url).set_channel("serving", version_of(store, 3))
    news = store.poll(seen)

    assert news is not None
    assert news.record.kind == "channel"
    assert news.record.channels == {"serving": version_of(store, 3)}
    assert store.poll(news) is None


def test_of_two_moves_at_once_the_later_record_wins(store: Store) -> None:
    first, second = version_of(store, 1), version_of(store, 2)
    store.set_channel("serving", version_of(store, 3))
    late = Store.open(store.url)
    before = late.head()
    late.head = lambda: before  # type: ignore[method-assign]  # it has not seen what comes now

    store.set_channel("serving", first)
    late.set_channel("serving", second)

    assert store.channels() == {"serving": second}


def test_a_dropped_channel_is_gone_and_its_version_is_not(store: Store) -> None:
    store.set_channel("serving", version_of(store, 1))
    store.set_channel("canary")

    said_by = store.drop_channel("serving")

    assert set(store.channels()) == {"canary"}
    assert (store.record(said_by).kind, store.record(said_by).target) == ("channel", None)
    assert store.snapshot(step=1).table("t").read()[0, 0] == 1
    with pytest.raises(ChannelNotFound):
        store.snapshot(channel="serving")
    with pytest.raises(ChannelNotFound):
        store.drop_channel("serving")


def test_a_name_is_a_tag_or_a_channel(store: Store) -> None:
    store.tag("best")
    store.set_channel("serving")

    with pytest.raises(TagExists, match="'best' is a tag"):
        store.set_channel("best")
    with pytest.raises(TagExists, match="'serving' is a channel"):
        store.tag("serving")

    assert set(store.tags()) == {"best"}
    assert set(store.channels()) == {"serving"}


def test_a_channel_points_to_what_is_there(store: Store) -> None:
    expired = version_of(store, 1)
    head = store.head()
    draft = draft_after(head.record, "expire", writer_info(), expired=(expired,))
    store.internals.log.append(head, draft, rebase_expire)

    with pytest.raises(VersionNotFound):
        store.set_channel("serving", 1_000)
    with pytest.raises(VersionExpired):
        store.set_channel("serving", expired)
    with pytest.raises(BadName):
        store.set_channel("", 1)

    assert store.channels() == {}


def test_a_channels_version_stays_below_the_floor(store: Store) -> None:
    kept, gone = version_of(store, 1), version_of(store, 2)
    store.set_channel("serving", kept)
    head = store.head()
    draft = draft_after(head.record, "expire", writer_info(), floor=head.record.v)
    store.internals.log.append(head, draft, rebase_expire)

    assert store.snapshot(channel="serving").table("t").read()[0, 0] == 1
    with pytest.raises(VersionExpired):
        store.snapshot(gone)


def test_a_snapshot_is_chosen_in_one_way(store: Store) -> None:
    store.tag("best")
    store.set_channel("serving")

    with pytest.raises(BadInput, match="at most one"):
        store.snapshot(tag="best", channel="serving")


def test_an_open_writer_goes_on_behind_a_channel_move(store: Store) -> None:
    with store.writer() as writer:
        writer.restore()
        Store.open(store.url).set_channel("serving")
        with writer.begin(4) as txn:
            txn.write_rows("t", np.array([1]), np.full((1, DIM), 9, np.float32))

    assert store.snapshot().table("t").read()[1, 0] == 9
    assert "serving" in store.channels()
