"""Rows in Redis: written in versioned batches that a reader can never mix, read by one script call.

`redis_scripts` has the keys and what each step does. A batch is invisible until its commit, which is one `SET` by a
script; a batch that was cut off is undone by whoever opens the sink next. Redis is blocked for no longer than one chunk
of rows takes (`CHUNK_ROWS`, `CHUNK_BYTES`), and by a reader for its own rows.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.consume.sinks import redis_scripts
from cnr_store.consume.sinks.protocol import SinkState, SinkTable
from cnr_store.consume.sinks.stored_rows import (
    StoredAs,
    check_rows,
    check_stored_as,
    row_width,
    rows_from_bytes,
    rows_to_bytes,
)
from cnr_store.errors import (
    AccessDenied,
    BadInput,
    BadName,
    BadRowIds,
    CorruptStore,
    Fenced,
    MissingDependency,
    StorageFailure,
    TableNotFound,
)
from cnr_store.storage.redaction import Secrets
from cnr_store.types import Float32s, RowIds

if TYPE_CHECKING:
    from redis import Redis

CHUNK_ROWS = 1000
"""Most rows that one script writes or settles."""

CHUNK_BYTES = 1 << 20
"""Most bytes of values that one script writes."""

_FORMAT = 1
_READ_ATTEMPTS = 10
_SCAN_KEYS = 1000
_SECRET_OPTIONS = ("password", "username")


class _Current(msgspec.Struct, frozen=True):
    """The document behind the two numbers of `current`."""

    format: int
    stored_as: StoredAs
    store: str
    branch: str
    version: int
    step: int
    scope: str
    tables: dict[str, tuple[int, int | None]]

    @property
    def state(self) -> SinkState:
        return SinkState(self.store, self.branch, self.version, self.step, self.scope)


# Built while the module is imported, as in records.py: two threads that make it at once crash the interpreter.
_DECODER = msgspec.json.Decoder(_Current)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The names of a prefix's keys."""

    prefix: str

    @property
    def root(self) -> bytes:
        return b"{%s}:" % self.prefix.encode()

    def named(self, name: str) -> bytes:
        return self.root + name.encode()

    def rows(self, generation: int, table: str, row_ids: RowIds) -> list[bytes]:
        start = self.root + b"%d:%s:" % (generation, table.encode())
        return [start + b"%d" % row_id for row_id in row_ids.tolist()]

    def pattern(self, generation: int) -> bytes:
        """A glob that matches the rows of one generation and nothing else."""
        escaped = b"".join(b"\\" + bytes([c]) if c in b"*?[]^-\\" else bytes([c]) for c in self.root)
        return escaped + b"%d:*" % generation


class _Connection:
    """One client of one prefix: runs scripts, and turns what the client raises into errors of this library."""

    def __init__(self, client: Redis, prefix: str) -> None:
        _check_prefix(prefix)
        options: Mapping[str, Any] = client.connection_pool.connection_kwargs
        if options.get("decode_responses"):
            raise BadInput("a client for rows must return bytes: make it without decode_responses=True")
        self.client: Any = client
        self.keys = _Keys(prefix)
        self._secrets = Secrets({name: options.get(name) for name in _SECRET_OPTIONS})
        place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self.place = f"{prefix!r} at redis {place}"
        self._scripts = {
            name: client.register_script(getattr(redis_scripts, name))
            for name in ("OPEN", "DROP", "SETTLE", "BEGIN", "PUT", "DELETE", "COMMIT", "CLEAR", "READ")
        }

    def run(self, script: str, keys: list[bytes], *arguments: bytes | int) -> Any:
        """Run a script; loads it where the server does not have it (it was restarted, or its scripts were flushed)."""
        return self.call(f"running {script.lower()}", lambda: self._scripts[script](keys=keys, args=list(arguments)))

    def call(self, action: str, do: Callable[[], Any]) -> Any:
        """Do something with the client.

        Raises
        ------
        Fenced, StorageFailure, AccessDenied, CorruptStore
        """
        from redis import exceptions

        try:
            return do()
        except exceptions.ResponseError as error:
            raise self._refused(action, error) from self._secrets.without(error)
        except (exceptions.RedisError, OSError) as error:
            denied = isinstance(error, exceptions.AuthenticationError)
            kind = AccessDenied if denied else StorageFailure
            raise kind(
                f"{action} on {self.place} failed ({type(error).__name__}); "
                + ("check its user and password" if denied else "is it running and reachable? the cause is attached"),
                path=self.keys.prefix, found=type(error).__name__,
            ) from self._secrets.without(error)  # fmt: skip

    def _refused(self, action: str, error: Exception) -> Exception:
        from redis import exceptions

        text = str(error)
        if "CNRFENCED" in text:
            return Fenced(
                f"another process has opened {self.place} and writes it from now on; this one must stop. Run one feed "
                "per prefix",
                path=self.keys.prefix,
            )  # fmt: skip
        if "CNRLOST" in text or "CNRUNSETTLED" in text or "CNREMPTY" in text:
            return StorageFailure(
                f"{self.place} is not as this process left it: its server was restarted or emptied, or a batch was "
                "given up; open the sink again",
                path=self.keys.prefix,
            )  # fmt: skip
        if "CNRWIDTH" in text:
            return CorruptStore(
                f"a row of {self.place} has another length than its table's rows: something else writes keys of this "
                "prefix; remove them, and push everything again",
                path=self.keys.prefix,
            )  # fmt: skip
        found = type(error).__name__
        if isinstance(error, exceptions.NoPermissionError):
            return AccessDenied(f"{action} on {self.place} was refused; check the rights of its user", found=found)
        hint = "it is out of memory" if isinstance(error, exceptions.OutOfMemoryError) else "the cause is attached"
        return StorageFailure(f"{action} on {self.place} failed ({found}); {hint}", path=self.keys.prefix, found=found)


class RedisSink:
    """A `RowSink` that keeps rows in Redis (5 or newer, or one that speaks and scripts like it).

    One process writes a prefix: the last that opened it; an older one is `Fenced` with its next step. Readers are any
    number (`RedisRows`), and are never blocked by more than one chunk.

    Memory in Redis, per row: the key (prefix, table and id in text), 12 bytes, the value, and what Redis keeps per
    string key. Rows of a batch are held twice from when they are written until shortly after its commit, and a full
    batch next to the rows it replaces. The server must not evict these keys (``maxmemory-policy noeviction`` or
    ``volatile-*``): a row that was evicted would read as absent.

    Parameters
    ----------
    client
        A `redis.Redis` that returns bytes; it is not closed. `connect` makes one.
    prefix
        Names the sink; also the hash tag of all its keys, so that a cluster keeps them in one slot.
    stored_as
        How values are stored; another choice than what is there means a full batch.
    """

    def __init__(self, client: Redis, prefix: str, *, stored_as: StoredAs = "float32") -> None:
        check_stored_as(stored_as)
        self._at = _Connection(client, prefix)
        self._stored_as: StoredAs = stored_as
        self._token: bytes | None = None
        self._batch: _Batch | None = None

    @classmethod
    def connect(cls, url: str, prefix: str, *, stored_as: StoredAs = "float32", **options: Any) -> RedisSink:
        """Return a sink at a URL such as ``redis://user:password@host:6379/0``; no I/O. Options go to redis-py.

        Raises
        ------
        MissingDependency, BadInput
        """
        return cls(_client(url, options), prefix, stored_as=stored_as)

    @property
    def name(self) -> str:
        """The prefix and the server's address."""
        return self._at.place

    def open(self) -> SinkState | None:
        """Take the prefix over, undo a batch that was cut off, and return what readers see.

        None where nothing was ever committed, or where it is stored in another way than this sink stores.

        Raises
        ------
        StorageFailure, AccessDenied
        BadInput
            The server evicts keys of any kind when its memory is full.
        Fenced
            Yet another process opened it meanwhile.
        """
        self._batch = None
        self._check_eviction()
        keys = self._at.keys
        token, current = self._at.run("OPEN", [keys.named("token"), keys.named("current")], uuid.uuid4().hex.encode())
        self._token = token
        self._settle()
        if current is None:
            return None
        document = _document(self._at.place, current)
        return document.state if document.format == _FORMAT and document.stored_as == self._stored_as else None

    def begin(self, tables: Mapping[str, SinkTable], *, full: bool) -> None:
        """Begin a batch; see `RowSink.begin`. Settles what the batch before left, if anything.

        Raises
        ------
        StorageFailure, Fenced
        """
        for table in tables:
            if "\0" in table:
                raise BadName(f"table name {table!r} holds a NUL", table=table)
        self._settle()
        names = ("token", "current", "pending", "sequence", "written", "garbage")
        keys = [self._at.keys.named(name) for name in names]
        sequence, generation = self._at.run("BEGIN", keys, self._held(), int(full))
        self._batch = _Batch(dict(tables), int(sequence), int(generation), full)

    def put(self, table: str, row_ids: RowIds, values: Float32s) -> None:
        """Write rows of the batch, chunk by chunk; see `RowSink.put`.

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
            self._at.run("PUT", keys, self._held(), batch.mark, chunk, width, stored.tobytes())

    def delete(self, table: str, row_ids: RowIds) -> None:
        """Make rows absent with the batch's commit; see `RowSink.delete`.

        Raises
        ------
        TableNotFound, StorageFailure, Fenced
        """
        batch, _ = self._writing(table)
        for start in range(0, len(row_ids), CHUNK_ROWS):
            ids = row_ids[start : start + CHUNK_ROWS]
            keys = self._keys("token", "pending", "written") + self._at.keys.rows(batch.generation, table, ids)
            chunk = b"" if batch.full else _chunk(table, ids)
            self._at.run("DELETE", keys, self._held(), batch.mark, chunk)

    def commit(self, state: SinkState) -> None:
        """Show the batch to readers in one step, then drop what it replaced; see `RowSink.commit`.

        Raises
        ------
        StorageFailure, Fenced
        """
        batch = self._batch
        if batch is None:
            raise BadInput(f"{self.name} has no batch to commit: begin() one")
        document = _Current(
            format=_FORMAT, stored_as=self._stored_as, store=state.store, branch=state.branch, version=state.version,
            step=state.step, scope=state.scope,
            tables={name: (table.dim, table.num_rows) for name, table in batch.tables.items()},
        )  # fmt: skip
        keys = self._keys("token", "current", "pending", "garbage")
        self._at.run("COMMIT", keys, self._held(), batch.mark, msgspec.json.encode(document))
        self._batch = None
        # The batch is committed whatever happens to the tidying; the next batch begins with it.
        with contextlib.suppress(StorageFailure, Fenced):
            self._settle()

    def abort(self) -> None:
        """Undo the batch as far as the server can be reached; the rest is undone by the next `open` or `begin`."""
        if self._batch is not None:
            self._batch = None
            with contextlib.suppress(StorageFailure, Fenced):
                self._settle()

    def _settle(self) -> None:
        """Give up a pending batch, and leave of every row that batches wrote what `current` shows."""
        first = self._keys("token", "current", "written")
        chunk = self._at.run("DROP", self._keys("token", "pending", "garbage", "written"), self._held())
        # Rows that wait here are of the current generation: a full batch lists none.
        generation = self._generation() if chunk is not None else 0
        while chunk is not None:
            rows = self._at.keys.rows(generation, *_chunk_rows(chunk))
            chunk = self._at.run("SETTLE", first + rows, self._held(), chunk)
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
        return _numbers(current)[0] if current is not None else 0

    def _check_eviction(self) -> None:
        try:
            memory = self._at.call("asking for the eviction policy", partial(self._at.client.info, "memory"))
        except AccessDenied:
            return  # a user without INFO: the documentation asks for the right policy
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if int(memory.get("maxmemory", 0)) > 0 and policy.startswith("allkeys"):
            raise BadInput(
                f"the server of {self.name} evicts any key when its memory is full (maxmemory-policy {policy}), and an "
                "evicted row reads as absent; set noeviction, or volatile-lru for caches beside it",
                path=self._at.keys.prefix, found=policy, expected="noeviction",
            )  # fmt: skip

    def _writing(self, table: str) -> tuple[_Batch, int]:
        if self._batch is None:
            raise BadInput(f"{self.name} has no batch to write to: begin() one", table=table)
        if table not in self._batch.tables:
            raise TableNotFound(
                f"the batch of {self.name} has no table {table!r}; it has {sorted(self._batch.tables)}", table=table
            )
        return self._batch, self._batch.tables[table].dim

    def _keys(self, *names: str) -> list[bytes]:
        return [self._at.keys.named(name) for name in names]

    def _held(self) -> bytes:
        if self._token is None:
            raise BadInput(f"{self.name} is not open: open() it")
        return self._token


@dataclass(frozen=True, slots=True)
class _Batch:
    tables: dict[str, SinkTable]
    sequence: int
    generation: int
    full: bool

    @property
    def mark(self) -> bytes:
        return struct.pack(">Q", self.sequence)


@dataclass(frozen=True, slots=True)
class RedisBatch:
    """Rows of one version.

    Attributes
    ----------
    state
        Which version of which store.
    rows
        By table, values (n, dim) in the order of the ids: float32, or as stored if that was asked for. Rows that are
        not there are zero.
    missing
        By table, bool (n,): which ids the version does not have.
    """

    state: SinkState
    rows: Mapping[str, npt.NDArray[Any]]
    missing: Mapping[str, npt.NDArray[np.bool_]]

    @property
    def version(self) -> int:
        """The version of the store that the rows are of."""
        return self.state.version


class RedisRows:
    """Rows that a `RedisSink` keeps in Redis, for any number of readers; may be used from many threads.

    Parameters
    ----------
    client
        A `redis.Redis` that returns bytes, on the server that the sink writes (a replica may lag, and is as whole).
    prefix
        The sink's.
    """

    def __init__(self, client: Redis, prefix: str) -> None:
        self._at = _Connection(client, prefix)
        self._seen: tuple[int, bytes, _Current] | None = None  # generation, `current`, what it says

    @classmethod
    def connect(cls, url: str, prefix: str, **options: Any) -> RedisRows:
        """Return a reader at a URL; no I/O. Options go to redis-py.

        Raises
        ------
        MissingDependency, BadInput
        """
        return cls(_client(url, options), prefix)

    def state(self) -> SinkState | None:
        """Return what is served now; None where nothing was committed. One request."""
        current = self._at.call("reading current", partial(self._at.client.get, self._at.keys.named("current")))
        return None if current is None else _document(self._at.place, current).state

    def read_many(self, row_ids: Mapping[str, npt.ArrayLike], *, as_stored: bool = False) -> RedisBatch:
        """Return rows of one or several tables, all of one version: one script call, which Redis does in one step.

        Blocks for one request (another where a full batch has just become current). Redis is blocked for about a
        microsecond per row, so very large reads are better split, at the price of several versions.

        Parameters
        ----------
        row_ids
            By table, integers (n,) in any order, repeats allowed.
        as_stored
            Return the bytes as they are stored: float16, bfloat16 bits as uint16, fused rows as uint8.

        Raises
        ------
        TableNotFound
            Nothing was committed yet, or no such table.
        BadRowIds, StorageFailure, CorruptStore
        """
        wanted = {table: _integers(table, ids) for table, ids in row_ids.items()}
        for _ in range(_READ_ATTEMPTS):
            generation, document = self._known()
            missing_tables = set(wanted) - set(document.tables) if document is not None else set()
            asked = {table: ids for table, ids in wanted.items() if document is not None and not missing_tables}
            arguments: list[int] = [generation]
            keys = [self._at.keys.named("current")]
            for table, ids in asked.items():
                assert document is not None
                keys += self._at.keys.rows(generation, table, ids)
                arguments += [len(ids), row_width(document.stored_as, document.tables[table][0])]
            current, *found = self._at.run("READ", keys, *arguments)
            if current is None:
                raise TableNotFound(f"{self._at.place} has no rows: nothing was committed to it yet")
            fresh = self._learn(current)
            if document is None or _numbers(current)[0] != generation:
                continue
            if missing_tables:
                raise TableNotFound(
                    f"{self._at.place} has no table {min(missing_tables)!r}; it has {sorted(document.tables)}",
                    table=min(missing_tables), version=fresh.version,
                )  # fmt: skip
            return _batch(fresh, asked, found, as_stored)
        raise StorageFailure(
            f"{self._at.place} was replaced as a whole {_READ_ATTEMPTS} times while it was read: two sinks push there "
            "in turn?",
            path=self._at.keys.prefix,
        )  # fmt: skip

    def _known(self) -> tuple[int, _Current | None]:
        seen = self._seen
        return (-1, None) if seen is None else (seen[0], seen[2])

    def _learn(self, current: bytes) -> _Current:
        seen = self._seen
        if seen is not None and seen[1] == current:
            return seen[2]
        document = _document(self._at.place, current)
        self._seen = (_numbers(current)[0], current, document)
        return document


def _batch(document: _Current, asked: Mapping[str, RowIds], found: list[bytes], as_stored: bool) -> RedisBatch:
    rows: dict[str, npt.NDArray[Any]] = {}
    missing: dict[str, npt.NDArray[np.bool_]] = {}
    for index, (table, ids) in enumerate(asked.items()):
        dim = document.tables[table][0]
        missing[table] = np.frombuffer(found[2 * index], np.uint8) == 0
        stored = np.frombuffer(found[2 * index + 1], np.uint8).reshape(len(ids), -1 if len(ids) else 1)
        if not len(ids):
            stored = np.empty((0, row_width(document.stored_as, dim)), np.uint8)
        kind = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}.get(document.stored_as, "u1")
        rows[table] = stored.view(kind).copy() if as_stored else rows_from_bytes(document.stored_as, stored, dim)
    return RedisBatch(document.state, rows, missing)


def _integers(table: str, ids: npt.ArrayLike) -> RowIds:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadRowIds(
            f"row ids of table {table!r} must be integers in one dimension, found {array.dtype} of shape {array.shape}",
            table=table, expected="int64 (n,)", found=f"{array.dtype} {array.shape}",
        )  # fmt: skip
    return array.astype(np.int64, copy=False)


def _numbers(current: bytes) -> tuple[int, int]:
    generation, sequence = struct.unpack_from(">QQ", current)
    return int(generation), int(sequence)


def _document(place: str, current: bytes) -> _Current:
    try:
        return _DECODER.decode(current[16:])
    except msgspec.MsgspecError as error:
        raise CorruptStore(
            f"what {place} says of its rows cannot be read: a newer program wrote it, or something else; read it with "
            "that program, or remove its keys and push everything again",
            path=place,
        ) from error  # fmt: skip


def _chunk(table: str, row_ids: RowIds) -> bytes:
    return table.encode() + b"\0" + row_ids.astype("<i8", copy=False).tobytes()


def _chunk_rows(chunk: bytes) -> tuple[str, RowIds]:
    table, _, ids = chunk.partition(b"\0")
    return table.decode(), np.frombuffer(ids, "<i8").astype(np.int64)


def _check_prefix(prefix: str) -> None:
    if not prefix or any(c in "{}\0" for c in prefix):
        raise BadName(f"a prefix has at least one character, and no braces; found {prefix!r}", found=prefix)


def _client(url: str, options: Mapping[str, Any]) -> Redis:
    try:
        import redis
    except ImportError as error:
        raise MissingDependency('rows in Redis need redis-py; pip install "cnr-store[redis]"') from error
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        # The URL may hold a password, so neither it nor what quotes it is shown.
        raise BadInput(
            "the URL of a Redis server begins with redis://, rediss:// or unix://, and has a port that is a number"
        ) from Secrets({}, url).without(error)
