"""Writes rows to Redis in versioned batches. A reader (`rows`) never gets rows of two versions.

`scripts` describes the keys and each step. A batch is invisible until its commit, which is one `SET` in a script. The
next process that opens the sink undoes an interrupted batch. A writer blocks Redis for one chunk of rows at most
(`CHUNK_ROWS`, `CHUNK_BYTES`), a reader for its own rows.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from cnr_store.errors import AccessDenied, BadInput, BadName, Fenced, StorageFailure, TableNotFound
from cnr_store.integrations.redis.connection import (
    FORMAT,
    HEAD_BYTES,
    Connection,
    CurrentGeneration,
    connected,
    document_of,
    numbers_of,
)
from cnr_store.serving.sinks.protocol import SinkState, SinkTable
from cnr_store.serving.sinks.stored_rows import StoredAs, check_rows, check_stored_as, row_width, rows_to_bytes
from cnr_store.types import Float32s, RowIds

if TYPE_CHECKING:
    from redis import Redis

CHUNK_ROWS = 1000
"""Maximum number of rows that one script writes or settles."""

CHUNK_BYTES = 1 << 20
"""Maximum bytes of values that one script writes."""

_SCAN_KEYS = 1000


class RedisSink:
    """A `RowSink` that keeps rows in Redis 5 or newer, or in a compatible server.

    The process that last opened a prefix writes it; an earlier one gets `Fenced` at its next step. Any number of
    readers (`RedisRows`) may read; they wait for one chunk at most.

    Memory in Redis, per row: the key (prefix, table and id as text), 12 bytes, the value, and the overhead of Redis per
    string key. Rows of a batch are stored twice from their write until shortly after its commit. A full batch is
    stored beside the rows that it replaces. The server must not evict these keys (``maxmemory-policy noeviction`` or
    ``volatile-*``), because an evicted row reads as absent.

    Parameters
    ----------
    client
        A `redis.Redis` that returns bytes; it is not closed. `connect` creates one.
    prefix
        The name of the sink, and the hash tag of all its keys, so that a cluster stores them in one slot.
    stored_as
        How values are stored; if stored rows differ, the next batch is a full one.
    """

    def __init__(self, client: Redis, prefix: str, *, stored_as: StoredAs = "float32") -> None:
        check_stored_as(stored_as)
        self._at = Connection(client, prefix)
        self._stored_as: StoredAs = stored_as
        self._uuid = uuid.uuid4().hex.encode()
        self._opens = 0
        self._token: bytes | None = None
        self._head = b""  # the first bytes of the last `current` that this process wrote or read
        self._batch: _OpenBatch | None = None

    @classmethod
    def connect(cls, url: str, prefix: str, *, stored_as: StoredAs = "float32", **options: Any) -> Self:
        """Return a sink at a URL such as ``redis://user:password@host:6379/0``; no I/O. Passes options to redis-py.

        Without ``socket_timeout`` and ``socket_connect_timeout`` a server that does not answer in 10 s is a failure.

        Raises
        ------
        MissingDependency, BadInput
        """
        return cls(connected(url, options), prefix, stored_as=stored_as)

    @property
    def name(self) -> str:
        """The prefix and the server's address."""
        return self._at.place

    def open(self) -> SinkState | None:
        """Take over the prefix, undo an interrupted batch, and return the state that readers see.

        None if nothing was committed, or if rows are stored in another way than this sink stores them.

        Raises
        ------
        StorageFailure, AccessDenied
        BadInput
            The server evicts keys of any kind when its memory is full.
        Fenced
            Another sink opened it since this one did: a sink that comes back after an error takes nothing over.
        """
        self._batch = None
        self._check_eviction()
        keys = self._at.keys
        names = [keys.named("token"), keys.named("current")]
        self._opens += 1
        token, current = self._at.run("OPEN", names, self._uuid, self._opens, self._token or b"")
        self._token, self._head = token, b"" if current is None else current[:HEAD_BYTES]
        self._settle()
        if current is None:
            return None
        document = document_of(self._at.place, current)
        return document.state if document.stored_as == self._stored_as else None

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        """Begin a batch (`RowSink.begin`), after settling the rows of the previous one.

        Raises
        ------
        StorageFailure
            A request failed, or readers see another state than this process wrote: the server was emptied, or
            restored from an older copy. `open` returns the state.
        Fenced
        """
        for table in tables:
            if "\0" in table:
                raise BadName(f"table name {table!r} contains a NUL; rename the table", table=table)
        self._settle()
        names = ("token", "current", "pending", "sequence", "written", "garbage")
        keys = [self._at.keys.named(name) for name in names]
        sequence, generation = self._at.run("BEGIN", keys, self._held(), int(full), self._head)
        self._batch = _OpenBatch(dict(tables), int(sequence), int(generation), full)

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        """Write rows of the batch in chunks (`RowSink.put`).

        Raises
        ------
        NonFiniteValues, BadShape, TableNotFound, StorageFailure, Fenced
        """
        batch, dim = self._writing(table)
        check_rows(table, row_ids, values, dim)
        width = row_width(self._stored_as, dim)
        step = max(1, min(CHUNK_ROWS, CHUNK_BYTES // width))
        for start in range(0, len(row_ids), step):
            ids = row_ids[start : start + step]
            stored = rows_to_bytes(self._stored_as, table, ids, values[start : start + step])
            keys = self._keys("token", "pending", "written") + self._at.keys.rows(batch.generation, table, ids)
            chunk = b"" if batch.full else _chunk(table, ids)
            self._at.run("PUT", keys, self._held(), batch.mark, batch.steps + 1, chunk, width, stored.tobytes())
            batch.steps += 1

    def delete(self, table: str, row_ids: RowIds) -> None:
        """Make rows absent when the batch is committed (`RowSink.delete`).

        Raises
        ------
        TableNotFound, StorageFailure, Fenced
        """
        batch, _ = self._writing(table)
        for start in range(0, len(row_ids), CHUNK_ROWS):
            ids = row_ids[start : start + CHUNK_ROWS]
            keys = self._keys("token", "pending", "written") + self._at.keys.rows(batch.generation, table, ids)
            chunk = b"" if batch.full else _chunk(table, ids)
            self._at.run("DELETE", keys, self._held(), batch.mark, batch.steps + 1, chunk)
            batch.steps += 1

    def commit(self, state: SinkState) -> None:
        """Make the batch visible in one step, then delete the rows that it replaced (`RowSink.commit`).

        Raises
        ------
        StorageFailure, Fenced
        """
        batch = self._batch
        if batch is None:
            raise BadInput(f"{self.name} has no batch to commit: call begin() first")
        document = CurrentGeneration(
            format=FORMAT, stored_as=self._stored_as, store=state.store, branch=state.branch, version=state.version,
            step=state.step, scope=state.scope,
            tables={name: (table.dim, table.num_rows) for name, table in batch.tables.items()},
        )  # fmt: skip
        keys = self._keys("token", "current", "pending", "garbage")
        self._at.run("COMMIT", keys, self._held(), batch.mark, batch.steps, msgspec.json.encode(document))
        self._batch, self._head = None, struct.pack(">Q", batch.generation) + batch.mark
        # The batch is committed even if settling fails; the next batch settles first.
        with contextlib.suppress(StorageFailure, Fenced):
            self._settle()

    def abort(self) -> None:
        """Undo the batch if the server is reachable; otherwise the next `open` or `begin` undoes it."""
        if self._batch is not None:
            self._batch = None
            with contextlib.suppress(StorageFailure, Fenced):
                self._settle()

    def close(self) -> None:
        """Close the client's connections after its feed has ended; using the sink again reopens them."""
        self._at.client.close()

    def _settle(self) -> None:
        """Drop a pending batch, and reduce every written row to the entry that `current` shows."""
        first = self._keys("token", "current", "written", "pending")
        chunk = self._at.run("DROP", self._keys("token", "pending", "garbage", "written"), self._held())
        # Unsettled rows are of the current generation: a full batch lists none.
        generation = self._generation() if chunk is not None else 0
        while chunk is not None:
            rows = self._at.keys.rows(generation, *_chunk_rows(chunk))
            chunk = self._at.run("SETTLE", first + rows, self._held(), chunk, generation)
        garbage = self._at.keys.named("garbage")
        for old in self._at.call("listing garbage", partial(self._at.client.smembers, garbage)):
            self._clear(int(old))
            self._at.call("clearing garbage", partial(self._at.client.srem, garbage, old))

    def _clear(self, generation: int) -> None:
        keys = self._keys("token", "current")
        for rows in self._scan(self._at.keys.pattern(generation)):
            self._at.run("CLEAR", keys + rows, self._held(), generation)

    def _scan(self, pattern: bytes) -> Iterator[list[bytes]]:
        cursor: Any = 0
        while True:
            scan = partial(self._at.client.scan, cursor, match=pattern, count=_SCAN_KEYS)
            cursor, found = self._at.call("scanning", scan)
            if found:
                yield list(found)
            if cursor == 0:
                return

    def _generation(self) -> int:
        current = self._at.call("reading current", partial(self._at.client.get, self._at.keys.named("current")))
        return numbers_of(current)[0] if current is not None else 0

    def _check_eviction(self) -> None:
        try:
            memory = self._at.call("asking for the eviction policy", partial(self._at.client.info, "memory"))
        except AccessDenied:
            return  # this user may not run INFO; the documentation requires the right policy
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if int(memory.get("maxmemory", 0)) > 0 and policy.startswith("allkeys"):
            raise BadInput(
                f"the server of {self.name} evicts any key if its memory is full (maxmemory-policy {policy}), and an "
                "evicted row reads as absent; set noeviction, or volatile-lru if it also has caches",
                path=self._at.keys.prefix, found=policy, expected="noeviction",
            )  # fmt: skip

    def _writing(self, table: str) -> tuple[_OpenBatch, int]:
        if self._batch is None:
            raise BadInput(f"{self.name} has no batch to write to: call begin() first", table=table)
        if table not in self._batch.tables:
            raise TableNotFound(
                f"the batch of {self.name} has no table {table!r}; it has {sorted(self._batch.tables)}", table=table
            )
        return self._batch, self._batch.tables[table].dim

    def _keys(self, *names: str) -> list[bytes]:
        return [self._at.keys.named(name) for name in names]

    def _held(self) -> bytes:
        if self._token is None:
            raise BadInput(f"{self.name} is not open: call open() first")
        return self._token


@dataclass(slots=True)
class _OpenBatch:
    """A batch before its commit; ``steps`` is the number of steps that have run."""

    tables: dict[str, SinkTable]
    sequence: int
    generation: int
    full: bool
    steps: int = 0

    @property
    def mark(self) -> bytes:
        return struct.pack(">Q", self.sequence)


def _chunk(table: str, row_ids: RowIds) -> bytes:
    return table.encode() + b"\0" + row_ids.astype("<i8", copy=False).tobytes()


def _chunk_rows(chunk: bytes) -> tuple[str, RowIds]:
    table, _, ids = chunk.partition(b"\0")
    return table.decode(), np.frombuffer(ids, "<i8").astype(np.int64)
