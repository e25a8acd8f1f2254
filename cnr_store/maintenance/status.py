"""Read a store's status for monitors: heads, chains, ages, and the result of the last maintenance.

It reads a few small objects. `LastMaintenance` is advisory: it may be stale or absent, and no reader needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cnr_store.errors import CorruptObject, NotFound
from cnr_store.format import layout
from cnr_store.format.commit_record import named_versions
from cnr_store.format.documents import canonical_json, loads
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import CommitRecord
from cnr_store.runtime.notebook import ShownReport
from cnr_store.store import Store

CHECKPOINT_KINDS = frozenset({"baseline", "delta"})


class LastMaintenance(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a store's last maintenance: one small object that each run replaces.

    Attributes
    ----------
    ended_ms
        Time of its end, in ms since 1970, by the clock of the machine that ran it.
    duration_s
        Wall time in seconds.
    outcome
        ``done``, ``stopped`` or ``failed``.
    rewritten_bytes
        Bytes of the segments that compaction wrote.
    deleted_bytes
        Bytes of the objects that garbage collection deleted.
    pending_delete_bytes
        Bytes of segments that are marked and not yet deleted; None if the collection failed.
    orphans
        Segments that no record names: saves in progress, or remains of failed ones; None if the collection failed.
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
    """The newest state of one log.

    Attributes
    ----------
    branch
        The branch; None is the store's own log.
    version, step, checkpoint
        The fields of the newest record.
    checkpoint_ms
        When the newest checkpoint was saved, in ms since 1970; None before the first. Maintenance does not change it.
    chain_length
        Number of segments that a restore of the head reads.
    chain_bytes
        Bytes of those segments.
    baseline_bytes
        Bytes of the baseline alone; 0 without one.
    live_versions
        Number of versions that readers may open.
    pending_delete
        Number of transactions that are marked for deletion.
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
        """Bytes that a restore reads, divided by the baseline's bytes; None before the first save."""
        return self.chain_bytes / self.baseline_bytes if self.baseline_bytes else None


@dataclass(frozen=True, slots=True)
class StoreStatus(ShownReport):
    """The status of a store.

    Attributes
    ----------
    url
        The store, without credentials.
    heads
        The log that the store is opened on. If that is the store's own log, also its branches, by name.
    segments
        Number of segments in storage, needed or not.
    last_maintenance
        None if there was none, or if its object cannot be read.
    """

    url: str
    heads: tuple[HeadStatus, ...]
    segments: int
    last_maintenance: LastMaintenance | None


def read_status(store: Store) -> StoreStatus:
    """Return the status of a store. Blocks for a few GETs per log, and one listing of segments.

    Like any opening of a branch, this writes position 0 of a branch whose creator died before doing so.

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
            continue  # It has expired or was just dropped.
    return StoreStatus(
        url=store.url, heads=tuple(heads), segments=len(store.storage.list_folders(layout.DATA)),
        last_maintenance=read_last_maintenance(store),
    )  # fmt: skip


def head_status(store: Store) -> HeadStatus:
    """Return the state of the log that ``store`` is opened on. Blocks.

    A few GETs, and one for each record after the newest checkpoint: tags, fences, compactions.
    """
    head = store.head().record
    checkpoint = next((record for record in store.log() if record.kind in CHECKPOINT_KINDS), None)
    return HeadStatus(
        branch=store.branch, version=head.v, step=head.step, checkpoint=head.checkpoint,
        checkpoint_ms=None if checkpoint is None else checkpoint.ts_ms,
        chain_length=len(head.chain), chain_bytes=sum(entry.size_bytes for entry in head.chain),
        baseline_bytes=head.chain[0].size_bytes if head.chain else 0,
        live_versions=count_live(head), pending_delete=len(head.aborted),
    )  # fmt: skip


def count_live(head: CommitRecord) -> int:
    """Return how many versions readers may open, from the newest record. Pure; O(named versions)."""
    named, gone = named_versions(head).union(head.kept), set(head.expired)
    below = sum(version < head.floor and version not in gone for version in named)
    return below + head.v + 1 - head.floor - sum(head.floor <= version <= head.v for version in gone)


def read_last_maintenance(store: Store) -> LastMaintenance | None:
    """Return the result of the last maintenance; None if it is absent or unreadable. One GET."""
    try:
        data = store.storage.read_document(layout.LAST_MAINTENANCE, MAX_SMALL_BYTES)
        return None if data is None else loads(data, _DECODER)
    except (CorruptObject, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def put_last_maintenance(store: Store, last: LastMaintenance) -> None:
    """Write the result of a maintenance. One PUT.

    Raises
    ------
    StorageFailure
    """
    store.storage.put(layout.LAST_MAINTENANCE, canonical_json(last))
