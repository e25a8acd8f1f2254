"""Write the first objects of a store: its identity, its Zarr groups and the first record of its log."""

from __future__ import annotations

import uuid

from cnr_store.errors import NotAStore, StorageFailure, StoreExists
from cnr_store.format import arrays, layout
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.identity import decode_identity
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
    beginning.check_vacant(storage)
    now_ms = wall_ms()
    check_clock(storage, now_ms, may_be_behind=True)
    if storage.is_exclusive:
        storage.probe()
    identity = Identity(
        format=FORMAT, major=MAJOR, minor=MINOR, hash="sha256",
        store_uuid=uuid.uuid4().hex, created_ms=now_ms,
        exclusive_create="verified" if storage.is_exclusive else "unsafe_single_writer",
    )  # fmt: skip
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
    storage.put(layout.ROOT_GROUP, arrays.group_document({"cnr": {"format": FORMAT, "major": MAJOR, "minor": MINOR}}))
    storage.sync_folders([layout.ROOT_GROUP])
    return identity


def read_identity(storage: Storage) -> Identity:
    """Return the content of ``cnr.json``. One GET.

    Raises
    ------
    NotAStore, NewerFormat, CorruptStore, AccessDenied, StorageFailure
    """
    data = storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
    if data is None:
        raise NotAStore(f"{storage.url} is not a cnr store: it has no {layout.IDENTITY}", path=storage.url)
    return decode_identity(data, f"{storage.url}/{layout.IDENTITY}")


def begin_log(storage: Storage, log: CommitLog, identity: bytes) -> None:
    """Write the first record of a store's own log, then the Zarr group of ``data/``. Idempotent; blocks.

    ``identity``: the bytes of ``cnr.json``. An object below ``data/`` without a first record means a lost log.

    Raises
    ------
    CommitStateUnknown, CorruptStore, StorageFailure
    """
    log.append_first(draft_init(writer_info(uuid.uuid4().hex), sha256(identity)))
    storage.put(layout.DATA_GROUP, arrays.group_document({}))
    storage.sync_folders([layout.DATA_GROUP])
