"""What an empty first log position means: nothing was saved yet, or the log is lost (spec, CNR-DOC-7, CNR-BRA-3).

A log that was begun once is never begun anew: whatever stands beside it may be all that is left of acknowledged saves.
So only who writes asks to begin one, and only where the root holds nothing that a begun log leaves. No writes here.
"""

from __future__ import annotations

from cnr_store.errors import CnrStoreError, CorruptStore, StoreExists, VersionNotFound
from cnr_store.format.layout import BRANCHES, COMMITS, DATA, HINT, IDENTITY, RELAY, STATE, commit_key
from cnr_store.storage import Storage

_REMAINS = frozenset(folder.partition("/")[0] for folder in (COMMITS, HINT, DATA, STATE, BRANCHES))
"""Folders of the root that hold something only once a log was begun."""


def has_begun(storage: Storage, prefix: str = "", first: int = 0) -> bool:
    """Return whether the first position of a log is there. One request."""
    return storage.read(commit_key(first, prefix), stop=1) is not None


def check_begun(storage: Storage, prefix: str = "", first: int = 0) -> None:
    """Refuse what needs all of a log, where that has no first record. One request, three more before it raises.

    Raises
    ------
    VersionNotFound
        The creation of the store ended before the first record: nothing is lost.
    CorruptStore
        The log was begun, and is lost, or its beginning: nothing may be written or deleted.
    AccessDenied, StorageFailure
    """
    if not has_begun(storage, prefix, first):
        error = _why_empty(storage, prefix, first)
        if not has_begun(storage, prefix, first):  # or its creator was faster than these looks
            raise error


def remains(storage: Storage) -> list[str]:
    """Return the folders of the root that a begun log leaves; none before the first record. One listing."""
    return sorted(_REMAINS.intersection(storage.list_folders("")))


def check_vacant(storage: Storage) -> None:
    """Refuse to create a store where there is one, or what is left of one. One listing and two GETs.

    Raises
    ------
    StoreExists, AccessDenied, StorageFailure
    """
    if storage.read(IDENTITY, stop=1) is not None:
        raise StoreExists(f"{storage.url} holds a store already; open it", path=storage.url)
    found = [f"{name}/" for name in remains(storage)]
    if storage.read(RELAY, stop=1) is not None:
        found.append(RELAY)
    if found:
        raise StoreExists(
            f"{storage.url} has no {IDENTITY}, but holds {', '.join(found)}: what is left of a store, or a relay that "
            "is being begun; restore what is missing from a backup, or take an empty place",
            path=storage.url, found=found,
        )  # fmt: skip


def _why_empty(storage: Storage, prefix: str, first: int) -> CnrStoreError:
    key = commit_key(first, prefix)
    if first > 0:
        return CorruptStore(
            f"position {first} of the relay {storage.url} is empty, where it began: part of it was deleted; begin anew "
            "in an empty place",
            version=first, path=key,
        )  # fmt: skip
    if prefix:
        return CorruptStore(
            f"log position 0 below {prefix} is empty: a branch has it from before it has a name, so its log, or the "
            "beginning of it, was deleted; restore it from a backup, or drop the branch",
            version=0, path=key,
        )  # fmt: skip
    found = remains(storage)
    if not found:
        return VersionNotFound(
            f"nothing was saved to {storage.url} yet: its creation ended before the first record, which the next "
            "writer puts",
            version=0,
        )  # fmt: skip
    return CorruptStore(
        f"log position 0 is empty, but {storage.url} holds {', '.join(f'{name}/' for name in found)}: the commit log, "
        f"or its beginning (or, of a relay, {RELAY}), was deleted. What was saved cannot be told without it, so "
        "nothing is written or deleted here; restore it from a backup",
        version=0, path=key, found=found,
    )  # fmt: skip
