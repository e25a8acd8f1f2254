"""Where objects live: one contract over local folders and every object store that fsspec reaches.

The log and the segments know only what is listed here. What differs between backends (how to create an
object exclusively, what an error means) stays inside this package; see the spec's storage requirements.
"""

from __future__ import annotations

from cnr_store.storage.base import MAX_CREATE_BYTES, CreateOutcome, ObjectStat, Storage, StorageRecipe
from cnr_store.storage.digests import object_digest, read_verified
from cnr_store.storage.opening import open_storage, reopen_storage, storage_from_filesystem

__all__ = [
    "MAX_CREATE_BYTES",
    "CreateOutcome",
    "ObjectStat",
    "Storage",
    "StorageRecipe",
    "object_digest",
    "open_storage",
    "read_verified",
    "reopen_storage",
    "storage_from_filesystem",
]
