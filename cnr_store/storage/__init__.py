"""Object storage: one contract over local folders and every object store that fsspec supports.

Other rooms use only the names below. Differences between backends (how to create an object exclusively, what an error
means) are hidden inside this package; see the spec's storage requirements.
"""

from __future__ import annotations

from cnr_store.storage.base import (
    MAX_CREATE_BYTES,
    Content,
    CreateOutcome,
    ObjectStat,
    Storage,
    StorageRecipe,
    check_digest,
    fill_inside,
    object_digest,
    read_inside,
    read_verified,
    scatter,
)
from cnr_store.storage.opening import open_storage, reopen_storage, storage_from_filesystem

__all__ = [
    "MAX_CREATE_BYTES",
    "Content",
    "CreateOutcome",
    "ObjectStat",
    "Storage",
    "StorageRecipe",
    "check_digest",
    "fill_inside",
    "object_digest",
    "open_storage",
    "read_inside",
    "read_verified",
    "reopen_storage",
    "scatter",
    "storage_from_filesystem",
]
