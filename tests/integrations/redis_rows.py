"""Tables in Redis, written by a sink and read by its reader, and checks of what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cnr_store.integrations.redis import RedisRows, RedisSink
from tests.integrations.redis_writer import item_rows
from tests.support.servers import RedisServer

WRITER = Path(__file__).with_name("redis_writer.py")
USERS, ITEMS = np.arange(60), np.arange(-25, 25)


def opened(server: RedisServer, prefix: str, **options: Any) -> RedisSink:
    sink = RedisSink.connect(server.url, prefix, **options)
    sink.open()
    return sink


def reader_of(server: RedisServer, prefix: str) -> RedisRows:
    return RedisRows.connect(server.url, prefix)


def keys_of(server: RedisServer, prefix: str) -> set[str]:
    with server.client() as client:
        return {key.decode() for key in client.scan_iter(match=f"{{{prefix}}}:*", count=1000)}


def assert_is_whole(reader: RedisRows, *versions: int) -> int:
    """Read every row, and compare it with what `redis_writer.write` made of the version that the batch says."""
    batch = reader.read_many({"user": USERS, "item": ITEMS})
    assert batch.version in versions
    assert (batch.rows["user"] == batch.version).all()
    assert not batch.missing["user"].any()
    has = np.isin(ITEMS, item_rows(batch.version))
    assert (batch.missing["item"] == ~has).all()
    assert (batch.rows["item"][has] == batch.version).all()
    return batch.version


def assert_is_settled(server: RedisServer, prefix: str) -> None:
    """Nothing is left but one entry per row of the version that is shown."""
    with server.client() as client:
        generation = int.from_bytes(client.get(f"{{{prefix}}}:current")[:8], "big")
        version = reader_of(server, prefix).read_many({}).version
        rows = [f"{{{prefix}}}:{generation}:user:{i}" for i in USERS]
        rows += [f"{{{prefix}}}:{generation}:item:{i}" for i in item_rows(version)]
        assert keys_of(server, prefix) == {f"{{{prefix}}}:{name}" for name in ("token", "sequence", "current")} | set(
            rows
        )
        assert {len(value) for value in client.mget(rows)} == {12 + 16, 12 + 8}


def copied(server: RedisServer, prefix: str) -> dict[bytes, bytes]:
    """A copy of all that a prefix has, as a server keeps on disk."""
    with server.client() as client:
        keys = list(client.scan_iter(match=f"{{{prefix}}}:*", count=1000))
        dump = client.pipeline()
        for key in keys:
            dump.dump(key)
        return dict(zip(keys, dump.execute(), strict=True))


def put_back(server: RedisServer, prefix: str, copy: dict[bytes, bytes]) -> None:
    """What a server is that died, and started from its copy: everything that came later is gone."""
    with server.client() as client:
        step = client.pipeline().delete(*keys_of(server, prefix))
        for name, dumped in copy.items():
            step.restore(name, 0, dumped)
        step.execute()
