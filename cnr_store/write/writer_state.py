"""What a writer and its open transaction share: the head, the state the mirrors stand for, and the mirrors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from cnr_store.errors import (
    BadInput,
    CnrStoreError,
    Conflict,
    CorruptStore,
    DoesNotApply,
    MissingObject,
    RankFailed,
    RankLost,
    StorageFailure,
)
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.layout import segment_name
from cnr_store.format.records import ChainEntry, CommitRecord, TableSchema, WriterInfo
from cnr_store.log.author import fenced_by
from cnr_store.log.commit_log import CommitLog
from cnr_store.log.expiry import expired_by
from cnr_store.log.rebase import leaves_state
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.ranks import OneRank, Ranks, rank_zero, together
from cnr_store.runtime.threads import Throttle, Workers
from cnr_store.segment.reader import SegmentReader, open_chain
from cnr_store.segment.shards import KeyShare, Placement, Shard, shards_of, whole_shard_of
from cnr_store.storage import Storage
from cnr_store.types import Rectangle
from cnr_store.write.mirrors import Mirrors

CommitKind = Literal["baseline", "delta"]


@dataclass(slots=True)
class SegmentDraft:
    """The kind, step and name of a new segment, and the number ``keep`` of chain segments that it follows.

    ``base``: the version that it was begun on. ``is_one_shot``: whether it takes the place of deltas. The step may
    change, and `move_to` what depends on the chain.
    """

    kind: CommitKind
    step: int
    txn: str
    base: int
    segment: str
    keep: int
    l0: int
    is_one_shot: bool

    @classmethod
    def after(cls, head: CommitRecord, kind: CommitKind, *, step: int, txn: str, one_shot: bool) -> SegmentDraft:
        """Return the draft of a segment after ``head``: a delta after its last segment or its baseline."""
        is_delta = kind == "delta"
        keep = 0 if not is_delta else 1 if one_shot else len(head.chain)
        l0 = head.chain[keep - 1].l1 if is_delta else 0
        is_one_shot = is_delta and keep < len(head.chain)
        return cls(kind, step, txn, head.v, segment_name(head.v, txn), keep, l0, is_one_shot)

    def move_to(self, head: CommitRecord) -> None:
        """Follow ``head``, which has the same state in other segments: those that compactions have put in the chain."""
        moved = SegmentDraft.after(head, self.kind, step=self.step, txn=self.txn, one_shot=self.is_one_shot)
        self.keep, self.l0 = moved.keep, moved.l0


logger = logging.getLogger(__name__)


class UnknownCommit(Protocol):
    """A commit whose outcome is not known yet."""

    undecided: LogEntry | None
    """The record that was sent, where this rank knows it."""

    def settle(self) -> LogEntry | None:
        """Learn the outcome: the entry if it won, None if it lost. Blocks."""


class Succession(Protocol):
    """How a writer that has loaded a state gets its epoch, to continue from that state."""

    @property
    def version(self) -> int:
        """The version that it has loaded."""

    def take(self, info: WriterInfo) -> LogEntry:
        """Commit the writer's epoch, on rank 0, and return the entry to continue from. Safe to call again."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """What this rank holds of each table; ``shapes`` and ``cuts``: the tables' shapes and column ranges over all ranks.

    Without a ``placement`` it holds every table whole. ``keys`` is what it holds of every hashed table.
    """

    rank: int = 0
    placement: Placement | None = None
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cuts: Mapping[str, set[tuple[int, int]]] = field(default_factory=dict)
    keys: KeyShare = field(default_factory=lambda: KeyShare(0, 1))

    def shards(self, tables: Mapping[str, TableSchema]) -> dict[str, tuple[Shard, ...]]:
        """Return what this rank holds of the tables."""
        hashed = [name for name, schema in tables.items() if schema.keys == "hashed"]
        return shards_of(self.placement, tables, hashed)

    def one_of(self, table: str, schema: TableSchema | None, rectangle: Rectangle | None) -> Shard:
        """Return which of this rank's shards of a table is meant; ``schema`` None: one that will be dense.

        Raises
        ------
        BadInput
        """
        if self.placement is None:
            if rectangle is not None:
                raise BadInput(
                    f"this writer holds table {table!r} whole; open it with shards= to write rectangles", table=table
                )
            return whole_shard_of(table)[0]
        held = shards_of(self.placement, [table], [table] if schema and schema.keys == "hashed" else ())[table]
        chosen = [shard for shard in held if rectangle is None or shard.rectangle == rectangle]
        if len(chosen) != 1:
            raise BadInput(
                f"rank {self.rank} holds {[str(shard) for shard in held]} of table {table!r}; "
                f"found rectangle={rectangle}, name one of them",
                table=table, expected=[shard.rectangle for shard in held], found=rectangle,
            )  # fmt: skip
        return chosen[0]


@dataclass(frozen=True, slots=True)
class WriterSetup:
    """What a writer was opened with, and keeps. ``ranks`` write together; rank 0 commits."""

    storage: Storage
    log: CommitLog
    info: WriterInfo
    workers: Workers
    throttle: Throttle
    ranks: Ranks = field(default_factory=OneRank)
    held: RankShards = field(default_factory=RankShards)


@dataclass(slots=True)
class WriterState:
    """The state of one writer between its opening and close.

    Attributes
    ----------
    head
        The newest log entry the writer knows.
    snapshot
        The state that the mirrors stand for; None before a restore and after the store moved on without the writer.
    open, pending
        The transaction in the making, and the commit whose outcome is unknown.
    is_restored
        Whether nothing was committed since the last restore.
    is_new
        Whether nothing was begun: the head is what the writer found when it opened or took over.
    succession
        How the writer comes to its epoch, as long as it has none; None once it has.
    """

    setup: WriterSetup
    head: LogEntry
    mirrors: Mirrors
    snapshot: Snapshot | None = None
    open: object | None = None
    pending: UnknownCommit | None = None
    is_restored: bool = False
    is_new: bool = True
    succession: Succession | None = None
    _told: tuple[ChainEntry, Mapping[str, TableSchema]] | None = None
    _continued: int = 0
    """The version of the newest `snapshot_of`."""

    def snapshot_of(
        self, entry: LogEntry, *, known: Mapping[str, SegmentReader] | None = None, opens: bool = True
    ) -> Snapshot:
        """Return the state of a record that this writer continues; ``known``, ``opens`` as of `Snapshot`.

        A read of an object that was deleted after a compaction raises DoesNotApply: it is not damage.
        """
        self._continued = entry.record.v
        return Snapshot(
            self.setup.storage, entry, self.setup.workers, known=known, opens=opens, if_missing=self._raise_if_expired
        )

    def _raise_if_expired(self, missing: MissingObject) -> None:
        newest = expired_by(self.setup.log, self._continued)
        if newest is not None:
            raise DoesNotApply(
                f"version {self._continued}, which this writer continues, has expired by commit record "
                f"{newest.v}, and segments of it were compacted and deleted: the read or the save took longer "
                "than the grace period of garbage collection; save again",
                version=newest.v, found=missing.path,
            ) from missing  # fmt: skip

    @property
    def head_tables(self) -> Mapping[str, TableSchema]:
        """The head's tables. A GET per segment where the writer knows no more of it than its record; blocks for them.

        None for a head that cannot be read: a baseline replaces it.

        Raises
        ------
        StorageFailure
        """
        chain = self.head.record.chain
        if self.snapshot is not None or not chain:
            return {} if self.snapshot is None else self.snapshot.tables
        if self._told is None or self._told[0] != chain[-1]:
            try:
                tables = open_chain(self.setup.storage, chain, self.setup.workers)[-1].manifest.tables
            except CorruptStore as error:
                logger.warning("which tables version %d has cannot be read: %s", self.head.record.v, error)
                tables = {}
            self._told = chain[-1], tables
        return self._told[1]

    @property
    def is_synced(self) -> bool:
        """Whether the mirrors are the head's state, so that a delta may be written."""
        return self.snapshot is not None and self.pending is None

    def take_over(self) -> None:
        """Come to this writer's epoch, if it has none yet, and keep the mirrors. All ranks call this; it blocks.

        Raises
        ------
        Conflict
            Another writer has committed after the state that was loaded.
        VersionExpired, CommitStateUnknown, StorageFailure, CorruptStore, ReadOnlyStore, DoesNotApply
        """
        succession = self.succession
        if succession is None:
            return
        taken: list[LogEntry] = []
        opened: list[Snapshot] = []

        def take() -> int:
            taken.append(succession.take(self.setup.info))
            return taken[0].record.v

        def move() -> None:
            if not taken:
                taken.append(self._read(version))
            if self.snapshot is not None:
                opened.append(self.snapshot_of(taken[0], known=self.snapshot.known_readers))

        version = rank_zero(self.setup.ranks, take)
        together(self.setup.ranks, move)
        self.head, self.succession = taken[0], None
        if opened:
            self.snapshot = opened[0]

    def _read(self, version: int) -> LogEntry:
        entry = self.setup.log.read(version)
        if entry is None:
            raise _unseen(version)
        return entry

    def catch_up(self) -> None:
        """Move to the newest log entry: one request per record that others have added, and one more.

        All ranks move to the one that rank 0 finds, so all of them call this. Where the chain is another one then, the
        mirrors are given up: they are not its state.

        Raises
        ------
        Fenced
            Another writer took over: what follows is its business.
        CorruptRecord, StorageFailure
        """
        try:
            newest = rank_zero(self.setup.ranks, self._move_to_newest)
            if self.setup.ranks.world > 1:
                together(self.setup.ranks, partial(self.move_to, newest))
        finally:
            if self.snapshot is not None and self.snapshot.record.chain != self.head.record.chain:
                self.open = None
                self.forget()

    def follow(self) -> None:
        """Move to the last record that does not change the training state, and keep the mirrors: they stay valid.

        For saves that read the chain: compaction may have replaced segments of it, and what it replaced is deleted some
        day. One request and one more for each such record; stops before any other. All ranks call this. Where the log
        cannot be read all stay where they are: the save does without, or meets what is wrong when it commits.

        Raises
        ------
        RankLost
        """
        before, opened = self.head, list[Snapshot]()

        def move() -> None:
            self.move_to(newest)
            if self.snapshot is not None and self.head is not before:
                known = self.snapshot.known_readers
                opened.append(self.snapshot_of(self.head, known=known))

        try:
            newest = rank_zero(self.setup.ranks, self._move_behind_maintenance)
            together(self.setup.ranks, move)
        except BaseException as error:
            self.head = before  # all of it or nothing: the snapshot must be the head's, on every rank
            is_passing = isinstance(error, StorageFailure | CorruptStore | DoesNotApply | RankFailed)
            if not is_passing or isinstance(error, RankLost):
                raise
            logger.warning("records after version %d cannot be read: %s", before.record.v, error)
            return
        if opened:
            self.snapshot = opened[0]

    def _move_behind_maintenance(self) -> int:
        while (entry := self.setup.log.poll(self.head)) is not None and leaves_state(entry.record):
            self.head = entry
        return self.head.record.v

    def move_to(self, version: int) -> None:
        """Move to a record that is known to be there."""
        while self.head.record.v < version:
            if not self._move():
                raise _unseen(self.head.record.v + 1)

    def _move_to_newest(self) -> int:
        while self._move():
            pass
        return self.head.record.v

    def _move(self) -> bool:
        """Move to the next record; False if there is none."""
        entry = self.setup.log.poll(self.head)
        if entry is None:
            return False
        record = entry.record
        if record.epoch > self.head.record.epoch:
            raise fenced_by(record, self.head.record.epoch)
        self.head = entry
        return True

    def won(self, entry: LogEntry, written: Mapping[str, SegmentReader]) -> Snapshot:
        """Move the head to the version that this writer committed, and return its state.

        Until the mirrors have moved to it (`stand_on`) they are no state. ``written``: segments that are open already.
        The commit stays acknowledged if its state cannot be opened afterwards, because compaction put another segment
        into its chain; `open_snapshot` tries again.
        """
        known = {**(self.snapshot.known_readers if self.snapshot else {}), **written}
        self.head = entry
        self.open = None
        self.is_restored = False
        # The mirrors belong to no state until the new one is open: opening it may read, and may fail.
        self.snapshot = None
        snapshot = self.snapshot_of(entry, known=known, opens=False)
        try:
            snapshot.open()
        except CnrStoreError as error:
            # Perhaps a connection that was cut: the mirrors are this state all the same, and the next save asks again.
            logger.warning("version %d is committed, and is opened at the next save: %s", entry.record.v, error)
        return snapshot

    def stand_on(self, snapshot: Snapshot) -> None:
        """The mirrors are the state of this snapshot."""
        self.snapshot = snapshot
        self.mirrors.is_complete = True

    def open_snapshot(self) -> None:
        """Open the state that the mirrors stand for, if that failed after the last commit. Blocks.

        Raises
        ------
        StorageFailure
            The mirrors stay: ask again.
        CorruptStore, DoesNotApply
            The chain cannot be built on: the writer needs a restore, or a baseline.
        """
        if self.snapshot is not None:
            try:
                self.snapshot.open()
            except (CorruptStore, DoesNotApply):
                self.forget()
                raise

    def lost(self, error: BaseException) -> None:
        """Nothing became visible.

        After a conflict the head has moved, and after a failed baseline a mirror may be gone: the mirrors are the state
        of no version until a restore or another baseline.
        """
        self.open = None
        self.mirrors.drop_staged()
        if isinstance(error, Conflict) or not self.mirrors.is_complete:
            self.forget()

    def forget(self) -> None:
        """Drop the content of the mirrors: it belongs to no committed state."""
        self.mirrors.clear()
        self.snapshot = None


def _unseen(version: int) -> StorageFailure:
    return StorageFailure(
        f"commit record {version} cannot be seen, although another rank has read it, or a later one; the storage "
        "does not show what it was given",
        version=version,
    )
