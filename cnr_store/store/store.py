"""The public object model: a `Store` opens snapshots and writers, and changes tags and the head."""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json
from cnr_store.format.records import CommitRecord, Cursor, Identity, Pin, RelayMarker
from cnr_store.log import leases
from cnr_store.log.branches import Branch
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.leases import Lease
from cnr_store.log.retention import Best, KeepBest
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.notebook import html_table
from cnr_store.runtime.ranks import OneRank, Ranks
from cnr_store.segment.chunk_cache import ChunkCache
from cnr_store.segment.reader import SegmentReader, open_chain
from cnr_store.segment.shards import Placement
from cnr_store.storage import Storage, open_storage
from cnr_store.store.creation import begin_log, create_identity, read_identity
from cnr_store.store.internals import StoreInternals
from cnr_store.store.refs import Refs
from cnr_store.store.versions import Versions
from cnr_store.store.writing import open_writer
from cnr_store.types import KeyRule
from cnr_store.write.mirrors import MirrorMode
from cnr_store.write.writer import Writer
from cnr_store.write.writer_state import Succession

logger = logging.getLogger(__name__)


class Store(Closing):
    """One checkpoint store at a URL, or one branch of it. Opening it reads and caches only ``cnr.json``.

    On a branch, versions, tags and channels are the branch's own; `branches` and `drop_branch` act on the whole store.

    Examples
    --------
    >>> import numpy as np
    >>> store = Store.create("memory://doctest-store")
    >>> with store.writer() as writer, writer.begin(step=10) as txn:
    ...     txn.write_table("user", np.ones((4, 2), np.float32))
    >>> store.snapshot().table("user").read().shape
    (4, 2)
    """

    def __init__(
        self, storage: Storage, identity: Identity, *, threads: int | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self.identity = identity
        self.storage = storage
        self.internals = StoreInternals(storage, identity, threads=threads, retry=retry)
        self._versions = Versions(self.internals)
        self._refs = Refs(self.internals, self._versions)

    @classmethod
    def create(
        cls, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True, unsafe_single_writer: bool = False, threads: int | None = None,
    ) -> Store:  # fmt: skip
        """Create a store; the URL's folder must not contain one. Blocks.

        Parameters
        ----------
        url
            Any fsspec URL, or a local path.
        storage_options
            Passed to fsspec. They never appear in a record, log or error.
        fsync
            Make local files durable before a commit.
        unsafe_single_writer
            Accept a backend that cannot create objects exclusively; then only one process may ever write, and each
            must pass this.

        Raises
        ------
        StoreExists, UnsafeBackend, WrongClock, AccessDenied, StorageFailure
        """
        storage = open_storage(
            url, storage_options=storage_options, fsync=fsync, unsafe_single_writer=unsafe_single_writer
        )
        return cls.create_on(storage, threads=threads)

    @classmethod
    def create_on(cls, storage: Storage, *, threads: int | None = None, retry: RetryPolicy | None = None) -> Store:
        """Create a store on opened storage; see `create`. ``retry``: retries of commits with unknown outcome."""
        identity = create_identity(storage)
        store = cls(storage, identity, threads=threads, retry=retry)
        begin_log(storage, store.internals.log, canonical_json(identity))
        return store

    @classmethod
    def open(
        cls, url: str | os.PathLike[str], *, branch: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True, unsafe_single_writer: bool = False, threads: int | None = None,
    ) -> Store:  # fmt: skip
        """Open a store, or a branch of it, for reading and (with `writer`) for writing. Writes nothing.

        Parameters
        ----------
        unsafe_single_writer
            As for `create`: required to write to a store that was created with it, and refused for any other.

        Raises
        ------
        BranchNotFound, VersionExpired
            The branch does not exist, or it has expired.
        NotAStore, NewerFormat, AccessDenied, StorageFailure
        CorruptStore
            The identity is damaged. A damaged or missing log is reported by the calls that read it.
        """
        storage = open_storage(
            url, storage_options=storage_options, fsync=fsync, unsafe_single_writer=unsafe_single_writer
        )
        return cls.open_on(storage, branch=branch, threads=threads)

    @classmethod
    def open_on(
        cls, storage: Storage, *, branch: str | None = None, threads: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Store:  # fmt: skip
        """Open a store on opened storage; see `open` and `create_on`."""
        store = cls(storage, read_identity(storage), threads=threads, retry=retry)
        store.internals.find_log()
        if branch is not None:
            store.internals.enter(store.internals.main, store.internals.find_branch(branch))
        logger.info("opened %s%s, uuid %s", store.url, "" if branch is None else f", branch {branch}", store.uuid)
        return store

    def __repr__(self) -> str:
        return f"<Store {self.url}{'' if self.branch is None else f', branch {self.branch}'}>"

    def _repr_html_(self) -> str:
        rows = [(one.v, one.kind, one.step, len(one.chain)) for one in self.log(limit=10)]
        return html_table(f"{self.url}, newest records", ("version", "kind", "step", "segments"), rows)

    def close(self) -> None:
        """End the threads. Snapshots and writers of this store cannot be used afterwards."""
        self.internals.close()

    @property
    def url(self) -> str:
        """The store's URL or path, without credentials."""
        return self.storage.url

    @property
    def uuid(self) -> str:
        """The store's uuid, the same on its branches."""
        return self.identity.store_uuid

    @property
    def branch(self) -> str | None:
        """The name of the opened branch, or None."""
        branch = self.internals.branch
        return None if branch is None else branch.name

    @property
    def relay(self) -> RelayMarker | None:
        """The relay's document if this root is a relay, a read-only copy (spec, section 7.11); else None."""
        guard = self.internals.relay
        return None if guard is None else guard.marker

    def head(self) -> LogEntry:
        """Return the newest log entry. Blocks; a few GETs, no listing."""
        return self.internals.log.latest()

    def latest_version(self) -> int:
        """Return the newest version."""
        return self.head().record.v

    def steps(self) -> list[int]:
        """Return the steps at which a snapshot can be opened, ascending. One GET per record of the log."""
        return self._versions.steps(self.head())

    def poll(self, after: LogEntry) -> LogEntry | None:
        """Return the next entry after ``after``, or None. Blocks; one GET, occasionally some more.

        Raises
        ------
        CorruptStore, StorageFailure
        """
        return self.internals.poll(after)

    def announce_to(self, announce: Callable[[int], object]) -> None:
        """Call ``announce(version)`` for each record of this object once it is durable; see `Announcers.add`."""
        self.internals.log.announcers.add(announce)

    def log(self, newest: int | None = None, *, limit: int | None = None) -> Iterator[CommitRecord]:
        """Yield commit records, newest first, from version ``newest`` (the head if None). One GET each."""
        start = self.head() if newest is None else self.internals.entry(newest)
        for count, entry in enumerate(self.internals.log.walk(start, self.internals.read_workers)):
            if limit is not None and count >= limit:
                return
            yield entry.record

    def record(self, version: int) -> CommitRecord:
        """Return the record of a version. One GET. Raises `VersionNotFound`."""
        return self.internals.entry(version).record

    def snapshot(
        self,
        version: int | None = None,
        *,
        step: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        time: dt.datetime | None = None,
        cache: ChunkCache | None = None,
    ) -> Snapshot:
        """Open a state: the latest, or that of a version, step, tag, channel or time (at most one of them).

        Blocks. By step: the newest version with that step, which after a rollback is of the continued run. By time: the
        last version committed at or before it.

        Parameters
        ----------
        time
            A time without a zone is local time.
        cache
            Caches chunks that `TableView.read_rows` decodes; several snapshots of this store may share it.

        Raises
        ------
        BadInput, VersionNotFound, VersionExpired, TagNotFound, ChannelNotFound, BranchNotFound, CorruptStore
        """
        head = self.internals.readable_head()
        entry = self._versions.find(head, version=version, step=step, tag=tag, channel=channel, time=time)
        return self._versions.open(head.record, entry, cache)

    def best(self, metric: str, *, best: Best = "largest") -> Snapshot:
        """Open the live version whose save recorded the best value of a metric, of equal ones the newest.

        Blocks: reads each record of the log. Raises `VersionNotFound` if no live version has the metric.
        """
        return self.snapshot(self._versions.best(self.head().record, KeepBest(metric, best=best)))

    def writer(
        self, *, mirror: MirrorMode = "memory", mirror_folder: str | None = None, bytes_per_s: float | None = None,
        run_id: str | None = None, ranks: Ranks | None = None, shards: Placement | None = None,
        key_rule: KeyRule = "modulo", keyed_mirror_bytes: int | None = None, succession: Succession | None = None,
    ) -> Writer:  # fmt: skip
        """Return a writer, the store's only committer: every earlier writer is fenced. Blocks; a few requests.

        With ``ranks``, all ranks call this together, and their writers write one segment together. The writer starts at
        the head without mirrors: load them with `Writer.restore`, or begin with a ``baseline``.

        Parameters
        ----------
        mirror
            ``memory``, ``none`` or ``mmap``: files in ``mirror_folder``, which exists; None is a temporary folder.
        bytes_per_s, ranks
            Limit on this rank's bytes per second while saving. The ranks that write together; None is this process.
        run_id
            A name of your own for this writer in its commit records; None is a random one.
        shards
            Table to this rank's rectangles; those of all ranks tile each table. None, for one rank only: whole tables.
        key_rule
            Which rank owns a key of a hashed table (`KeyRule`); others' are refused. No rule is kept in the store.
        keyed_mirror_bytes
            Limit on all mirrors of hashed tables (`cnr_store.write.keyed_mirrors`); None is none.
        succession
            Delay the fence to `Writer.take_over` or the first `Writer.begin`. Until then the writer only reads, and
            `Writer.restore` loads the version that this names.

        Raises
        ------
        ReadOnlyStore, UnsafeBackend, CommitStateUnknown
        BadInput
            Shards of ranks leave gaps or overlap, rules differ; ``bytes_per_s`` is 0 or less; no ``mirror_folder``.
        """
        return open_writer(
            self.internals, mirror=mirror, mirror_folder=mirror_folder, bytes_per_s=bytes_per_s, run_id=run_id,
            ranks=OneRank() if ranks is None else ranks, shards=shards, key_rule=key_rule,
            keyed_mirror_bytes=keyed_mirror_bytes, succession=succession,
        )  # fmt: skip

    def tags(self) -> dict[str, int]:
        """Return tag names and their versions."""
        return dict(self.head().record.tags)

    def tag(self, name: str, version: int | None = None) -> int:
        """Give a version (the head if None) a permanent name; return the new record's version. Blocks.

        Raises
        ------
        TagExists
            The name is a tag of another version, or a channel.
        VersionNotFound, VersionExpired, BadName, CommitStateUnknown
        """
        return self._refs.tag(name, version)

    def untag(self, name: str) -> int:
        """Remove a tag; return the new record's version. Blocks.

        Raises
        ------
        TagNotFound, CommitStateUnknown
        """
        return self._refs.untag(name)

    def channels(self) -> dict[str, int]:
        """Return channel names and the versions that they point to."""
        return dict(self.head().record.channels)

    def set_channel(self, name: str, version: int | None = None) -> int:
        """Create or move a channel to a version (the head if None); return the new record's version. Blocks.

        Of two moves at once the later record wins. The version is kept as long as the channel points to it.

        Raises
        ------
        TagExists
            The name is a tag, which cannot be moved.
        VersionNotFound, VersionExpired, BadName, CommitStateUnknown
        """
        return self._refs.set_channel(name, version)

    def drop_channel(self, name: str) -> int:
        """Remove a channel; return the new record's version. Blocks.

        Raises
        ------
        ChannelNotFound, CommitStateUnknown
        """
        return self._refs.drop_channel(name)

    def branches(self) -> dict[str, Pin]:
        """Return the whole store's branches: name to pin, with fork point and expiry. A relay has none."""
        if self.internals.relay is not None:
            return {}
        return {pin.name: pin for pin in self.internals.main.latest().record.pins.values()}

    def fork(self, name: str, version: int | None = None, *, ttl_s: float | None = None) -> Store:
        """Fork a version (the head if None) into a branch with a separate log; return the store on it. Blocks.

        Version 0 of the branch has the version's state. The branch shares its segments, and starts without tags and
        channels. The version is kept as long as the branch exists. Nothing is copied, and branches cannot be merged.

        Parameters
        ----------
        ttl_s
            Seconds from now after which maintenance may close the branch. None: only `drop_branch` closes it.

        Raises
        ------
        BranchExists
            Also if an earlier call that failed created the branch: open it with `on_branch`.
        BadInput
            This is a branch: only versions of the store's own log can be forked.
        VersionNotFound, VersionExpired, BadName, CommitStateUnknown
        """
        return self._on(self._refs.fork(name, version, ttl_s))

    def on_branch(self, name: str) -> Store:
        """Return this store on a branch, with its own threads. Blocks.

        Raises
        ------
        BranchNotFound, VersionExpired, CorruptStore, CommitStateUnknown, StorageFailure
        """
        return self._on(self.internals.find_branch(name))

    def drop_branch(self, name: str) -> None:
        """Close a branch: its writers are fenced, its versions, tags and channels end, its name is free.

        Blocks. Garbage collection deletes its data later. Retry after a failure.

        Raises
        ------
        BranchNotFound, CorruptStore, CommitStateUnknown
        """
        self._refs.drop_branch(name)

    def lease(self, version: int | None = None, *, ttl_s: float = 3600.0) -> Lease:
        """Lease a version (the head if None): garbage collection keeps it until the lease ends. Blocks.

        Use it as a context manager during a long load, and renew it in time. A lease is advisory, and needs write
        access. A reader without write access depends on the grace period between expiry and deletion.

        Raises
        ------
        VersionNotFound, VersionExpired, BadInput, AccessDenied, StorageFailure
        """
        return self._versions.lease(version, ttl_s)

    def register_cursor(self, name: str, version: int, *, ttl_s: float | None = None) -> Cursor:
        """Create or move the cursor of consumer ``name``: ``version`` and all later ones are kept. Blocks.

        Parameters
        ----------
        ttl_s
            Seconds until the cursor expires unless it is set again. None: never; a dead consumer then keeps all data.

        Raises
        ------
        VersionNotFound, VersionExpired, BadName, BadInput, AccessDenied, StorageFailure
        """
        return self._versions.register_cursor(name, version, ttl_s)

    def cursors(self) -> dict[str, Cursor]:
        """Return the cursors of all branches by name, including ended ones."""
        return leases.read_cursors(self.storage)

    def drop_cursor(self, name: str) -> None:
        """Delete a consumer's cursor. Blocks.

        Raises
        ------
        NotFound, BadName, AccessDenied, StorageFailure
        """
        leases.drop_cursor(self.storage, name)

    def rollback(self, version: int) -> int:
        """Make an older version's state the head's; return the new version. Blocks; deletes nothing.

        A writer that is open elsewhere gets `Conflict` at its next commit and must restore. Of a version before the
        first save the state is empty: readers then have no tables (`cnr rollback` refuses it).

        Raises
        ------
        VersionNotFound, VersionExpired, Conflict, Fenced, CommitStateUnknown
        """
        return self._refs.rollback(version)

    def _on(self, branch: Branch) -> Store:
        store = Store(self.storage, self.identity, threads=self.internals.threads)
        store.internals.enter(self.internals.main, branch)
        return store


def open_segment(store: Store, version: int, index: int = -1) -> SegmentReader:
    """Return a reader of one segment of a version's chain, for tools that inspect objects."""
    return open_chain(store.storage, store.record(version).chain, store.internals.workers)[index]
