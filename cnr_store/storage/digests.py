"""The inventory digest of an object, and reads that are checked against the inventory."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from cnr_store.errors import CorruptObject, MissingObject
from cnr_store.storage.base import Storage


def object_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-128 of the bytes as 32 hex digits. No I/O.

    A CRC would not do: over bytes that end in their own crc32c it is the same constant for every valid chunk.

    >>> object_digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def read_verified(storage: Storage, key: str, *, size_bytes: int, digest: str) -> bytes:
    """Return the object's bytes after checking them against the inventory.

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
    data = storage.read(key, start=0, stop=size_bytes + 1)
    if data is None:
        raise _missing(storage, key, size_bytes)
    if len(data) != size_bytes:
        raise _cut(storage, key, size_bytes, len(data))
    check_digest(data, digest, f"object {key!r} in {storage.url}", key)
    return data


def read_inside(storage: Storage, key: str, start: int, pieces: Sequence[tuple[int, str]]) -> list[bytes]:
    """Return neighbouring pieces of an object, each checked: the first begins at byte ``start``. One request.

    Parameters
    ----------
    pieces
        Size and digest of each; at least one.

    Raises
    ------
    MissingObject, CorruptObject, AccessDenied, StorageFailure
        As `read_verified`. What the object has elsewhere is not looked at.
    """
    size = sum(one for one, _ in pieces)
    data = storage.read(key, start=start, stop=start + size)
    if data is None:
        raise _missing(storage, key, start + size)
    if len(data) != size:
        raise _cut(storage, key, start + size, start + len(data))
    found, at = [], 0
    for length, digest in pieces:
        piece = data if length == size else data[at : at + length]
        what = f"object {key!r} in {storage.url}, bytes {start + at} to {start + at + length},"
        check_digest(piece, digest, what, key)
        found.append(piece)
        at += length
    return found


def check_digest(data: bytes | memoryview, digest: str, what: str, key: str) -> None:
    """Refuse bytes whose digest is another than the inventory says. No I/O.

    Raises
    ------
    CorruptObject
        Names ``what``; its path is ``key``.
    """
    found = object_digest(data)
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
