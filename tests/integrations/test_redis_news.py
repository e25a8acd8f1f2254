"""Announcements through a real Redis: they wake polls, and nothing waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store
from cnr_store.serving import Loader, LoaderOptions
from tests.serving.loaders import until
from tests.support.servers import RedisServer

redis = pytest.importorskip("redis")

from cnr_store.integrations.redis import RedisNews  # noqa: E402 - after the skip

pytestmark = pytest.mark.servers

RARELY = LoaderOptions(poll_interval_s=1e6)
LONGEST_S = 60.0


class Calls:
    """Counts calls of a function that wakes, and waits for more of them."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def reach(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, LONGEST_S)


def save(store: Store) -> int:
    with store.writer() as writer, writer.begin(1) as txn:
        txn.write_table("user", np.ones((5, 2), np.float32))
    assert txn.version is not None
    return txn.version


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(str(tmp_path / "store"), fsync=False) as made:
        yield made


def test_a_commit_is_announced_and_served(redis_server: RedisServer, prefix: str, store: Store) -> None:
    with (
        RedisNews.connect(redis_server.url, prefix) as told,
        RedisNews.connect(redis_server.url, prefix) as heard,
        Loader(store.url, options=RARELY) as loader,
    ):
        subscribed = Calls()
        heard.listen(lambda: (loader.wake(), subscribed()))
        subscribed.reach(1)
        loader.start()
        until(loader, lambda: loader.metrics().polls == 1)  # it rests for days from now on
        store.announce_to(told.announce)

        version = save(store)

        until(loader, lambda: loader.version == version)


def test_names_are_apart(redis_server: RedisServer, prefix: str) -> None:
    mine, other = Calls(), Calls()
    with RedisNews.connect(redis_server.url, prefix) as news, RedisNews.connect(redis_server.url, prefix + "2") as near:
        news.listen(mine)
        near.listen(other)
        mine.reach(1)
        other.reach(1)

        news.announce(7)

        mine.reach(2)
    assert (mine.count, other.count) == (2, 1)


def test_what_was_announced_before_the_end_is_sent(redis_server: RedisServer, prefix: str) -> None:
    heard = Calls()
    with RedisNews.connect(redis_server.url, prefix) as listening:
        listening.listen(heard)
        heard.reach(1)

        with RedisNews.connect(redis_server.url, prefix) as told:
            told.announce(1)

        heard.reach(2)


def test_a_server_that_comes_back_is_heard_again(
    own_redis: RedisServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Calls()
    with RedisNews.connect(own_redis.url, prefix) as listening, RedisNews.connect(own_redis.url, prefix) as told:
        listening.listen(heard)
        heard.reach(1)
        own_redis.stop()
        told.announce(1)
        own_redis.start()
        heard.reach(2)  # subscribed again

        told.announce(2)

        heard.reach(3)
    assert own_redis.password not in caplog.text


def test_commits_and_loaders_do_without_a_server(own_redis: RedisServer, prefix: str, store: Store) -> None:
    own_redis.stop()
    with (
        RedisNews.connect(own_redis.url, prefix) as news,
        Loader(store, options=LoaderOptions(poll_interval_s=0.01)) as loader,
    ):
        store.announce_to(news.announce)
        news.listen(loader.wake)
        loader.start()

        version = save(store)

        until(loader, lambda: loader.version == version)
