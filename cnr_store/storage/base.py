"""The storage contract: what a store needs from object storage, and reads that are checked against an inventory.

`Storage` has the code that all backends share (key grammar, argument checks, the capability probe). Backends implement
the underscored methods. Nothing here uses fsspec or the operating system, or knows of tables.
"""

from __future__ import annotations

import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import xxhash

from cnr_store.errors import BadInput, BadName, CorruptObject, MissingObject, StorageFailure, UnsafeBackend
from cnr_store.storage.copies import ObjectCopies

logger = logging.getLogger(__name__)

MAX_CREATE_BYTES = 64 * 1024
"""Largest object that may be created exclusively: records stay single-part PUTs everywhere (CNR-STO-4)."""

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""
Content = Buffer | Sequence[Buffer]
"""The bytes of an object, in one piece or in several that follow one another."""

PROBE_FOLDER = "_probe"
TEMPORARY_PREFIX = ".tmp-"
_PART = rf"(?!\.+(?:/|\Z))(?!{re.escape(TEMPORARY_PREFIX)})[A-Za-z0-9._%-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PROBE_ATTEMPTS = 3
_UNSAFE_ADVICE = (
    "commits would not be safe there. Use another backend, or, if nobody else ever writes, create and open the store "
    "with unsafe_single_writer=True"
)


class CreateOutcome(Enum):
    """The known result of one attempt at an exclusive create."""

    CREATED = "created"
    """This attempt created the object; no read-back is needed."""
    EXISTS = "exists"
    """The key exists, maybe from an earlier attempt of this caller whose reply was lost: read back."""
    UNDECIDED = "undecided"
    """The backend refused to decide a race: read back; if the key is absent, send the same bytes again."""
    UNKNOWN = "unknown"
    """The object may be created, now or later: read back, then send the same bytes again or stop."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One listed object: its key below the root, its size, and the backend's modification time if known."""

    key: str
    size_bytes: int
    modified_ms: int | None


@dataclass(frozen=True, slots=True)
class StorageRecipe:
    """The arguments of `open_storage`, so that another process can open the same storage.

    It contains credentials: it is passed to workers, never stored, and its repr shows neither place nor options.
    """

    place: str = field(repr=False)
    storage_options: Mapping[str, Any] = field(repr=False)
    fsync: bool
    unsafe_single_writer: bool


def is_key(key: str) -> bool:
    """Return whether ``key`` is valid: parts of ``[A-Za-z0-9._%-]`` joined by '/', none only of dots."""
    return _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return ``key``; raise `BadName` if it is not a valid key, so that no key can leave the root."""
    if not is_key(key):
        raise BadName(
            f"{key[:120]!r} is not a storage key; expected relative parts of [A-Za-z0-9._%-] joined by '/'",
            found=key[:120],
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the folder that ``prefix`` names, without a trailing '/'; the empty string is the root."""
    return check_key(prefix.removesuffix("/")) if prefix else ""


class Storage(ABC):
    """One root and the objects below it. Thread-safe; every call blocks.

    Attributes
    ----------
    url
        The root without credentials and options, for messages.
    is_exclusive
        False if the storage was opened with ``unsafe_single_writer``.
    max_create_bytes
        Largest object that `create` accepts, in bytes.
    is_remote
        Whether requests wait for a network, so that concurrent requests are faster.
    recipe
        How another process opens the same storage; None if it cannot (memory, or the caller's file system object).
    copies
        Objects in memory: those that are put are recorded there, and checked reads look there first; None for none.
    """

    max_create_bytes: ClassVar[int] = MAX_CREATE_BYTES
    is_remote: ClassVar[bool] = False

    def __init__(self, url: str, *, is_exclusive: bool = True) -> None:
        self.url = url
        self.is_exclusive = is_exclusive
        self.recipe: StorageRecipe | None = None
        self.copies: ObjectCopies | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def read(self, key: str, *, start: int | None = None, stop: int | None = None) -> bytes | None:
        """Return the object's bytes in [start, stop), clipped to its size, or None if it does not exist.

        One request, never answered from a cache; never a listing.

        Raises
        ------
        BadName, BadInput
            The key or the range is invalid.
        AccessDenied, StorageFailure
            The backend refused or failed; ``__cause__`` is its error.
        """
        check_key(key)
        first = 0 if start is None else start
        if first < 0 or (stop is not None and stop < first):
            raise BadInput(
                f"range [{start}, {stop}) of {key!r} is not one: expected 0 <= start <= stop",
                path=key,
                found=(start, stop),
            )
        if stop is not None and stop == first:
            # HTTP has no empty range: read one byte to check that the object exists.
            return None if self._read(key, first, first + 1) is None else b""
        return self._read(key, first, stop)

    def read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        """Fill writable buffers, one after the other, with the object's bytes from ``start`` on. One request.

        Returns how many bytes there were, fewer than the buffers hold if the object ends before; None if it does not
        exist. Raises as `read`.
        """
        check_key(key)
        return self._read_into(key, start, buffers)

    def _read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        data = self.read(key, start=start, stop=start + sum(map(len, buffers)))
        return None if data is None else scatter(data, buffers)

    def read_document(self, key: str, limit_bytes: int) -> bytes | None:
        """Return a document's bytes, or None if it does not exist; raise if it exceeds ``limit_bytes``.

        One request. Memory: at most ``limit_bytes`` + 1 bytes, whatever the size of the stored object.

        Raises
        ------
        CorruptObject
            It is larger, so it is no document of the format.
        BadName, AccessDenied, StorageFailure
            As for `read`.
        """
        data = self.read(key, start=0, stop=limit_bytes + 1)
        if data is not None and len(data) > limit_bytes:
            raise CorruptObject(
                f"{key!r} in {self.url} has more than {limit_bytes} bytes, which no such document has; something else "
                "wrote it. Run `cnr verify`",
                path=key,
                expected=limit_bytes,
                found=len(data),
            )
        return data

    def put_document(self, key: str, data: bytes, limit_bytes: int) -> None:
        """Write a document that `read_document` with the same limit accepts.

        Raises
        ------
        BadInput
            It is larger; nothing was written.
        BadName, AccessDenied, StorageFailure
            As for `put`.
        """
        if len(data) > limit_bytes:
            raise BadInput(
                f"{key!r} would have {len(data)} bytes, and readers take at most {limit_bytes}; store less in it",
                path=key,
                expected=limit_bytes,
                found=len(data),
            )
        self.put(key, data)

    def put(self, key: str, data: Content) -> None:
        """Create or overwrite an object; readers see the old bytes or the new, never a mixture.

        ``data`` is not referenced afterwards. `sync_folders` makes the names of local files durable.

        Raises
        ------
        BadName
            The key is invalid.
        AccessDenied, StorageFailure
            The backend refused or failed; the object has its old or its new content.
        """
        check_key(key)
        buffers = [_flat(data)] if isinstance(data, Buffer) else data
        self._put(key, buffers)
        if self.copies is not None:
            self.copies.record(key, buffers)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        """Try once to create an object that must not exist; return what is known about the attempt.

        All attempts on one key, from any number of processes, have at most one winner. Only `CREATED` is proof of
        success; after every other outcome the caller has to read the key and compare.

        Raises
        ------
        BadName, BadInput
            The key is invalid, or the object is larger than `max_create_bytes`; nothing was sent.
        AccessDenied
            The backend refused the credentials. A retry inside its client may have hidden an earlier success, so staged
            data must be kept.
        UnsafeBackend
            The backend has no exclusive create; nothing was written.
        StorageFailure
            This attempt created nothing: for example, the disk was full before the object had its name.
        """
        check_key(key)
        if len(data) > self.max_create_bytes:
            raise BadInput(
                f"{key!r} would have {len(data)} bytes; an exclusively created object has at most "
                f"{self.max_create_bytes}",
                path=key,
                expected=self.max_create_bytes,
                found=len(data),
            )
        outcome, error = self._create(key, bytes(data))
        if error is not None:
            # Log only the type: the text of a backend error may contain options.
            logger.debug("create %s in %s: %s (%s)", key, self.url, outcome.value, type(error).__name__)
        return outcome

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """Yield every object below the folder ``prefix`` (recursive, '' is the root), sorted within folders.

        Skips names that are no valid keys (`is_key`), such as leftovers of local writes. Objects that are written or
        deleted meanwhile may or may not appear. Raises as `read` does.
        """
        return self._list_objects(check_prefix(prefix))

    def list_folders(self, prefix: str) -> list[str]:
        """Return the sorted names, one level down, of the folders below ``prefix`` that contain objects.

        Includes symbolic links, which may point to a folder; their content cannot be read or listed (`list_links`).
        """
        return self._list_folders(check_prefix(prefix))

    def list_links(self, prefix: str) -> list[str]:
        """Return the keys of symbolic links at or below ``prefix``; only local folders can have them.

        Reading, writing or listing through a link raises `StorageFailure`; deleting its key deletes the link.

        Raises
        ------
        BadName, AccessDenied, StorageFailure
        """
        check_prefix(prefix)
        return []

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; ignore absent ones. After a failure any of the others may be deleted: retry.

        Raises
        ------
        BadName
            One of the keys is invalid; nothing was deleted.
        AccessDenied, StorageFailure
            At least one object could not be deleted.
        """
        self._delete([check_key(key) for key in keys])

    def sync_folders(self, keys: Iterable[str]) -> None:
        """Make the folder entries of these keys durable: sync each folder from them up to the root once.

        Does nothing on backends where a finished `put` is durable.
        """
        for key in keys:
            check_key(key)

    def sweep(
        self,
        prefix: str = "",
        *,
        older_than_s: float = 86_400.0,  # noqa: ARG002 - for backends that can have leftovers
    ) -> int:
        """Delete leftovers of interrupted writes below ``prefix``; return how many."""
        check_prefix(prefix)
        return 0

    def probe(self) -> None:
        """Create one object twice exclusively, check that the second attempt is refused, and delete it.

        Raises
        ------
        UnsafeBackend
            The second attempt was not refused, or changed the content.
        AccessDenied, StorageFailure
            The object could not be written or read.
        """
        key = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
        first, second = f"first {key}".encode(), f"second {key}".encode()
        try:
            self._probe_create(key, first, refused=False)
            self._probe_create(key, second, refused=True)
            found = self.read(key, stop=len(first) + 1)
            if found != first:
                raise UnsafeBackend(
                    f"{self.url} changed an object that a refused create must leave alone; {_UNSAFE_ADVICE}",
                    path=key,
                )
        finally:
            try:
                self._delete([key])
            except StorageFailure as error:
                # A writer may lack the right to delete; a remaining probe object is harmless.
                logger.debug("probe object %s in %s was left behind: %s", key, self.url, error)

    def _probe_create(self, key: str, data: bytes, *, refused: bool) -> None:
        outcome, error = CreateOutcome.UNKNOWN, None
        for _ in range(_PROBE_ATTEMPTS):
            outcome, error = self._create(key, data)
            if refused and outcome is CreateOutcome.EXISTS:
                return
            if outcome is CreateOutcome.CREATED:
                break
            if not refused and self.read(key, stop=len(data) + 1) == data:
                return
        if refused and outcome is not CreateOutcome.UNDECIDED:
            raise UnsafeBackend(
                f"{self.url} did not refuse to create an object that exists (outcome: {outcome.value}); "
                f"{_UNSAFE_ADVICE}",
                path=key,
                expected=CreateOutcome.EXISTS.value,
                found=outcome.value,
            ) from error
        if not refused and outcome is not CreateOutcome.CREATED:
            raise StorageFailure(
                f"{self.url} did not take a probe object in {_PROBE_ATTEMPTS} attempts (outcome: "
                f"{outcome.value}); check that the root is writable and not full",
                path=key,
                found=outcome.value,
            ) from error

    @abstractmethod
    def _read(self, key: str, start: int, stop: int | None) -> bytes | None: ...

    @abstractmethod
    def _put(self, key: str, data: Sequence[Buffer]) -> None: ...

    @abstractmethod
    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        """Return the outcome and the backend's error, if any (without options, so usable as a cause)."""

    @abstractmethod
    def _list_objects(self, folder: str) -> Iterator[ObjectStat]: ...

    @abstractmethod
    def _list_folders(self, folder: str) -> list[str]: ...

    @abstractmethod
    def _delete(self, keys: list[str]) -> None: ...


def _flat(data: Buffer) -> Buffer:
    """Return the bytes of a buffer, whatever the size and distance of its items."""
    if not isinstance(data, memoryview):
        return data
    return data.cast("B") if data.c_contiguous and data.nbytes else bytes(data)


def scatter(data: Buffer, buffers: Sequence[memoryview]) -> int:
    """Copy bytes into buffers, one after the other; returns how many. No I/O."""
    at, data = 0, memoryview(data)
    for buffer in buffers:
        piece = data[at : at + len(buffer)]
        buffer[: len(piece)] = piece
        at += len(piece)
    return at


def object_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-128 of the bytes as 32 hex digits. No I/O.

    A CRC would not do: over bytes that end in their own crc32c it is the same constant for every valid chunk.

    >>> object_digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def content_digest(content: Content) -> str:
    """Return the `object_digest` of an object that may be in pieces. No I/O."""
    if isinstance(content, Buffer):
        return object_digest(content)
    digest = xxhash.xxh3_128()
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()


def read_verified(storage: Storage, key: str, *, size_bytes: int, digest: str) -> bytes | memoryview:
    """Return the object's bytes after checking them against the inventory: a copy in memory, else the stored ones.

    Blocks. Memory: at most ``size_bytes`` + 1 bytes, whatever the size of the stored object.

    Raises
    ------
    MissingObject
        The object does not exist.
    CorruptObject
        Its size or digest differs from the inventory.
    AccessDenied, StorageFailure
        The backend refused or failed.
    """
    copied = _read_copy(storage, key, 0, [(size_bytes, digest)])
    if copied is not None:
        return copied[0]
    data = storage.read(key, start=0, stop=size_bytes + 1)
    if data is None:
        raise _missing(storage, key, size_bytes)
    if len(data) != size_bytes:
        raise _cut(storage, key, size_bytes, len(data))
    check_digest(data, digest, f"object {key!r} in {storage.url}", key)
    return data


def read_inside(storage: Storage, key: str, start: int, pieces: Sequence[tuple[int, str]]) -> list[bytes | memoryview]:
    """Return neighbouring pieces of an object, each checked: the first begins at byte ``start``. At most one request.

    Parameters
    ----------
    pieces
        Size and digest of each; at least one.

    Raises
    ------
    MissingObject, CorruptObject, AccessDenied, StorageFailure
        As `read_verified`. What the object has elsewhere is not looked at.
    """
    copied = _read_copy(storage, key, start, pieces)
    if copied is not None:
        return copied
    size = sum(one for one, _ in pieces)
    data = storage.read(key, start=start, stop=start + size)
    if data is None:
        raise _missing(storage, key, start + size)
    if len(data) != size:
        raise _cut(storage, key, start + size, start + len(data))
    return _checked_pieces(data, start, pieces, f"object {key!r} in {storage.url}", key)


def fill_inside(storage: Storage, key: str, start: int, pieces: Sequence[tuple[Sequence[memoryview], str]]) -> None:
    """Fill memory with neighbouring pieces of an object, each checked: as `read_inside`, without a copy of its own.

    Parameters
    ----------
    pieces
        The buffers that get the bytes of each, one after the other, and its digest. After an error they hold anything.

    Raises
    ------
    MissingObject, CorruptObject, AccessDenied, StorageFailure
        As `read_verified`.
    """
    buffers = [buffer for filled, _ in pieces for buffer in filled]
    sizes = [sum(map(len, filled)) for filled, _ in pieces]
    size = sum(sizes)
    copied = _read_copy(storage, key, start, [(one, digest) for one, (_, digest) in zip(sizes, pieces, strict=True)])
    if copied is not None:
        for data, (filled, _) in zip(copied, pieces, strict=True):
            scatter(data, filled)
        return
    found = storage.read_into(key, start, buffers)
    if found is None:
        raise _missing(storage, key, start + size)
    if found != size:
        raise _cut(storage, key, start + size, start + found)
    at = start
    for length, (filled, digest) in zip(sizes, pieces, strict=True):
        what = f"object {key!r} in {storage.url}, bytes {at} to {at + length},"
        check_digest(filled, digest, what, key)
        at += length


def _checked_pieces(
    data: bytes | memoryview, start: int, pieces: Sequence[tuple[int, str]], what: str, key: str
) -> list[bytes | memoryview]:
    found: list[bytes | memoryview] = []
    at = 0
    for length, digest in pieces:
        piece = data if length == len(data) else data[at : at + length]
        check_digest(piece, digest, f"{what}, bytes {start + at} to {start + at + length},", key)
        found.append(piece)
        at += length
    return found


def _read_copy(
    storage: Storage, key: str, start: int, pieces: Sequence[tuple[int, str]]
) -> list[bytes | memoryview] | None:
    """The pieces from a copy in memory; None if there is none, or it is not what the inventory says."""
    if storage.copies is None:
        return None
    size = sum(one for one, _ in pieces)
    data = storage.copies.read(key, start, start + size)
    if data is None:
        return None
    try:
        return _checked_pieces(data, start, pieces, f"the copy in memory of object {key!r} in {storage.url}", key)
    except CorruptObject as error:
        storage.copies.refuse(key, size)
        logger.warning("%s; the stored object is read instead", error)
        return None


def check_digest(data: Content, digest: str, what: str, key: str) -> None:
    """Refuse bytes whose digest is another than the inventory says. No I/O.

    Raises
    ------
    CorruptObject
        Names ``what``; its path is ``key``.
    """
    found = content_digest(data)
    if found != digest:
        raise CorruptObject(
            f"{what} has digest {found}, the inventory says {digest}; its bytes were changed or swapped. "
            "Run `cnr verify`",
            path=key, expected=digest, found=found,
        )  # fmt: skip


def _missing(storage: Storage, key: str, size_bytes: int) -> MissingObject:
    return MissingObject(
        f"object {key!r} in {storage.url} is missing; the inventory says {size_bytes} bytes. Run `cnr verify`",
        path=key, expected=size_bytes,
    )  # fmt: skip


def _cut(storage: Storage, key: str, expected: int, found: int) -> CorruptObject:
    has = f"{found} bytes" if found < expected else f"more than {expected} bytes"
    return CorruptObject(
        f"object {key!r} in {storage.url} has {has}, the inventory says {expected}; it was cut short or replaced. "
        "Run `cnr verify`",
        path=key, expected=expected, found=found,
    )  # fmt: skip
