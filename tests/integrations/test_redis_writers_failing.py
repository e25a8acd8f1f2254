"""Writers of a real Redis that die, repeat, arrive late or meet a restored server leave one version whole."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cnr_store.errors import Fenced, StorageFailure
from cnr_store.serving.sinks import SinkTable
from tests.support.servers import RedisServer

redis = pytest.importorskip("redis")

from cnr_store.integrations.redis import RedisRows, RedisSink, scripts  # noqa: E402 - after the skip
from tests.integrations.redis_rows import (  # noqa: E402
    ITEMS,
    USERS,
    WRITER,
    assert_is_settled,
    assert_is_whole,
    copied,
    opened,
    put_back,
    reader_of,
)
from tests.integrations.redis_writer import CountingRedis, item_rows, state, write  # noqa: E402

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("full", [False, True])
def test_a_server_restored_to_an_older_version_takes_no_batch_on_top(
    redis_server: RedisServer, prefix: str, full: bool
) -> None:
    sink, reader = opened(redis_server, prefix), reader_of(redis_server, prefix)
    write(sink, 1, full=True)
    copy = copied(redis_server, prefix)
    write(sink, 2, full=full)
    put_back(redis_server, prefix, copy)

    with pytest.raises(StorageFailure, match="restarted or emptied"):
        sink.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=False)

    assert_is_whole(reader, 1)
    assert sink.open() == state(1)
    write(sink, 3, full=False)
    assert_is_whole(reader, 3)
    assert_is_settled(redis_server, prefix)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("full", [False, True])
def test_a_server_restored_within_a_batch_does_not_commit_the_rest_of_it(
    redis_server: RedisServer, prefix: str, full: bool
) -> None:
    sink, reader = opened(redis_server, prefix), reader_of(redis_server, prefix)
    write(sink, 1, full=True)
    for lost in ("put", "delete"):
        sink.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=full)
        sink.put("user", USERS[:20], np.full((20, 4), 2, np.float32))
        copy = copied(redis_server, prefix)
        if lost == "put":
            sink.put("user", USERS[20:40], np.full((20, 4), 2, np.float32))
        else:
            sink.delete("item", ITEMS[:5])
        put_back(redis_server, prefix, copy)
        with pytest.raises(StorageFailure, match="restarted or emptied"):
            sink.commit(state(2))
        with pytest.raises(StorageFailure, match="restarted or emptied"):
            sink.put("user", USERS[40:], np.full((20, 4), 2, np.float32))
        sink.abort()
        assert_is_whole(reader, 1)
    assert sink.open() == state(1)
    write(sink, 2, full=full)
    assert_is_whole(reader, 2)
    assert_is_settled(redis_server, prefix)


def test_a_reader_of_a_restored_server_learns_anew_how_rows_are_stored(redis_server: RedisServer, prefix: str) -> None:
    sink, reader = opened(redis_server, prefix), reader_of(redis_server, prefix)
    write(sink, 1, full=True)
    copy = copied(redis_server, prefix)
    for stored_as in ("float16", "bfloat16", "float32"):
        other = opened(redis_server, prefix, stored_as=stored_as)
        other.begin({"user": SinkTable(4, 60)}, full=True)
        other.put("user", USERS, np.full((60, 4), 3, np.float32))
        other.commit(state(3))
        found = reader.read_many({"user": [5]})
        assert found.rows["user"].tolist() == [[3] * 4], stored_as
        put_back(redis_server, prefix, copy)  # the next full batch has the same number


class Late(CountingRedis):
    """A client of whose scripts of one name every copy arrives again, in order, before each later command."""

    keeps = ""
    """The digest of the script; nothing is kept while it is empty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.copies: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.look: Callable[[], None] = lambda: None

    def execute_command(self, *args: Any, **options: Any) -> Any:
        for command, its_options in self.copies:
            with contextlib.suppress(redis.RedisError):
                super().execute_command(*command, **its_options)
        self.look()
        if self.keeps and args[:2] == ("EVALSHA", self.keeps):
            self.copies.append((args, options))
        return super().execute_command(*args, **options)


def write_twice_over(sink: RedisSink, version: int, *, full: bool) -> None:
    """Write a version, each row with something else before: a step that runs again and late would bring that back."""
    sink.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=full)
    for value in (99, version):
        sink.put("user", USERS, np.full((60, 4), value, np.float32))
        sink.put("item", ITEMS, np.full((len(ITEMS), 2), value, np.float32))
        keys = item_rows(value)
        sink.delete("item", ITEMS)
        sink.put("item", keys, np.full((len(keys), 2), value, np.float32))
    sink.commit(state(version))


GIVES_UP = ("DROP", "BEGIN")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("script", ["OPEN", "DROP", "BEGIN", "PUT", "DELETE", "SETTLE", "COMMIT", "CLEAR"])
def test_a_script_that_arrives_again_and_late_changes_nothing(
    redis_server: RedisServer, prefix: str, script: str, full: bool
) -> None:
    reader = reader_of(redis_server, prefix)
    write_twice_over(opened(redis_server, prefix), 1, full=True)
    client = Late.from_url(redis_server.url)
    client.keeps = hashlib.sha1(getattr(scripts, script).encode()).hexdigest()
    sink = RedisSink(client, prefix)
    sink.open()
    given_up = 0

    for version in range(2, 7):
        client.look = functools.partial(assert_is_whole, reader, version - 1, version)
        try:
            write_twice_over(sink, version, full=full and version % 2 == 0)
        except StorageFailure:
            given_up += 1
            assert_is_whole(reader, version - 1)
            client.copies.clear()
            client.keeps, kept = "", client.keeps
            sink.abort()
            write_twice_over(sink, version, full=full and version % 2 == 0)
            client.keeps = kept
        assert_is_whole(reader, version)
        assert_is_settled(redis_server, prefix)

    assert client.copies or script in GIVES_UP or (script == "CLEAR" and not full), "the script was never sent"
    assert (given_up > 0) == (script in GIVES_UP)


def test_rows_of_the_current_generation_are_not_cleared(redis_server: RedisServer, prefix: str) -> None:
    """A server restored from an older copy may show again what was garbage."""
    sink = opened(redis_server, prefix)
    write(sink, 1, full=True)
    with redis_server.client() as client:
        token, current = (f"{{{prefix}}}:{name}" for name in ("token", "current"))
        generation = int.from_bytes(client.get(current)[:8], "big")
        row = f"{{{prefix}}}:{generation}:user:0"

        with pytest.raises(redis.ResponseError, match="CNRLOST"):
            client.register_script(scripts.CLEAR)([token, current, row], [client.get(token), generation])

    assert_is_whole(reader_of(redis_server, prefix), 1)


class Twice(CountingRedis):
    """A client whose first replies are all lost, so that each script runs a second time."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "EVALSHA":
            super().execute_command(*args, **options)
        return super().execute_command(*args, **options)


@pytest.mark.usefixtures("small_chunks")
def test_every_script_may_run_twice(redis_server: RedisServer, prefix: str) -> None:
    write(opened(redis_server, prefix), 0, full=True)
    reader = RedisRows(Twice.from_url(redis_server.url), prefix)
    sink = RedisSink(Twice.from_url(redis_server.url), prefix)
    assert sink.open() == state(0)
    for version, full in ((1, False), (2, True), (3, False)):
        write(sink, version, full=full)
        assert_is_whole(reader, version)
        assert_is_settled(redis_server, prefix)
    sink.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=False)
    sink.put("user", USERS, np.full((60, 4), 99, np.float32))
    sink.abort()
    assert_is_whole(reader, 3)
    assert_is_settled(redis_server, prefix)


class Killed(BaseException):
    """The process is gone at this command."""


def die() -> None:
    raise Killed


def commands_of(server: RedisServer, prefix: str, version: int, full: bool) -> int:
    """How many commands a writer needs from its start to the end of the batch; the next writer may need fewer or more.

    The server divides a scan of its keys as it likes.
    """
    client = CountingRedis.from_url(server.url)
    open_and_write(client, prefix, version, full)
    return len(client.commands)


def open_and_write(client: CountingRedis, prefix: str, version: int, full: bool) -> None:
    sink = RedisSink(client, prefix)
    sink.open()
    write(sink, version, full=full)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("full", [False, True])
def test_a_writer_that_dies_between_any_two_commands_leaves_one_version(
    redis_server: RedisServer, prefix: str, full: bool
) -> None:
    write(opened(redis_server, prefix), 0, full=True)
    reader = reader_of(redis_server, prefix)
    seen = set()
    version = 0

    for ends_at in itertools.count(1):  # after a command is before the next one
        client = CountingRedis.from_url(redis_server.url)
        client.ends_at, client.ends_after, client.end = ends_at, True, die
        try:
            open_and_write(client, prefix, version + 1, full)
        except Killed:
            pass
        else:  # it needed fewer commands
            break
        found = assert_is_whole(reader, version, version + 1)
        seen.add(found - version)

        sink = RedisSink.connect(redis_server.url, prefix)
        assert sink.open() == state(found)
        assert_is_whole(reader, found)
        assert_is_settled(redis_server, prefix)
        version = found + 1
        write(sink, version, full=False)
        assert_is_whole(reader, version)
    assert seen == {0, 1}
    assert_is_settled(redis_server, prefix)


def assert_survives_kill(server: RedisServer, prefix: str, ends_at: int, when: str, full: bool) -> bool:
    """Return False if the writer ended by itself, because it needed fewer commands."""
    reader = reader_of(server, prefix)
    before = assert_is_whole(reader, *range(10_000))
    arguments = [server.url, prefix, str(before + 1), str(int(full)), str(ends_at), when]
    done = subprocess.run([sys.executable, str(WRITER), *arguments], check=False)
    assert done.returncode in (-9, 0)
    found = assert_is_whole(reader, before, before + 1)
    assert RedisSink.connect(server.url, prefix).open() == state(found)
    assert_is_settled(server, prefix)
    return done.returncode != 0


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("full", [False, True])
def test_a_killed_process_leaves_one_version(redis_server: RedisServer, prefix: str, full: bool) -> None:
    write(opened(redis_server, prefix), 0, full=True)
    total = commands_of(redis_server, prefix, 1, full)
    assert assert_survives_kill(redis_server, prefix, total // 2, "after", full)


@pytest.mark.soak
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_killed_at_any_command_leaves_one_version(
    redis_server: RedisServer, prefix: str, full: bool, when: str
) -> None:
    write(opened(redis_server, prefix), 0, full=True)
    total = commands_of(redis_server, prefix, 1, full)
    kills = next(at for at in itertools.count(1) if not assert_survives_kill(redis_server, prefix, at, when, full)) - 1
    assert kills >= total // 2


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("step", ["begin", "put", "delete", "commit"])
def test_of_two_writers_the_older_is_refused_at_each_step(
    redis_server: RedisServer, prefix: str, step: str, full: bool
) -> None:
    older, reader = opened(redis_server, prefix), reader_of(redis_server, prefix)
    write(older, 1, full=True)
    steps = {
        "begin": lambda: older.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=full),
        "put": lambda: older.put("user", USERS, np.full((60, 4), 9, np.float32)),
        "delete": lambda: older.delete("item", np.array([1])),
        "commit": lambda: older.commit(state(9)),
    }
    for name, act in steps.items():
        if name == step:
            break
        act()
    newer = opened(redis_server, prefix)

    with pytest.raises(Fenced, match="another process"):
        steps[step]()
    older.abort()
    with pytest.raises(Fenced):
        older.begin({"user": SinkTable(4, 60)}, full=True)

    assert_is_whole(reader, 1)
    write(newer, 2, full=False)
    assert_is_whole(reader, 2)
    assert_is_settled(redis_server, prefix)


def test_a_writer_that_comes_back_after_an_error_takes_nothing_over(redis_server: RedisServer, prefix: str) -> None:
    """A regression: an older server whose connection had failed took the prefix back from the one that replaced it,
    whose feed then ended for ever; when the older server was stopped, nobody wrote any more."""
    older, reader = opened(redis_server, prefix), reader_of(redis_server, prefix)
    write(older, 1, full=True)
    older.open()  # as a feed does after a failure
    write(older, 2, full=False)
    newer = opened(redis_server, prefix)

    with pytest.raises(Fenced, match="another process"):
        older.open()

    write(newer, 3, full=False)
    assert_is_whole(reader, 3)
    assert_is_settled(redis_server, prefix)


def test_an_open_that_arrives_late_fences_no_later_one_of_its_sink(redis_server: RedisServer, prefix: str) -> None:
    """A regression: a feed whose first open was answered too late ended for ever."""
    client = Late.from_url(redis_server.url)
    client.keeps = hashlib.sha1(scripts.OPEN.encode()).hexdigest()
    sink = RedisSink(client, prefix)
    sink.open()
    sink.open()

    write(sink, 1, full=True)
    assert_is_whole(reader_of(redis_server, prefix), 1)
