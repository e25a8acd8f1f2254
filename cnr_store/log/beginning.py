"""Decide what an empty first position means: a new store, or a lost log (spec, CNR-DOC-7, CNR-BRA-3).

A lost log is never started again: the objects beside it may be all that is left of acknowledged saves. So only a writer
may start a log, and only in a root without the folders that a started log leaves. Nothing is written here.
"""

from __future__ import annotations

from cnr_store.errors import CnrStoreError, CorruptStore, StoreExists, VersionNotFound
from cnr_store.format.layout import BRANCHES, COMMITS, DATA, HINT, IDENTITY, RELAY, STATE, commit_key
from cnr_store.storage import Storage

_REMAINS = frozenset(folder.partition("/")[0] for folder in (COMMITS, HINT, DATA, STATE, BRANCHES))
"""Folders of the root that contain objects only after a log was started."""


def has_begun(storage: Storage, prefix: str = "", first: int = 0) -> bool:
    """Return whether the first position of a log exists. One request."""
    return storage.read(commit_key(first, prefix), stop=1) is not None


def check_begun(storage: Storage, prefix: str = "", first: int = 0) -> None:
    """Check that a log has its first record. One request, and three more before it raises.

    Raises
    ------
    VersionNotFound
        The creation of the store ended before the first record: nothing is lost.
    CorruptStore
        The log was started, and it or its first records are lost: nothing may be written or deleted.
    AccessDenied, StorageFailure
    """
    if not has_begun(storage, prefix, first):
        error = _why_empty(storage, prefix, first)
        if not has_begun(storage, prefix, first):  # else its creator has just written it
            raise error


def remains(storage: Storage) -> list[str]:
    """Return the folders that only a started log leaves; none before the first record. One listing."""
    return sorted(_REMAINS.intersection(storage.list_folders("")))


def check_vacant(storage: Storage) -> None:
    """Check that the root has no store and no remains of one. One listing and two GETs.

    Raises
    ------
    StoreExists, AccessDenied, StorageFailure
    """
    if storage.read(IDENTITY, stop=1) is not None:
        raise StoreExists(f"{storage.url} already contains a store; open it", path=storage.url)
    found = [f"{name}/" for name in remains(storage)]
    if storage.read(RELAY, stop=1) is not None:
        found.append(RELAY)
    if found:
        raise StoreExists(
            f"{storage.url} has no {IDENTITY}, but contains {', '.join(found)}: remains of a store, or a relay or copy "
            "that is being made; run `cnr relay` or `cnr copy` again to finish it, restore the missing objects from a "
            "backup, or choose an empty folder",
            path=storage.url, found=found,
        )  # fmt: skip


def _why_empty(storage: Storage, prefix: str, first: int) -> CnrStoreError:
    key = commit_key(first, prefix)
    if first > 0:
        return CorruptStore(
            f"position {first} of the relay {storage.url}, its first one, is empty: part of it was deleted; create the "
            "relay again in an empty folder",
            version=first, path=key,
        )  # fmt: skip
    if prefix:
        return CorruptStore(
            f"log position 0 below {prefix} is empty, but a branch gets it before its name: the log of the branch, or "
            "its first record, was deleted; restore it from a backup, or drop the branch",
            version=0, path=key,
        )  # fmt: skip
    found = remains(storage)
    if not found:
        return VersionNotFound(
            f"nothing was saved to {storage.url} yet: its creation ended before the first record, which the next "
            "writer writes",
            version=0,
        )  # fmt: skip
    return CorruptStore(
        f"log position 0 is empty, but {storage.url} contains {', '.join(f'{name}/' for name in found)}: the commit "
        f"log or its first records (of a relay: {RELAY}) were deleted. Without them the saved versions are unknown, so "
        "nothing is written or deleted here; restore them from a backup",
        version=0, path=key, found=found,
    )  # fmt: skip
