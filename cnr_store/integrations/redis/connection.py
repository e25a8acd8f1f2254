"""One client of one prefix in Redis: its keys, its scripts, the document in `current`, and error conversion."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cnr_store.errors import AccessDenied, BadInput, BadName, CorruptStore, Fenced, MissingDependency, StorageFailure
from cnr_store.format.documents import loads
from cnr_store.integrations.redis import scripts
from cnr_store.serving.sinks.protocol import SinkState
from cnr_store.serving.sinks.stored_rows import StoredAs
from cnr_store.storage.redaction import Secrets
from cnr_store.types import RowIds

if TYPE_CHECKING:
    from redis import Redis

FORMAT = 1
HEAD_BYTES = 16
"""Bytes of the two numbers at the start of `current`, which `numbers_of` returns."""

TIMEOUT_S = 10.0
"""Seconds that a client of `connected` waits for Redis to accept a connection, and to reply."""

_SECRET_OPTIONS = ("password", "username")


class CurrentGeneration(msgspec.Struct, frozen=True):
    """The document after the two numbers of `current`: the state that readers see, and how it is stored."""

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
        """The state that `RowSink.open` returns."""
        return SinkState(self.store, self.branch, self.version, self.step, self.scope)


# Created at import, as in documents.py: two threads that create it at once crash the interpreter.
_DECODER = msgspec.json.Decoder(CurrentGeneration)


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds the names of a prefix's keys."""

    prefix: str

    @property
    def root(self) -> bytes:
        """The common start of all keys."""
        return b"{%s}:" % self.prefix.encode()

    def named(self, name: str) -> bytes:
        """Return the key that `scripts` lists under this name."""
        return self.root + name.encode()

    def rows(self, generation: int, table: str, row_ids: RowIds) -> list[bytes]:
        """Return the keys of rows, in the order of the ids."""
        start = self.root + b"%d:%s:" % (generation, table.encode())
        return [start + b"%d" % row_id for row_id in row_ids.tolist()]

    def pattern(self, generation: int) -> bytes:
        """Return a glob that matches only the rows of one generation."""
        escaped = b"".join(b"\\" + bytes([c]) if c in b"*?[]^-\\" else bytes([c]) for c in self.root)
        return escaped + b"%d:*" % generation


class Connection:
    """One client of one prefix: runs scripts, and converts errors of the client to errors of this library."""

    def __init__(self, client: Redis, prefix: str) -> None:
        _check_prefix(prefix)
        options: Mapping[str, Any] = client.connection_pool.connection_kwargs
        if options.get("decode_responses"):
            raise BadInput("a client for rows must return bytes: create it without decode_responses=True")
        self.client: Any = client
        self.keys = Keys(prefix)
        self._secrets = Secrets({name: options.get(name) for name in _SECRET_OPTIONS})
        place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self.place = f"{prefix!r} at redis {place}"
        self._scripts = {
            name: client.register_script(getattr(scripts, name))
            for name in ("OPEN", "DROP", "SETTLE", "BEGIN", "PUT", "DELETE", "COMMIT", "CLEAR", "READ")
        }

    def run(self, script: str, keys: list[bytes], *arguments: bytes | int) -> Any:
        """Run a script, and load it if the server lacks it (after a restart, or if scripts were flushed)."""
        return self.call(f"running {script.lower()}", lambda: self._scripts[script](keys=keys, args=list(arguments)))

    def call(self, action: str, do: Callable[[], Any]) -> Any:
        """Call ``do`` and convert its errors.

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
                + ("check its user and password" if denied else "is it running and reachable?"),
                path=self.keys.prefix, found=type(error).__name__,
            ) from self._secrets.without(error)  # fmt: skip

    def _refused(self, action: str, error: Exception) -> Exception:
        from redis import exceptions

        text = str(error)
        if "CNRFENCED" in text:
            return Fenced(
                f"another process has opened {self.place} and is its writer now; this one must stop. Run one feed per "
                "prefix",
                path=self.keys.prefix,
            )  # fmt: skip
        if "CNRLOST" in text or "CNRUNSETTLED" in text or "CNREMPTY" in text:
            return StorageFailure(
                f"{self.place} has another state than this process wrote: its server was restarted or emptied, or a "
                "batch was dropped; open the sink again",
                path=self.keys.prefix,
            )  # fmt: skip
        found = type(error).__name__
        if isinstance(error, exceptions.NoPermissionError):
            return AccessDenied(f"{action} on {self.place} was refused; check the permissions of its user", found=found)
        hint = "; it is out of memory" if isinstance(error, exceptions.OutOfMemoryError) else ""
        return StorageFailure(f"{action} on {self.place} failed ({found}){hint}", path=self.keys.prefix, found=found)


def numbers_of(current: bytes) -> tuple[int, int]:
    """Return the generation and the sequence in `current`.

    Raises
    ------
    CorruptStore
        It is too short to contain them.
    """
    if len(current) < HEAD_BYTES:
        raise CorruptStore(
            f"`current` of the rows in Redis has {len(current)} bytes, expected at least {HEAD_BYTES}: another program "
            "wrote it; delete the keys of the prefix and push everything again",
            expected=HEAD_BYTES, found=len(current),
        )  # fmt: skip
    generation, sequence = struct.unpack_from(">QQ", current)
    return int(generation), int(sequence)


def document_of(place: str, current: bytes) -> CurrentGeneration:
    """Return the document in `current`.

    Raises
    ------
    CorruptStore
        It cannot be read, or has another format.
    """
    cause: Exception | None = None
    try:
        document = loads(current[HEAD_BYTES:], _DECODER)
        if document.format == FORMAT:
            return document
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        cause = error
    raise CorruptStore(
        f"the state of {place} cannot be read: a newer program wrote it, or another one; read it with that program, "
        "or delete the keys of the prefix and push everything again",
        path=place,
    ) from cause  # fmt: skip


def _check_prefix(prefix: str) -> None:
    if not prefix or any(c in "{}\0" for c in prefix):
        raise BadName(f"a prefix needs at least one character and no braces; found {prefix!r}", found=prefix)


def connected(url: str, options: Mapping[str, Any]) -> Redis:
    """Return a client of the server at a URL; no I/O.

    Raises
    ------
    MissingDependency, BadInput
    """
    try:
        import redis
    except ImportError as error:
        raise MissingDependency('rows in Redis need redis-py; pip install "cnr-store[redis]"') from error
    try:
        return redis.Redis.from_url(
            url, **{"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, **options}
        )  # fmt: skip
    except ValueError as error:
        # The URL may contain a password, so neither it nor a text that quotes it is shown.
        raise BadInput(
            "the URL of a Redis server must begin with redis://, rediss:// or unix://, and its port must be a number"
        ) from Secrets({}, url).without(error)
