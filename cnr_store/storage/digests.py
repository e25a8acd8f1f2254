"""The inventory digest of an object, and reads that are checked against the inventory."""

from __future__ import annotations

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
        raise MissingObject(
            f"object {key!r} in {storage.url} is missing; the inventory says {size_bytes} bytes. Run `cnr verify`",
            path=key,
            expected=size_bytes,
        )
    if len(data) != size_bytes:
        found = f"{len(data)} bytes" if len(data) < size_bytes else f"more than {size_bytes} bytes"
        raise CorruptObject(
            f"object {key!r} in {storage.url} has {found}, the inventory says {size_bytes}; it was cut short "
            "or replaced. Run `cnr verify`",
            path=key,
            expected=size_bytes,
            found=len(data),
        )
    found_digest = object_digest(data)
    if found_digest != digest:
        raise CorruptObject(
            f"object {key!r} in {storage.url} has digest {found_digest}, the inventory says {digest}; "
            "its bytes were changed or swapped. Run `cnr verify`",
            path=key,
            expected=digest,
            found=found_digest,
        )
    return data
