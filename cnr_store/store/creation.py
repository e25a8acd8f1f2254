"""Write the first objects of a store: its identity, its Zarr groups and the first record of its log."""

from __future__ import annotations

import uuid
from typing import Any

from cnr_store.errors import NotAStore, StorageFailure, StoreExists, Unsupported
from cnr_store.format import arrays, layout
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.identity import RESTORE_IDENTITY, decode_identity
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import FORMAT, MAJOR, MINOR, Identity
from cnr_store.log import beginning
from cnr_store.log.author import writer_info
from cnr_store.log.clock import check_clock, wall_ms
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.rebase import draft_init
from cnr_store.storage import CreateOutcome, Storage


def create_identity(storage: Storage) -> Identity:
    """Create ``cnr.json`` and the root's Zarr group in a root without a store. Blocks; a few requests.

    Raises
    ------
    BadInput, StoreExists, UnsafeBackend, WrongClock, AccessDenied, StorageFailure
    """
    identity = new_identity(storage)
    put_identity(storage, identity)
    put_root_group(storage)
    return identity


def new_identity(storage: Storage) -> Identity:
    """Return the identity of a store that will be created in a root without one; writes only a probe. Blocks.

    Raises
    ------
    StoreExists, UnsafeBackend, WrongClock, AccessDenied, StorageFailure
    """
    beginning.check_vacant(storage)
    now_ms = wall_ms()
    check_clock(storage, now_ms, may_be_behind=True)
    if storage.is_exclusive:
        storage.probe()
    return Identity(
        format=FORMAT, major=MAJOR, minor=MINOR, hash="sha256",
        store_uuid=uuid.uuid4().hex, created_ms=now_ms,
        exclusive_create="verified" if storage.is_exclusive else "unsafe_single_writer",
    )  # fmt: skip


def put_identity(storage: Storage, identity: Identity) -> None:
    """Create ``cnr.json``; from then on the root can be opened. Blocks; safe to repeat.

    Raises
    ------
    BadInput, StoreExists, AccessDenied, StorageFailure
    """
    data = canonical_json(identity)
    outcome = storage.create(layout.IDENTITY, data)
    if outcome is not CreateOutcome.CREATED:
        found = storage.read(layout.IDENTITY, stop=len(data) + 1)
        if found is None:
            raise StorageFailure(
                f"creating {layout.IDENTITY} in {storage.url} failed ({outcome.value}), and it does not exist: no "
                "store was created; retry, and open the store if the retry raises StoreExists",
                path=layout.IDENTITY, found=outcome.value,
            )  # fmt: skip
        if found != data:
            raise StoreExists(f"{storage.url} already contains a store; open it", path=storage.url)


def put_root_group(storage: Storage) -> None:
    """Put the Zarr group of the root. Blocks; safe to repeat."""
    _put_group(storage, layout.ROOT_GROUP, {"cnr": {"format": FORMAT, "major": MAJOR, "minor": MINOR}})


def put_data_group(storage: Storage) -> None:
    """Put the Zarr group of ``data/``. Blocks; safe to repeat."""
    _put_group(storage, layout.DATA_GROUP, {})


def _put_group(storage: Storage, key: str, attributes: dict[str, Any]) -> None:
    storage.put(key, arrays.group_document(attributes))
    storage.sync_folders([key])


def read_identity(storage: Storage) -> Identity:
    """Return the content of ``cnr.json``. One GET.

    Raises
    ------
    NotAStore, NewerFormat, CorruptStore, AccessDenied, StorageFailure
    """
    data = storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
    if data is None:
        raise NotAStore(
            f"{storage.url} is not a cnr store: it has no {layout.IDENTITY}{_but_remains(storage)}", path=storage.url
        )
    return decode_identity(data, f"{storage.url}/{layout.IDENTITY}")


def _but_remains(storage: Storage) -> str:
    """Return what else of a store is there, and what to do, for the message. One listing, if that is allowed."""
    try:
        found = beginning.remains(storage)
    except (StorageFailure, Unsupported):
        found = []
    if not found:
        return "; check the place, or create a store there (`cnr init`)"
    return (
        f", but {'/, '.join(found)}/: it was deleted or not copied, or a copy or relay is still being made; "
        f"{RESTORE_IDENTITY}"
    )


def begin_log(storage: Storage, log: CommitLog, identity: bytes) -> None:
    """Write the first record of a store's own log, then the Zarr group of ``data/``. Idempotent; blocks.

    ``identity``: the bytes of ``cnr.json``. An object below ``data/`` without a first record means a lost log.

    Raises
    ------
    CommitStateUnknown, CorruptStore, StorageFailure
    """
    log.append_first(draft_init(writer_info(uuid.uuid4().hex), sha256(identity)))
    put_data_group(storage)
