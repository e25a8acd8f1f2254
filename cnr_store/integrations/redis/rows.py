"""Reads the rows of a `RedisSink` by one script call, so all have one version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cnr_store.errors import BadRowIds, CorruptStore, StorageFailure, TableNotFound
from cnr_store.integrations.redis.connection import Connection, CurrentGeneration, connected, document_of, numbers_of
from cnr_store.serving.rows.lookups import checked_ids
from cnr_store.serving.sinks.protocol import SinkState
from cnr_store.serving.sinks.stored_rows import row_width, rows_from_bytes
from cnr_store.types import RowIds

if TYPE_CHECKING:
    from redis import Redis

MOST_ROWS = 1_000_000
"""Maximum number of ids of one read: Redis accepts few more arguments."""

_READ_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class RedisBatch:
    """Rows of one version.

    Attributes
    ----------
    state
        The version and its store.
    rows
        By table, values (n, dim) in the order of the ids: float32, or as stored with ``as_stored``. Absent rows are
        zero.
    missing
        By table, bool (n,): the ids that the version does not have.
    """

    state: SinkState
    rows: Mapping[str, npt.NDArray[Any]]
    missing: Mapping[str, npt.NDArray[np.bool_]]

    @property
    def version(self) -> int:
        """The store version of the rows."""
        return self.state.version


class RedisRows:
    """Reads the rows of a `RedisSink`. May be used from many threads; any number of processes may read.

    Parameters
    ----------
    client
        A `redis.Redis` that returns bytes, for the sink's server or a replica (which may lag, but shows whole batches).
    prefix
        The sink's prefix.
    """

    def __init__(self, client: Redis, prefix: str) -> None:
        self._at = Connection(client, prefix)
        self._seen: tuple[int, bytes, CurrentGeneration] | None = None  # generation, `current`, its document

    @classmethod
    def connect(cls, url: str, prefix: str, **options: Any) -> RedisRows:
        """Return a reader at a URL; no I/O. Passes options to redis-py.

        Without ``socket_timeout`` and ``socket_connect_timeout`` a server that does not answer in 10 s is a failure.

        Raises
        ------
        MissingDependency, BadInput
        """
        return cls(connected(url, options), prefix)

    def state(self) -> SinkState | None:
        """Return the visible state; None if nothing was committed. One request."""
        current = self._at.call("reading current", partial(self._at.client.get, self._at.keys.named("current")))
        return None if current is None else document_of(self._at.place, current).state

    def read_many(self, row_ids: Mapping[str, npt.ArrayLike], *, as_stored: bool = False) -> RedisBatch:
        """Return rows of one or several tables, all of one version, by one atomic script call.

        Blocks for one request (two if a full batch has just become current). Redis is blocked for about a microsecond
        per row. So split very large reads; the parts may then have different versions.

        Parameters
        ----------
        row_ids
            By table, integers (n,) in any order, repeats allowed; at most a million in all.
        as_stored
            Return the bytes as they are stored: float16, bfloat16 bits as uint16, fused rows as uint8.

        Raises
        ------
        TableNotFound
            Nothing was committed, or there is no such table.
        BadRowIds, StorageFailure, CorruptStore
        """
        wanted = {table: checked_ids(ids, table) for table, ids in row_ids.items()}
        count = sum(map(len, wanted.values()))
        if count > MOST_ROWS:
            raise BadRowIds(
                f"a read of {count} rows is too large for one call: split it", expected=MOST_ROWS, found=count
            )
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
                raise TableNotFound(f"{self._at.place} has no rows: nothing was committed; push a batch first")
            fresh = self._learn(current)
            if document is None or numbers_of(current)[0] != generation or not _are_stored_alike(document, fresh):
                continue
            if missing_tables:
                raise TableNotFound(
                    f"{self._at.place} has no table {min(missing_tables)!r}; it has {sorted(document.tables)}",
                    table=min(missing_tables), version=fresh.version,
                )  # fmt: skip
            if len(found) != 2 * len(asked):
                raise CorruptStore(
                    f"row {found[0]!r} of {self._at.place} has another length than its table's rows: another program "
                    "writes keys of this prefix; delete them and push everything again",
                    path=self._at.keys.prefix,
                )  # fmt: skip
            return _batch(fresh, asked, found, as_stored)
        raise StorageFailure(
            f"{self._at.place} was replaced {_READ_ATTEMPTS} times while it was read: do two sinks push to it? "
            "run only one",
            path=self._at.keys.prefix,
        )  # fmt: skip

    def close(self) -> None:
        """Close the client's connections; the next read reopens them."""
        self._at.client.close()

    def _known(self) -> tuple[int, CurrentGeneration | None]:
        seen = self._seen
        return (-1, None) if seen is None else (seen[0], seen[2])

    def _learn(self, current: bytes) -> CurrentGeneration:
        seen = self._seen
        if seen is not None and seen[1] == current:
            return seen[2]
        document = document_of(self._at.place, current)
        self._seen = (numbers_of(current)[0], current, document)
        return document


def _are_stored_alike(a: CurrentGeneration, b: CurrentGeneration) -> bool:
    """Return whether rows of the two are read alike; a restored server may reuse a generation's number."""
    return (a.stored_as, a.tables) == (b.stored_as, b.tables)


def _batch(document: CurrentGeneration, asked: Mapping[str, RowIds], found: list[bytes], as_stored: bool) -> RedisBatch:
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
