"""Rows in a real Redis: one version whole for every reader, whatever is written beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from cnr_store.errors import (
    AccessDenied,
    BadInput,
    BadName,
    BadRowIds,
    BadShape,
    CorruptStore,
    MissingDependency,
    NonFiniteValues,
    StorageFailure,
    TableNotFound,
)
from cnr_store.serving.rows.fused_kernels import values_of_rows
from cnr_store.serving.sinks import SinkFeed, SinkState, SinkTable
from cnr_store.serving.sinks.stored_rows import StoredAs
from tests.support.servers import RedisServer
from tests.support.serving_reference import fuse_rows

redis = pytest.importorskip("redis")

from cnr_store.integrations.redis import RedisRows, RedisSink  # noqa: E402 - after the skip
from cnr_store.integrations.redis import sink as sink_module  # noqa: E402
from tests.integrations.redis_rows import USERS, WRITER, assert_is_settled, assert_is_whole, opened, reader_of  # noqa: E402
from tests.integrations.redis_writer import CountingRedis, item_rows, state, write  # noqa: E402

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("stored_as", get_args(StoredAs))
def test_rows_come_back_as_they_are_stored(redis_server: RedisServer, prefix: str, stored_as: StoredAs) -> None:
    sink, reader = opened(redis_server, prefix, stored_as=stored_as), reader_of(redis_server, prefix)
    values = np.random.default_rng(0).standard_normal((60, 6)).astype(np.float32)
    sink.begin({"user": SinkTable(6, 60)}, full=True)
    sink.put("user", USERS, values)
    sink.commit(state(1))
    ids = [5, 0, 59, 5]

    found = reader.read_many({"user": ids})
    raw = reader.read_many({"user": ids}, as_stored=True).rows["user"]

    if stored_as in ("int8", "int4"):
        bits = 8 if stored_as == "int8" else 4
        fused = fuse_rows(values, bits)[0][ids]
        assert (raw == fused).all()
        assert (found.rows["user"] == values_of_rows(fused, 6, bits)).all()
    elif stored_as == "bfloat16":
        fractions, exponents = np.frexp(values[ids])
        rounded = np.ldexp(np.rint(fractions * 256) / 256, exponents)  # 8 bits, ties to even
        assert (found.rows["user"] == rounded).all()
        assert (raw == rounded.view(np.uint32) >> 16).all()
    else:
        rounded = values[ids].astype(stored_as)
        assert (found.rows["user"] == rounded).all()
        assert (raw == rounded).all()
    assert (found.version, found.state) == (1, state(1))
    assert found.rows["user"].flags.writeable


def test_special_values_keep_their_bits_as_float32(redis_server: RedisServer, prefix: str) -> None:
    sink = opened(redis_server, prefix)
    bits = np.array([[0x7FC00001, 0x80000000, 0xFF800000, 1]], np.uint32)
    sink.begin({"user": SinkTable(4, 60)}, full=True)
    sink.put("user", np.array([3]), bits.view(np.float32))
    sink.commit(state(1))

    found = reader_of(redis_server, prefix).read_many({"user": [3]}).rows["user"]

    assert (found.view(np.uint32) == bits).all()


def test_a_batch_shows_at_its_commit_and_a_reader_mixes_nothing(redis_server: RedisServer, prefix: str) -> None:
    sink, reader = opened(redis_server, prefix), reader_of(redis_server, prefix)
    with pytest.raises(TableNotFound, match="committed"):
        reader.read_many({"user": [1]})
    assert reader.state() is None

    for version, full in ((1, True), (2, False), (3, False), (4, True), (5, False)):
        write(sink, version, full=full)
        assert assert_is_whole(reader, version) == version
        assert_is_settled(redis_server, prefix)
        sink.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=version % 2 == 0)
        sink.put("user", USERS, np.full((60, 4), 99, np.float32))
        assert_is_whole(reader, version)
        sink.abort()
        assert_is_whole(reader, version)
        assert_is_settled(redis_server, prefix)
    assert reader.state() == state(5)
    assert RedisSink.connect(redis_server.url, prefix).open() == state(5)
    assert RedisSink.connect(redis_server.url, prefix, stored_as="int8").open() is None


READER = """
import sys
import numpy as np
from cnr_store.integrations.redis import RedisRows
url, prefix, reads = sys.argv[1], sys.argv[2], int(sys.argv[3])
reader = RedisRows.connect(url, prefix)
rng = np.random.default_rng()
torn, versions = 0, set()
for _ in range(reads):
    batch = reader.read_many({"user": rng.integers(0, 60, 8), "item": rng.integers(-20, 20, 8)})
    there = ~batch.missing["item"]
    whole = (batch.rows["user"] == batch.version).all() and (batch.rows["item"][there] == batch.version).all()
    torn += not whole
    versions.add(batch.version)
print(torn, len(versions))
"""


def read_while_writing(server: RedisServer, prefix: str, reads: int) -> tuple[int, int]:
    """Return the torn reads of 4 threads and 2 processes, and the versions written meanwhile."""
    sink = opened(server, prefix)
    write(sink, 0, full=True)
    command = [sys.executable, "-c", READER, server.url, prefix, str(reads)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=WRITER.parents[2], text=True) for _ in range(2)]
    torn: list[int] = []
    reader = reader_of(server, prefix)

    def read() -> None:
        rng = np.random.default_rng()
        count = 0
        for _ in range(reads):
            batch = reader.read_many({"user": rng.integers(0, 60, 8), "item": rng.integers(-20, 20, 8)})
            there = ~batch.missing["item"]
            same = (batch.rows["user"] == batch.version).all() and (batch.rows["item"][there] == batch.version).all()
            count += not same
        torn.append(count)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    version = 0
    while any(thread.is_alive() for thread in threads) or any(process.poll() is None for process in processes):
        version += 1
        write(sink, version, full=version % 5 == 0)
    told = [process.communicate()[0].split() for process in processes]
    assert len(torn) == 4
    assert all(int(versions) > 1 for _, versions in told)
    return sum(torn) + sum(int(count) for count, _ in told), version


def test_no_read_of_threads_and_processes_is_torn(redis_server: RedisServer, prefix: str) -> None:
    torn, versions = read_while_writing(redis_server, prefix, 250)
    assert torn == 0
    assert versions > 5


@pytest.mark.soak
@pytest.mark.usefixtures("small_chunks")
def test_no_read_is_torn_at_length(redis_server: RedisServer, prefix: str) -> None:
    torn, versions = read_while_writing(redis_server, prefix, 50_000)
    assert torn == 0
    assert versions > 100


class Model:
    """A source for a feed: each version has one number in all its rows."""

    def __init__(self) -> None:
        self.version = 0
        self.tables = {"user": SinkTable(4, 60), "item": SinkTable(2, None)}
        self.feed: SinkFeed | None = None

    def published(self) -> Any:
        from cnr_store.serving.sinks import Published

        return Published(state(self.version), self.tables)

    def row_ids(self, table: str) -> npt.NDArray[np.int64]:
        return USERS if table == "user" else item_rows(self.version)

    def read_rows(self, row_ids: Any) -> Any:
        from cnr_store.serving.sinks import SourceRows

        found = {}
        for table, ids in row_ids.items():
            there = np.ones(len(ids), bool) if table == "user" else np.isin(ids, item_rows(self.version))
            found[table] = (np.full((len(ids), self.tables[table].dim), self.version, np.float32), there)
        return SourceRows(self.version, found)

    def changed_since(self, state: SinkState) -> None:
        return None

    def show(self, version: int) -> None:
        self.version = version
        if self.feed is not None:
            self.feed.notice(self.published(), {"user": USERS, "item": np.arange(-20, 20)})


@pytest.fixture
def fed(own_redis: RedisServer, prefix: str) -> Iterator[tuple[Model, SinkFeed, RedisServer]]:
    model = Model()
    sink = RedisSink.connect(own_redis.url, prefix)
    model.feed = SinkFeed(model, sink)
    yield model, model.feed, own_redis
    model.feed.stop()
    sink.close()


@pytest.mark.usefixtures("small_chunks")
def test_an_emptied_server_gets_everything_again(
    fed: tuple[Model, SinkFeed, RedisServer], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, feed, server = fed
    feed.push()
    model.show(1)
    feed.push()
    model.show(2)
    put = RedisSink.put

    def put_at_a_fresh_server(self: RedisSink, *arguments: Any) -> None:
        monkeypatch.setattr(RedisSink, "put", put)
        server.stop()
        server.start()
        put(self, *arguments)

    monkeypatch.setattr(RedisSink, "put", put_at_a_fresh_server)

    with pytest.raises(StorageFailure, match="restarted or emptied"):
        feed.push()
    result = feed.push()

    assert result is not None
    assert result.is_full
    assert_is_whole(reader_of(server, prefix), 2)
    assert_is_settled(server, prefix)


def test_a_server_that_is_down_fails_clearly_and_is_filled_when_it_is_back(
    fed: tuple[Model, SinkFeed, RedisServer], prefix: str
) -> None:
    model, feed, server = fed
    feed.push()
    server.stop()
    model.show(1)

    with pytest.raises(StorageFailure) as caught:
        feed.push()

    said = "".join(traceback.format_exception(caught.value))
    assert server.password not in said
    assert feed.metrics().version == 0
    server.start()
    assert feed.push() is not None
    assert_is_whole(reader_of(server, prefix), 1)


class Telling(RedisSink):
    """A sink that tells of its commits."""

    is_told: threading.Event

    def commit(self, state: SinkState) -> None:
        super().commit(state)
        self.is_told.set()


def test_an_emptied_server_is_filled_again_without_a_new_version(own_redis: RedisServer, prefix: str) -> None:
    model = Model()
    sink = Telling.connect(own_redis.url, prefix)
    sink.is_told = threading.Event()
    feed = SinkFeed(model, sink, check_interval_s=0.05)
    model.show(1)
    feed.push()
    own_redis.stop()
    own_redis.start()
    reader = reader_of(own_redis, prefix)
    sink.is_told.clear()
    feed.start()
    assert sink.is_told.wait(60)
    feed.stop()
    assert_is_whole(reader, 1)
    assert_is_settled(own_redis, prefix)
    sink.close()
    reader.close()


def test_a_server_that_hangs_is_a_failure_after_a_time(
    own_redis: RedisServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cnr_store.integrations.redis.connection.TIMEOUT_S", 0.2)
    sink, reader = opened(own_redis, prefix), reader_of(own_redis, prefix)
    write(sink, 1, full=True)
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StorageFailure, match="Timeout"):
            sink.begin({"user": SinkTable(4, 60), "item": SinkTable(2, None)}, full=False)
        with pytest.raises(StorageFailure, match="Timeout"):
            reader.state()
    finally:
        own_redis.process.send_signal(signal.SIGCONT)
    sink.open()
    write(sink, 2, full=False)
    assert_is_whole(reader, 2)
    assert_is_settled(own_redis, prefix)
    sink.close()
    reader.close()


def test_a_rollback_puts_the_older_version_back(fed: tuple[Model, SinkFeed, RedisServer], prefix: str) -> None:
    model, feed, server = fed
    reader = reader_of(server, prefix)
    for version in (0, 1, 2, 1, 0, 5):
        model.show(version)
        feed.push()
        assert_is_whole(reader, version)
    assert_is_settled(server, prefix)


def test_a_feed_on_a_thread_outlives_cut_connections(fed: tuple[Model, SinkFeed, RedisServer], prefix: str) -> None:
    model, feed, server = fed
    reader = reader_of(server, prefix)
    feed.start()
    with server.client() as client:
        for version in range(1, 40):
            model.show(version)
            client.client_kill_filter(_type="normal", skipme=True)
            client.script_flush()
        feed.stop()
    feed.push()
    assert_is_whole(reader, 39)


def test_a_large_batch_goes_in_bounded_steps(redis_server: RedisServer, prefix: str) -> None:
    client = CountingRedis.from_url(redis_server.url)
    sink, reader = RedisSink(client, prefix), reader_of(redis_server, prefix)
    values = np.random.default_rng(0).standard_normal((6_000, 300)).astype(np.float32)
    tables = {"wide": SinkTable(300, 6_000)}
    sink.open()
    for version, full in ((1, True), (2, False)):
        sink.begin(tables, full=full)
        sink.put("wide", np.arange(6_000), values * version)
        sink.commit(state(version))

        ids = np.arange(0, 6_000, 97)
        assert (reader.read_many({"wide": ids}).rows["wide"] == values[ids] * version).all()

    rows = [int(command[2]) for command in client.commands if command[0] == "EVALSHA"]
    sent = [sum(len(part) for part in command if isinstance(part, bytes)) for command in client.commands]
    assert max(rows) <= sink_module.CHUNK_ROWS + 6
    assert max(sent) <= sink_module.CHUNK_BYTES + 100 * sink_module.CHUNK_ROWS


def test_a_reader_is_told_of_tables_and_ids_that_cannot_be(redis_server: RedisServer, prefix: str) -> None:
    write(opened(redis_server, prefix), 1, full=True)
    reader = reader_of(redis_server, prefix)

    with pytest.raises(TableNotFound, match="other"):
        reader.read_many({"user": [1], "other": [1]})
    with pytest.raises(BadRowIds, match="user"):
        reader.read_many({"user": [0.5]})
    with pytest.raises(BadRowIds, match="user"):
        reader.read_many({"user": [[1]]})
    empty = reader.read_many({"user": [], "item": [3]})
    assert empty.rows["user"].shape == (0, 4)
    assert reader.read_many({}).version == 1


def test_a_sink_refuses_what_it_cannot_write(redis_server: RedisServer, prefix: str) -> None:
    sink = RedisSink.connect(redis_server.url, prefix, stored_as="float16")
    with pytest.raises(BadInput, match="open"):
        sink.begin({"user": SinkTable(4, 60)}, full=True)
    sink.open()
    with pytest.raises(BadInput, match="begin"):
        sink.put("user", USERS, np.zeros((60, 4), np.float32))
    with pytest.raises(BadInput, match="begin"):
        sink.commit(state(1))
    with pytest.raises(BadName, match="NUL"):
        sink.begin({"a\0b": SinkTable(4, 60)}, full=True)
    sink.begin({"user": SinkTable(4, 60)}, full=True)
    with pytest.raises(NonFiniteValues, match=r"row 7 of table 'user'.*float16"):
        sink.put("user", np.array([3, 7]), np.array([[1] * 4, [1e6] * 4], np.float32))
    with pytest.raises(BadShape, match="user"):
        sink.put("user", np.array([3]), np.zeros((1, 5), np.float32))
    with pytest.raises(TableNotFound, match="other"):
        sink.delete("other", np.array([3]))
    for bad in ("", "a{b", "a}b"):
        with pytest.raises(BadName):
            RedisSink.connect(redis_server.url, bad)
    with pytest.raises(BadInput, match="float64"):
        RedisSink.connect(redis_server.url, prefix, stored_as="float64")  # type: ignore[arg-type]  # without types
    with pytest.raises(BadInput, match="decode_responses"):
        RedisRows.connect(redis_server.url, prefix, decode_responses=True)


def test_prefixes_with_signs_of_patterns_touch_no_others(redis_server: RedisServer, prefix: str) -> None:
    beside = [f"{prefix}ab", f"{prefix}*b", f"{prefix}[a]b", f"{prefix}?b", f"{prefix}\\*b"]
    for name in beside:
        write(opened(redis_server, name), 1, full=True)
    for name in beside:
        sink = opened(redis_server, name)
        for version in (2, 3):
            write(sink, version, full=True)
        for other in beside:
            assert_is_whole(reader_of(redis_server, other), 1, 3)


def test_no_secret_is_in_what_is_said(redis_server: RedisServer, prefix: str) -> None:
    wrong = f"wrong-{uuid.uuid4().hex}"
    url = redis_server.url.replace(redis_server.password, wrong)
    for use in (lambda: RedisSink.connect(url, prefix).open(), lambda: RedisRows.connect(url, prefix).state()):
        with pytest.raises(AccessDenied) as caught:
            use()
        assert wrong not in "".join(traceback.format_exception(caught.value))
    for bad in (f"rediss:///:{wrong}@host:port", f"redis://:{wrong}@127.0.0.1:port/0", f"http://:{wrong}@host"):
        with pytest.raises((BadInput, StorageFailure)) as refused:
            RedisSink.connect(bad, prefix).open()
        assert wrong not in "".join(traceback.format_exception(refused.value))
    assert redis_server.password not in RedisSink.connect(redis_server.url, prefix).name


def test_a_server_that_evicts_is_refused_and_a_full_one_keeps_its_version(own_redis: RedisServer, prefix: str) -> None:
    sink, reader = opened(own_redis, prefix), reader_of(own_redis, prefix)
    write(sink, 1, full=True)
    with own_redis.client() as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 2_000_000)
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(BadInput, match="noeviction"):
            sink.open()
        client.config_set("maxmemory-policy", "noeviction")
        sink.open()
        sink.begin({"wide": SinkTable(300, 6_000)}, full=True)
        with pytest.raises(StorageFailure, match="out of memory"):
            sink.put("wide", np.arange(6_000), np.zeros((6_000, 300), np.float32))
        assert_is_whole(reader, 1)
        client.config_set("maxmemory", 0)
    sink.abort()
    write(sink, 2, full=False)
    assert_is_whole(reader, 2)
    assert_is_settled(own_redis, prefix)


def test_rows_of_something_else_are_corruption_not_values(redis_server: RedisServer, prefix: str) -> None:
    write(opened(redis_server, prefix), 1, full=True)
    reader = reader_of(redis_server, prefix)
    with redis_server.client() as client:
        row = next(client.scan_iter(match=f"{{{prefix}}}:*:user:5"))
        client.set(row, client.get(row)[:8] + b"\0\0\0\5" + b"abcd")
        with pytest.raises(CorruptStore, match="another program"):
            reader.read_many({"user": [5]})
        current = client.get(f"{{{prefix}}}:current")
        for newer in (b'{"format": 2}', current[16:].replace(b'"format":1', b'"format":2')):
            client.set(f"{{{prefix}}}:current", current[:16] + newer)
            with pytest.raises(CorruptStore, match="newer"):
                reader_of(redis_server, prefix).state()
            with pytest.raises(CorruptStore, match="newer"):
                RedisSink.connect(redis_server.url, prefix).open()


def test_without_redis_py_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependency, match=r"cnr-store\[redis\]"):
        RedisSink.connect("redis://127.0.0.1:1/0", "p")
