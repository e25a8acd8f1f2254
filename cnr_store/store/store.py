"""The public object model: a `Store` opens snapshots and writers, and moves tags and the head."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Any

from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json
from cnr_store.format.records import CommitRecord, Cursor, Identity, Pin, RelayMarker
from cnr_store.log import leases
from cnr_store.log.branches import Branch
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.log.leases import Lease
from cnr_store.read.snapshot import Snapshot
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
from cnr_store.write.mirrors import MirrorMode
from cnr_store.write.writer import Writer
from cnr_store.write.writer_state import Succession


class Store:
    """One checkpoint store at a URL, or one branch of it. Opening it reads ``cnr.json``; nothing is cached but that.

    On a branch, versions, tags and channels are the branch's own; `fork`, `branches` and `drop_branch` are the store's.

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
        cls, url: str, *, storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True, unsafe_single_writer: bool = False, threads: int | None = None,
    ) -> Store:  # fmt: skip
        """Create a store; the URL's folder must hold none.

        Parameters
        ----------
        url
            Any fsspec URL, or a local path.
        storage_options
            Passed to fsspec; they appear in no record, log or error.
        fsync
            Whether local files are made durable before a commit.
        unsafe_single_writer
            Accept a backend that cannot create objects exclusively; then only one process may ever write. The store
            remembers it: whoever opens it to write must say so again.

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
        """Create a store on opened storage; see `create`. ``retry`` bounds how long an unclear commit is pursued."""
        identity = create_identity(storage)
        store = cls(storage, identity, threads=threads, retry=retry)
        begin_log(storage, store.internals.log, canonical_json(identity))
        return store

    @classmethod
    def open(
        cls, url: str, *, branch: str | None = None, storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True, unsafe_single_writer: bool = False, threads: int | None = None,
    ) -> Store:  # fmt: skip
        """Open a store, or the branch of that name, for reading and, through `writer`, for writing. Writes nothing.

        Parameters
        ----------
        unsafe_single_writer
            As for `create`: to write to a store that was created so, and to no other.

        Raises
        ------
        BranchNotFound, VersionExpired
            There is no such branch, or its time is over.
        NotAStore, NewerFormat, AccessDenied, StorageFailure
        CorruptStore
            The identity is damaged. A log that is damaged, or not begun yet, is told by whatever reads it.
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
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Snapshots and writers of this store end with it."""
        self.internals.close()

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""
        return self.storage.url

    @property
    def uuid(self) -> str:
        """The store's own uuid, the same on its branches."""
        return self.identity.store_uuid

    @property
    def branch(self) -> str | None:
        """The name of the branch that this is, or None."""
        branch = self.internals.branch
        return None if branch is None else branch.name

    @property
    def relay(self) -> RelayMarker | None:
        """What this root says of itself if it is a relay, a copy to read from (spec, section 7.11); else None."""
        guard = self.internals.relay
        return None if guard is None else guard.marker

    def head(self) -> LogEntry:
        """Return the newest log entry; a few GETs, no listing."""
        return self.internals.log.latest()

    def latest_version(self) -> int:
        """Return the newest version."""
        return self.head().record.v

    def steps(self) -> list[int]:
        """Return the steps that a snapshot can be opened at, ascending; reads each record of the log."""
        return self._versions.steps(self.head())

    def poll(self, after: LogEntry) -> LogEntry | None:
        """Return the entry behind ``after``, None when there is nothing new: one request, now and then some more.

        Raises
        ------
        CorruptStore, StorageFailure
        """
        return self.internals.poll(after)

    def log(self, newest: int | None = None, *, limit: int | None = None) -> Iterator[CommitRecord]:
        """Yield commit records, newest first, beginning with version ``newest`` (the head if None); one GET each."""
        start = self.head() if newest is None else self.internals.entry(newest)
        for count, entry in enumerate(self.internals.log.walk(start)):
            if limit is not None and count >= limit:
                return
            yield entry.record

    def record(self, version: int) -> CommitRecord:
        """Return the record of a version.

        Raises
        ------
        VersionNotFound
        """
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
        """Open a state: the latest, or that of a version, training step, tag, channel or time (at most one of them).

        By step, the newest version that saved that step wins, so after a rollback the run that went on. By time, the
        last version committed at or before it.

        Parameters
        ----------
        time
            One without a zone is of this machine's.
        cache
            Keeps what `TableView.read_rows` decodes, for later look-ups; several snapshots of this store may share it.

        Raises
        ------
        BadInput, VersionNotFound, VersionExpired, TagNotFound, ChannelNotFound, BranchNotFound, CorruptStore
        """
        head = self.internals.readable_head()
        entry = self._versions.find(head, version=version, step=step, tag=tag, channel=channel, time=time)
        return self._versions.open(head.record, entry, cache)

    def writer(
        self, *, mirror: MirrorMode = "memory", mirror_folder: str | None = None, bytes_per_s: float | None = None,
        run_id: str | None = None, ranks: Ranks | None = None, shards: Placement | None = None,
        succession: Succession | None = None,
    ) -> Writer:  # fmt: skip
        """Become the store's committer: every earlier writer is fenced. Blocks for a few requests.

        With ``ranks``, all of them call this together and get writers that write one segment between them.

        The writer starts at the head without its mirrors: `Writer.restore` loads them, or begin with a ``baseline``.

        Parameters
        ----------
        mirror
            ``memory``, ``mmap`` (files under ``mirror_folder``, which must be there; None: where the system has its
            temporary files) or ``none``.
        bytes_per_s
            Cap on the bandwidth of saves, of this rank.
        ranks
            The ranks that write together; None is this process alone.
        shards
            Table to the rectangles that this rank holds; the ranks' rectangles tile each table. None holds every table
            whole, and is only for one rank.
        succession
            Fence nobody before `Writer.take_over` or the first `Writer.begin`: until then the writer reads, and
            `Writer.restore` loads the version that this names.

        Raises
        ------
        ReadOnlyStore, UnsafeBackend, CommitStateUnknown
        BadInput
            The ranks' shards leave gaps, or overlap; ``bytes_per_s`` lets nothing pass; there is no ``mirror_folder``.
        """
        return open_writer(
            self.internals, mirror=mirror, mirror_folder=mirror_folder, bytes_per_s=bytes_per_s, run_id=run_id,
            ranks=OneRank() if ranks is None else ranks, shards=shards, succession=succession,
        )  # fmt: skip

    def tags(self) -> dict[str, int]:
        """Return tag names and their versions."""
        return dict(self.head().record.tags)

    def tag(self, name: str, version: int | None = None) -> int:
        """Name a version (the head if None) for ever; returns the version of the record that says so.

        Raises
        ------
        TagExists
            The name is a tag of another version, or a channel.
        VersionNotFound, VersionExpired, BadName, CommitStateUnknown
        """
        return self._refs.tag(name, version)

    def untag(self, name: str) -> int:
        """Remove a tag; returns the version of the record that says so.

        Raises
        ------
        TagNotFound, CommitStateUnknown
        """
        return self._refs.untag(name)

    def channels(self) -> dict[str, int]:
        """Return channel names and the versions that they point to now."""
        return dict(self.head().record.channels)

    def set_channel(self, name: str, version: int | None = None) -> int:
        """Point a channel to a version (the head if None), a new one or one that points elsewhere.

        Of two that move a channel at once the later record wins. A reader that polls finds the move in the next record.
        The version stays as long as the channel points to it. Returns the version of the record that says so.

        Raises
        ------
        TagExists
            The name is a tag: tags do not move.
        VersionNotFound, VersionExpired, BadName, CommitStateUnknown
        """
        return self._refs.set_channel(name, version)

    def drop_channel(self, name: str) -> int:
        """Remove a channel; returns the version of the record that says so.

        Raises
        ------
        ChannelNotFound, CommitStateUnknown
        """
        return self._refs.drop_channel(name)

    def branches(self) -> dict[str, Pin]:
        """Return branch names and what pins them: fork point and end. Of the whole store, on a branch too.

        A relay is a copy of one log, so it has none.
        """
        if self.internals.relay is not None:
            return {}
        return {pin.name: pin for pin in self.internals.main.latest().record.pins.values()}

    def fork(self, name: str, version: int | None = None, *, expires_s: float | None = None) -> Store:
        """Branch off a version (the head if None) into a log of its own, and return the store on that branch.

        The branch starts with the version's state as its version 0, shares the segments, and takes over neither tags
        nor channels. The version stays as long as the branch does. Nothing is copied, and there is no merge.

        Parameters
        ----------
        expires_s
            When maintenance may end the branch: so many seconds from now. None: only `drop_branch` ends it.

        Raises
        ------
        BranchExists
            Also where an earlier call was interrupted behind its last step, or its outcome unknown, after all:
            `on_branch` opens it.
        BadInput
            From a branch: fork from the store's own log.
        VersionNotFound, VersionExpired, BadName, CommitStateUnknown
        """
        return self._on(self._refs.fork(name, version, expires_s))

    def on_branch(self, name: str) -> Store:
        """Return this store on a branch, with threads of its own.

        Raises
        ------
        BranchNotFound, VersionExpired, CorruptStore, CommitStateUnknown, StorageFailure
        """
        return self._on(self.internals.find_branch(name))

    def drop_branch(self, name: str) -> None:
        """End a branch: its writers are fenced, its versions, tags and channels are gone, its name is free.

        Its data goes with the next garbage collection. Call it again after a failure.

        Raises
        ------
        BranchNotFound, CorruptStore, CommitStateUnknown
        """
        self._refs.drop_branch(name)

    def lease(self, version: int | None = None, *, ttl_s: float = 3600.0) -> Lease:
        """Hold a version (the head if None) for a long load: garbage collection leaves it until the lease ends.

        Use it as a context manager, and renew it in time. Advisory, and needs write access; a reader without relies on
        the grace between expiry and deletion.

        Raises
        ------
        VersionNotFound, VersionExpired, BadInput, AccessDenied, StorageFailure
        """
        return self._versions.lease(version, ttl_s)

    def register_cursor(self, name: str, version: int, *, ttl_s: float | None = None) -> Cursor:
        """Say that consumer ``name`` stands at ``version``: it and every later version stay. Call it again to move.

        Parameters
        ----------
        ttl_s
            For how long, without another call. None: until `drop_cursor`; a consumer that died then holds all data.

        Raises
        ------
        VersionNotFound, VersionExpired, BadName, BadInput, AccessDenied, StorageFailure
        """
        return self._versions.register_cursor(name, version, ttl_s)

    def cursors(self) -> dict[str, Cursor]:
        """Return the registered cursors by name, of all branches, ended ones too."""
        return leases.read_cursors(self.storage)

    def drop_cursor(self, name: str) -> None:
        """Forget a consumer's cursor.

        Raises
        ------
        NotFound, BadName, AccessDenied, StorageFailure
        """
        leases.drop_cursor(self.storage, name)

    def rollback(self, version: int) -> int:
        """Make an older version's state the head's; returns the new version. Nothing is deleted.

        A writer that is open elsewhere gets `Conflict` at its next commit and must restore.

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
    """Return one segment of a version's chain, for tools that look at objects."""
    return open_chain(store.storage, store.record(version).chain, store.internals.workers)[index]
