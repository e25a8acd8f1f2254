"""What a monitor asks of a store: heads, chains, ages, and how the last maintenance ended. Reads a few small objects.

Nothing here decides anything: `LastMaintenance` is advisory, may be stale or absent, and no reader needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cnr_store.errors import CorruptObject, NotFound
from cnr_store.format import layout
from cnr_store.format.documents import canonical_json, loads
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import CommitRecord
from cnr_store.store import Store

CHECKPOINT_KINDS = frozenset({"baseline", "delta"})


class LastMaintenance(msgspec.Struct, frozen=True, kw_only=True):
    """How a store's last maintenance ended: one small object that each run replaces.

    Attributes
    ----------
    ended_ms
        When, in milliseconds since 1970, by the clock of the machine that ran it.
    duration_s
        How long it took.
    outcome
        ``done``, ``stopped`` or ``failed``.
    rewritten_bytes
        Bytes of the segments that compaction made.
    deleted_bytes
        Bytes of the segments that garbage collection deleted.
    pending_delete_bytes
        Bytes that it found given up and not deleted yet; None if it failed.
    orphans
        Segments that no record names: saves under way, or what is left of one that died; None if it failed.
    """

    ended_ms: int
    duration_s: float
    outcome: str
    rewritten_bytes: int
    deleted_bytes: int
    pending_delete_bytes: int | None = None
    orphans: int | None = None


_DECODER = msgspec.json.Decoder(LastMaintenance)


@dataclass(frozen=True, slots=True)
class HeadStatus:
    """One log's newest state.

    Attributes
    ----------
    branch
        The branch; None is the store's own log.
    version, step, checkpoint
        Of the newest record.
    checkpoint_ms
        When the newest checkpoint was committed; None if nothing was ever saved. Maintenance moves the head, not this.
    chain_length
        Segments that a restore of the head reads.
    chain_bytes
        Their bytes.
    baseline_bytes
        Those of the baseline alone; 0 without one.
    live_versions
        Versions that readers may open.
    pending_delete
        Transactions whose objects may be deleted, now or later.
    """

    branch: str | None
    version: int
    step: int
    checkpoint: int
    checkpoint_ms: int | None
    chain_length: int
    chain_bytes: int
    baseline_bytes: int
    live_versions: int
    pending_delete: int

    @property
    def restore_ratio(self) -> float | None:
        """Bytes that a restore reads, as a multiple of the baseline's; None before the first save."""
        return self.chain_bytes / self.baseline_bytes if self.baseline_bytes else None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a monitor is told of a store.

    Attributes
    ----------
    url
        The store, without credentials.
    heads
        The log that the store is opened on; of the store's own log also those of its branches, by name.
    segments
        Segments in storage, whether or not a version needs them.
    last_maintenance
        None if there was none, or its note cannot be read.
    """

    url: str
    heads: tuple[HeadStatus, ...]
    segments: int
    last_maintenance: LastMaintenance | None


def read_status(store: Store) -> StoreStatus:
    """Return what a monitor asks of a store. Blocks for a few GETs per log, and one listing of segments.

    Opening a branch whose creator died before its position 0 writes that, as any opening of it does.

    Examples
    --------
    >>> store = Store.create("memory://doctest-status")
    >>> [(head.branch, head.version) for head in read_status(store).heads]
    [(None, 0)]

    Raises
    ------
    CorruptStore, AccessDenied, StorageFailure
    """
    heads = [head_status(store)]
    for name in sorted(store.branches()) if store.branch is None else ():
        try:
            with store.on_branch(name) as branch:
                heads.append(head_status(branch))
        except NotFound:
            continue  # Its time is over, or it was dropped a moment ago.
    return StoreStatus(
        url=store.url, heads=tuple(heads), segments=len(store.storage.list_folders(layout.DATA)),
        last_maintenance=read_last_maintenance(store),
    )  # fmt: skip


def head_status(store: Store) -> HeadStatus:
    """Return the state of the log that ``store`` is opened on. Blocks for a few GETs.

    One GET for each record behind the newest checkpoint: tags, fences, compactions.
    """
    head = store.head().record
    checkpoint = next((record for record in store.log() if record.kind in CHECKPOINT_KINDS), None)
    return HeadStatus(
        branch=store.branch, version=head.v, step=head.step, checkpoint=head.checkpoint,
        checkpoint_ms=None if checkpoint is None else checkpoint.ts_ms,
        chain_length=len(head.chain), chain_bytes=sum(entry.bytes for entry in head.chain),
        baseline_bytes=head.chain[0].bytes if head.chain else 0,
        live_versions=count_live(head), pending_delete=len(head.aborted),
    )  # fmt: skip


def count_live(head: CommitRecord) -> int:
    """Return how many versions readers may open, by the newest record. Pure; O(named versions), not O(versions)."""
    named = {*head.kept, *head.tags.values(), *head.channels.values(), *(pin.version for pin in head.pins.values())}
    gone = set(head.expired)
    below = sum(version < head.floor and version not in gone for version in named)
    return below + head.v + 1 - head.floor - sum(head.floor <= version <= head.v for version in gone)


def read_last_maintenance(store: Store) -> LastMaintenance | None:
    """Return how the last maintenance ended; None if there was none, or what is there cannot be read. One GET."""
    try:
        data = store.storage.read_document(layout.LAST_MAINTENANCE, MAX_SMALL_BYTES)
        return None if data is None else loads(data, _DECODER)
    except (CorruptObject, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def put_last_maintenance(store: Store, last: LastMaintenance) -> None:
    """Say how a maintenance ended. One PUT.

    Raises
    ------
    StorageFailure
    """
    store.storage.put(layout.LAST_MAINTENANCE, canonical_json(last))
