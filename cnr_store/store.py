"""The public object model: a `Store` opens snapshots and writers, and moves tags and the head."""

from __future__ import annotations

import datetime as dt
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, get_args

import msgspec

from cnr_store.errors import (
    BadInput,
    BranchNotFound,
    ChannelNotFound,
    CnrStoreError,
    CorruptStore,
    MissingObject,
    NotAStore,
    ReadOnlyStore,
    StorageFailure,
    StoreExists,
    TagExists,
    TagNotFound,
    VersionExpired,
    VersionNotFound,
)
from cnr_store.format import arrays, layout
from cnr_store.format.commit_record import DATA_KINDS, LogEntry, is_live, unknown_writer_features
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.identity import decode_identity, decode_relay_marker
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.format.records import (
    FORMAT,
    MAJOR,
    MINOR,
    CommitRecord,
    Cursor,
    Identity,
    Pin,
    RelayMarker,
    WriterInfo,
)
from cnr_store.log import beginning, branches, leases
from cnr_store.log.at_time import newest_at
from cnr_store.log.author import writer_info
from cnr_store.log.branches import Branch
from cnr_store.log.clock import check_clock, ms_of, wall_ms
from cnr_store.log.commit_log import CommitLog, RetryPolicy
from cnr_store.log.expiry import expired_by
from cnr_store.log.leases import Lease
from cnr_store.log.log_reader import position_bytes
from cnr_store.log.rebase import (
    draft_after,
    draft_init,
    rebase_channel,
    rebase_fence,
    rebase_rollback,
    rebase_tag,
    rebase_untag,
)
from cnr_store.read.snapshot import Snapshot
from cnr_store.runtime.arguments import checked_choice, checked_number
from cnr_store.runtime.ranks import OneRank, Ranks, rank_zero, together
from cnr_store.runtime.threads import Throttle, Workers, check_rate
from cnr_store.segment.chunk_cache import ChunkLru
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import Placement, check_placements, column_cuts
from cnr_store.storage import CreateOutcome, Storage, open_storage
from cnr_store.types import Profile, Rectangle
from cnr_store.write.mirrors import MirrorMode, Mirrors, check_mirror_folder
from cnr_store.write.writer import Writer
from cnr_store.write.writer_state import Session, Succession

MAX_EXPIRES_S = 10**10

_LOOK_BACK = 60
"""Polls without news before one asks whether there can be news: no record was deleted, a relay is the same one."""

READ_THREADS = 8
"""Threads that read from a remote store: while some wait for the network, others decode."""


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
        self,
        storage: Storage,
        identity: Identity,
        *,
        threads: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.identity = identity
        self.storage = storage
        self._workers = Workers(threads)
        reads_apart = threads is None and storage.is_remote and self._workers.threads < READ_THREADS
        self._read_workers = Workers(READ_THREADS, name="cnr-read") if reads_apart else self._workers
        self._threads = threads
        is_exclusive = identity.exclusive_create == "verified"
        self._main = CommitLog(
            storage, identity.store_uuid, is_exclusive=is_exclusive, retry=retry or RetryPolicy()
        )  # fmt: skip
        self._log = self._main
        self._has_first = True
        self._branch: Branch | None = None
        self._relay: RelayMarker | None = None
        self._idle_polls = 0

    @classmethod
    def create(
        cls,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        profile: Profile = "compact",
        fsync: bool = True,
        unsafe_single_writer: bool = False,
        threads: int | None = None,
    ) -> Store:
        """Create a store; the URL's folder must hold none.

        Parameters
        ----------
        url
            Any fsspec URL, or a local path.
        storage_options
            Passed to fsspec; they appear in no record, log or error.
        profile
            ``compact`` (pcodec) or ``portable`` (core Zarr codecs only).
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
        return cls.create_on(storage, profile=profile, threads=threads)

    @classmethod
    def create_on(
        cls,
        storage: Storage,
        *,
        profile: Profile = "compact",
        threads: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Store:
        """Create a store on opened storage; see `create`. ``retry`` bounds how long an unclear commit is pursued."""
        checked_choice("profile", profile, get_args(Profile))
        beginning.check_vacant(storage)
        now_ms = wall_ms()
        check_clock(storage, now_ms, may_be_behind=True)
        if storage.is_exclusive:
            storage.probe()
        identity = Identity(
            format=FORMAT, major=MAJOR, minor=MINOR, hash="sha256", profile=profile,
            store_uuid=uuid.uuid4().hex, created_ms=now_ms,
            exclusive_create="verified" if storage.is_exclusive else "unsafe_single_writer",
        )  # fmt: skip
        data = canonical_json(identity)
        outcome = storage.create(layout.IDENTITY, data)
        if outcome is not CreateOutcome.CREATED:
            found = storage.read(layout.IDENTITY, stop=len(data) + 1)
            if found is None:
                raise StorageFailure(
                    f"creating {layout.IDENTITY} in {storage.url} failed ({outcome.value}), and it is not there: no "
                    "store was made; try again, or open the store if that says it exists",
                    path=layout.IDENTITY, found=outcome.value,
                )  # fmt: skip
            if found != data:
                raise StoreExists(f"{storage.url} holds a store already; open it", path=storage.url)
        storage.put(
            layout.ROOT_GROUP, arrays.group_document({"cnr": {"format": FORMAT, "major": MAJOR, "minor": MINOR}})
        )
        storage.sync_folders([layout.ROOT_GROUP])
        store = cls(storage, identity, threads=threads, retry=retry)
        store._log.append_first(draft_init(writer_info(uuid.uuid4().hex), sha256(data)))
        return store

    @classmethod
    def open(
        cls,
        url: str,
        *,
        branch: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        fsync: bool = True,
        unsafe_single_writer: bool = False,
        threads: int | None = None,
    ) -> Store:
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
        cls,
        storage: Storage,
        *,
        branch: str | None = None,
        threads: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> Store:
        """Open a store on opened storage; see `open` and `create_on`."""
        data = storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES)
        if data is None:
            raise NotAStore(f"{storage.url} is not a cnr store: it has no {layout.IDENTITY}", path=storage.url)
        identity = decode_identity(data, f"{storage.url}/{layout.IDENTITY}")
        store = cls(storage, identity, threads=threads, retry=retry)
        if not beginning.has_begun(storage):
            marker = storage.read_document(layout.RELAY, MAX_SMALL_BYTES)
            store._has_first = marker is not None
            if marker is not None:
                store._enter_relay(decode_relay_marker(marker, identity.store_uuid, f"{storage.url}/{layout.RELAY}"))
        if branch is not None:
            store._enter(store._find_branch(branch))
        return store

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Snapshots and writers of this store end with it."""
        self._workers.close()
        self._read_workers.close()

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
        return None if self._branch is None else self._branch.name

    @property
    def branch_uuid(self) -> str:
        """The uuid of the branch whose log this is, empty for the store's own; of a relay, that of what it copies.

        With `uuid` it says what a version number means.
        """
        return layout.branch_of(self._log.prefix) if self._relay is None else self._relay.branch

    @property
    def relay(self) -> RelayMarker | None:
        """What this root says of itself if it is a relay, a copy to read from (spec, section 7.11); else None."""
        return self._relay

    def check_not_relay(self) -> None:
        """Refuse what changes a store where this is only a copy of one.

        Raises
        ------
        ReadOnlyStore
        """
        if self._relay is not None:
            raise ReadOnlyStore(
                f"{self.url} is a relay, a copy of {self._relay.source} to read from; do this at the source",
                path=self.url,
                found=self._relay.source,
            )

    def check_begun(self) -> None:
        """Refuse what may delete, or must find all of the log, where that has lost its beginning. One request.

        Raises
        ------
        CorruptStore
        VersionNotFound
            The creation of the store ended before its first record.
        """
        beginning.check_begun(self.storage, self._log.prefix, self._log.first)

    def finish_creation(self) -> None:
        """Write the first record for a process that died before it, as a writer, a tag or a fork does. No I/O else.

        Nothing that only reads writes it. Never in a log that was begun before and has lost its beginning.

        Raises
        ------
        CorruptStore, CommitStateUnknown, WrongClock, StorageFailure
        """
        if self._has_first:
            return
        try:
            self.check_begun()
        except VersionNotFound:
            check_clock(self.storage, wall_ms(), may_be_behind=True)
            identity = self.storage.read_document(layout.IDENTITY, MAX_SMALL_BYTES) or b""
            self._log.append_first(draft_init(writer_info(uuid.uuid4().hex), sha256(identity)))
        self._has_first = True

    @property
    def commit_log(self) -> CommitLog:
        """The log that this store appends to; for maintenance."""
        return self._log

    @property
    def workers(self) -> Workers:
        """The threads that this store works on."""
        return self._workers

    def head(self) -> LogEntry:
        """Return the newest log entry; a few GETs, no listing."""
        return self._log.latest()

    def latest_version(self) -> int:
        """Return the newest version."""
        return self.head().record.v

    def poll(self, after: LogEntry) -> LogEntry | None:
        """Return the entry behind ``after``, None when there is nothing new: one request, now and then some more.

        Raises
        ------
        CorruptStore
            The log was rewritten, or lost a record; or this is a relay that was begun anew in its place.
        StorageFailure
        """
        entry = self._log.poll(after)
        if entry is None:
            self._idle_polls += 1
            if self._idle_polls >= _LOOK_BACK:  # there may be nothing new for ever: a relay can begin further on
                check = self._log.check_no_hole if self._relay is None else self._check_same_relay
                check(after)
                self._idle_polls = 0
        return entry

    def log(self, newest: int | None = None, *, limit: int | None = None) -> Iterator[CommitRecord]:
        """Yield commit records, newest first, beginning with version ``newest`` (the head if None); one GET each."""
        for count, entry in enumerate(self._log.walk(self.head() if newest is None else self._entry(newest))):
            if limit is not None and count >= limit:
                return
            yield entry.record

    def record(self, version: int) -> CommitRecord:
        """Return the record of a version.

        Raises
        ------
        VersionNotFound
        """
        return self._entry(version).record

    def snapshot(
        self,
        version: int | None = None,
        *,
        step: int | None = None,
        tag: str | None = None,
        channel: str | None = None,
        time: dt.datetime | None = None,
        cache: ChunkLru | None = None,
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
        given = [value for value in (version, step, tag, channel, time) if value is not None]
        if len(given) > 1:
            raise BadInput("give at most one of version, step, tag, channel and time", found=len(given))
        head = self._readable_head()
        if channel is not None:
            version = _channel_of(head.record, channel)
        if tag is not None:
            tags = head.record.tags
            if tag not in tags:
                raise TagNotFound(f"no tag {tag!r}; there are {sorted(tags)}", found=tag)
            version = tags[tag]
        if version is not None:
            if 0 <= version < head.record.v:
                self._check_live(head.record, version)  # before its record is read: that may be what was given up
            entry = head if version == head.record.v else self._entry(version)
        elif step is not None:
            entry = self._by_step(head, step)
        elif time is not None:
            entry = self._by_time(head, ms_of(time))
        else:
            entry = head
        return self._open_snapshot(head.record, entry, cache)

    def writer(
        self,
        *,
        mirror: MirrorMode = "memory",
        mirror_folder: str | None = None,
        bytes_per_s: float | None = None,
        run_id: str | None = None,
        ranks: Ranks | None = None,
        shards: Placement | None = None,
        succession: Succession | None = None,
    ) -> Writer:
        """Become the store's committer: every earlier writer is fenced. Blocks for a few requests.

        With ``ranks``, all of them call this together and get writers that write one segment between them.

        The writer starts at the head without its mirrors: `Writer.restore` loads them, or begin with a ``full``.

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
        ranks = OneRank() if ranks is None else ranks
        if shards is None and ranks.world > 1:
            raise BadInput("several ranks write together only shards: say with shards= what this rank holds")
        checked_choice("mirror", mirror, get_args(MirrorMode))
        check_rate(bytes_per_s)
        # On all ranks before the first of them fences: where one cannot go on, none does.
        together(ranks, partial(check_mirror_folder, mirror, mirror_folder))
        info = writer_info(run_id or uuid.uuid4().hex)
        fenced: list[LogEntry] = []

        def open_committer() -> int:
            fenced.append(self._fence(info) if succession is None else self._entry(succession.version))
            return fenced[0].record.v

        version = rank_zero(ranks, open_committer)
        placed = {
            table: [[[int(end) for end in ends] for ends in (one.rows, one.columns)] for one in held]
            for table, held in (shards or {}).items()
        }
        answers = together(ranks, lambda: placed)
        placements = [
            {table: [Rectangle(tuple(rows), tuple(columns)) for rows, columns in held] for table, held in one.items()}
            for one in answers
        ]
        shapes = check_placements(placements)
        heads: list[LogEntry] = []
        together(ranks, lambda: heads.append(fenced[0] if fenced else self._entry(version)))
        return Writer(
            Session(
                self.storage, self._log, heads[0], self.identity.profile, info, self._workers,
                Mirrors(mirror, mirror_folder), Throttle(bytes_per_s),
                ranks=ranks, placement=None if shards is None else placements[ranks.rank], shapes=shapes,
                cuts=column_cuts(placements), succession=succession,
            )
        )  # fmt: skip

    def writable_head(self) -> LogEntry:
        """Return the newest entry if something may be written behind it, and probe the backend; for maintenance.

        Raises
        ------
        ReadOnlyStore, UnsafeBackend, CommitStateUnknown
        """
        self._log.check_exclusive()
        head = self._settled_head()
        if self.storage.is_exclusive:
            self.storage.probe()
        return head

    def _fence(self, info: WriterInfo) -> LogEntry:
        """Commit a fence: no earlier writer commits any more."""
        head = self.writable_head()
        draft = draft_after(head.record, "fence", info, epoch=head.record.epoch + 1)
        return self._log.append(head, draft, rebase_fence)

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
        layout.check_name(name)
        head = self._settled_head()
        target = self._live_entry(head, version).record.v
        if name in head.record.channels:
            raise TagExists(f"{name!r} is a channel; a tag needs a name of its own", version=head.record.channels[name])
        if head.record.tags.get(name, target) != target:
            raise TagExists(
                f"tag {name!r} points to version {head.record.tags[name]}; tags do not move, untag it first",
                version=head.record.tags[name],
            )
        tags = {**head.record.tags, name: target}
        draft = draft_after(head.record, "tag", writer_info(""), name=name, target=target, tags=tags)
        return self._log.append(head, draft, rebase_tag).record.v

    def untag(self, name: str) -> int:
        """Remove a tag; returns the version of the record that says so.

        Raises
        ------
        TagNotFound, CommitStateUnknown
        """
        head = self._settled_head()
        if name not in head.record.tags:
            raise TagNotFound(f"no tag {name!r}; there are {sorted(head.record.tags)}", found=name)
        tags = {key: value for key, value in head.record.tags.items() if key != name}
        draft = draft_after(head.record, "untag", writer_info(""), name=name, tags=tags)
        return self._log.append(head, draft, rebase_untag).record.v

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
        layout.check_name(name)
        head = self._settled_head()
        target = self._live_entry(head, version).record.v
        if name in head.record.tags:
            raise TagExists(f"{name!r} is a tag; a channel needs a name of its own", version=head.record.tags[name])
        channels = {**head.record.channels, name: target}
        draft = draft_after(head.record, "channel", writer_info(), name=name, target=target, channels=channels)
        return self._log.append(head, draft, rebase_channel).record.v

    def drop_channel(self, name: str) -> int:
        """Remove a channel; returns the version of the record that says so.

        Raises
        ------
        ChannelNotFound, CommitStateUnknown
        """
        head = self._settled_head()
        _channel_of(head.record, name)
        channels = {key: version for key, version in head.record.channels.items() if key != name}
        draft = draft_after(head.record, "channel", writer_info(), name=name, channels=channels)
        return self._log.append(head, draft, rebase_channel).record.v

    def branches(self) -> dict[str, Pin]:
        """Return branch names and what pins them: fork point and end. Of the whole store, on a branch too.

        A relay is a copy of one log, so it has none.
        """
        if self._relay is not None:
            return {}
        return {pin.name: pin for pin in self._main.latest().record.pins.values()}

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
        if self._branch is not None:
            raise BadInput(
                f"{self._place} cannot be forked: branches go on from the store's own log; fork a version of that",
                found=self._branch.name,
            )
        if expires_s is not None:
            checked_number("expires_s", expires_s, above=0, most=MAX_EXPIRES_S)
        head = self._settled_head()
        point = self._live_entry(head, version)
        expires_ms = None if expires_s is None else wall_ms() + int(1000 * expires_s)
        return self._on(branches.fork(self._main, head, point, name, writer_info(), expires_ms=expires_ms))

    def on_branch(self, name: str) -> Store:
        """Return this store on a branch, with threads of its own.

        Raises
        ------
        BranchNotFound, VersionExpired, CorruptStore, CommitStateUnknown, StorageFailure
        """
        return self._on(self._find_branch(name))

    def drop_branch(self, name: str) -> None:
        """End a branch: its writers are fenced, its versions, tags and channels are gone, its name is free.

        Its data goes with the next garbage collection. Call it again after a failure.

        Raises
        ------
        BranchNotFound, CorruptStore, CommitStateUnknown
        """
        self.check_not_relay()
        beginning.check_begun(self.storage)
        branch = branches.find_branch(self._main.latest().record, name)
        branches.close_branch(self._main, branch.uuid, writer_info())

    def lease(self, version: int | None = None, *, ttl_s: float = 3600.0) -> Lease:
        """Hold a version (the head if None) for a long load: garbage collection leaves it until the lease ends.

        Use it as a context manager, and renew it in time. Advisory, and needs write access; a reader without relies on
        the grace between expiry and deletion.

        Raises
        ------
        VersionNotFound, VersionExpired, BadInput, AccessDenied, StorageFailure
        """
        lease = leases.take_lease(self.storage, self._log, version, ttl_s=ttl_s, holder=writer_info().host)
        try:
            self.check_held(lease.version)
        except BaseException:
            lease.release()
            raise
        return lease

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
        self.check_held(version)
        holder = writer_info().host
        return leases.put_cursor(self.storage, self._log, name, version, ttl_s=ttl_s, holder=holder)

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
        head = self._settled_head()
        target = self._live_entry(head, version).record
        draft = draft_after(
            head.record, "rollback", writer_info(""),
            target=version, chain=target.chain, tables=target.tables, logical=target.logical, step=target.step,
        )  # fmt: skip
        return self._log.append(head, draft, rebase_rollback).record.v

    def _enter_relay(self, marker: RelayMarker) -> None:
        self._relay = marker
        self._main = self._log = self._main.starting_at(marker.first)

    def _check_same_relay(self, seen: LogEntry) -> None:
        key = layout.commit_key(seen.record.v)
        data = position_bytes(self.storage, seen.record.v)
        if data is None or sha256(data) != seen.digest:
            raise CorruptStore(
                f"the relay {self.url} has not got record {seen.record.v} any more that was read there: it was begun "
                "anew; open it again",
                version=seen.record.v, path=key, expected=seen.digest,
            )  # fmt: skip

    def check_held(self, version: int) -> None:
        """Refuse a version that this is a relay without. One GET for its record and a small one for each segment.

        Raises
        ------
        VersionExpired
            A relay begins behind it, or lacks one of its segments. No other store refuses anything here.
        VersionNotFound, CorruptStore, StorageFailure
        """
        if self._relay is None or version < 0:
            return
        for item in self._entry(version).record.chain:
            if not self._has_segment(item.seg):
                raise self._not_held(version)

    def _has_segment(self, segment: str) -> bool:
        """Whether a relay holds a segment: its manifest is put last, and deleted first."""
        return self.storage.read(layout.segment_key(segment, layout.MANIFEST), stop=1) is not None

    def _is_let_go(self, missing: MissingObject) -> bool:
        """Whether a relay lacks the whole segment of a missing object, so that this is no damage."""
        segment = (missing.path or "").removeprefix(layout.DATA).partition("/")[0]
        try:
            return layout.is_segment_name(segment) and not self._has_segment(segment)
        except CnrStoreError:
            return False  # What is missing is the error to tell.

    def _not_held(self, version: int) -> VersionExpired:
        marker = self._relay
        source, first = ("its source", 0) if marker is None else (marker.source, marker.first)
        return VersionExpired(
            f"the relay {self.url} does not hold version {version} (any more); it copies {source} from version {first} "
            "on and keeps the newest ones: take a newer one here, or this one at the source",
            version=version,
        )

    def _find_branch(self, name: str) -> Branch:
        """The branch of this name, by the store's log."""
        if self._relay is not None:
            raise ReadOnlyStore(
                f"{self.url} is a relay of one log of {self._relay.source}, without its branches; open the branch "
                "there, or run a relay of it",
                path=self.url,
            )
        branch = branches.find_branch(_newest_or_warn(self._main).record, name)
        if branch.is_expired(wall_ms()):
            raise VersionExpired(
                f"branch {name!r} of {self.url} expired at {branch.pin.expires_ms} ms; drop it, and fork anew",
                version=branch.pin.version,
            )
        return branch

    def _on(self, branch: Branch) -> Store:
        store = Store(self.storage, self.identity, threads=self._threads)
        store._main = self._main
        store._enter(branch)
        return store

    def _enter(self, branch: Branch) -> None:
        self._log = branches.log_of(self._main, branch)
        self._has_first = branches.has_first(self._log, branch)
        self._branch = branch

    @property
    def _place(self) -> str:
        """The URL, and the branch if this is one: for messages."""
        return self.url if self._branch is None else f"branch {self._branch.name!r} of {self.url}"

    def _settled_head(self) -> LogEntry:
        """The newest entry, which something may follow, once an earlier append of this store is known to be there."""
        self.check_not_relay()
        self.finish_creation()
        self._log.resolve()
        head = self.head()
        self._check_open(head)
        unknown = unknown_writer_features(head.record)
        if unknown:
            raise ReadOnlyStore(
                f"{self._place} uses writer features {unknown} that this library does not know; it can only be read",
                found=unknown,
            )
        return head

    def _check_open(self, head: LogEntry) -> None:
        if head.record.kind == "close":
            raise BranchNotFound(f"{self._place} was dropped; fork another", found=self.branch)

    def _readable_head(self) -> LogEntry:
        head = _newest_or_warn(self._log)
        self._check_open(head)
        return head

    def _entry(self, version: int, *, or_superseding: bool = False) -> LogEntry:
        read = self._log.read_standing if or_superseding else self._log.read
        entry = read(version) if version >= 0 else None
        if entry is None:
            if self._relay is not None and 0 <= version < self._relay.first:
                raise self._not_held(version)
            raise VersionNotFound(f"{self._place} has no version {version}", version=version)
        return entry

    def _live_entry(self, head: LogEntry, version: int | None) -> LogEntry:
        """The entry of a version (the head if None) whose segments can be opened."""
        entry = head if version is None or version == head.record.v else self._entry(version)
        tables = self._open_snapshot(head.record, entry).generations
        return replace(entry, record=msgspec.structs.replace(entry.record, tables=tables))

    def _by_step(self, head: LogEntry, step: int) -> LogEntry:
        """The newest version of the newest checkpoint of that step, or an older one where only that is still live."""
        newest: LogEntry | None = None
        for entry in self._log.walk(head):
            record = entry.record
            # A branch starts with the state of its fork point, and compaction makes a newer version of the same one.
            is_state = record.kind in DATA_KINDS or record.kind == "compact" or record.v == 0
            if not (record.step == step and record.chain and is_state):
                continue
            newest = newest or entry
            if record.logical == newest.record.logical:
                if is_live(head.record, record.v):
                    return entry
                if record.kind in ("full", "delta"):
                    break
        if newest is None:
            since = "" if self._relay is None else f"; it is a relay that begins at version {self._relay.first}"
            raise VersionNotFound(f"{self._place} has no checkpoint of step {step}{since}", found=step)
        return newest

    def _by_time(self, head: LogEntry, time_ms: int) -> LogEntry:
        read = partial(self._entry, or_superseding=True)
        found = newest_at(time_ms, head, self._log.first, read, self._log.walk)
        if found is None:
            if self._log.first > 0:
                raise self._not_held(self._log.first - 1)
            raise VersionNotFound(f"{self._place} has no version at or before time {time_ms} ms", found=time_ms)
        return found

    def _open_snapshot(self, head: CommitRecord, entry: LogEntry, cache: ChunkLru | None = None) -> Snapshot:
        version = entry.record.v
        self._check_live(head, version)

        if_missing = partial(self.tell_of_expiry, version)
        return Snapshot(self.storage, entry, self._read_workers, if_missing=if_missing, cache=cache)

    def tell_of_expiry(self, version: int, missing: MissingObject) -> None:
        """Say what is behind an object that is missing of a version, if that is no damage. A few GETs.

        Raises
        ------
        VersionExpired
            The version has expired since, and outlived the grace of readers; or this relay has let it go.
        """
        expired = expired_by(self._log, version)
        if expired is not None:
            raise self._expired(expired, version) from missing
        if self._relay is None or version < 0:
            return
        try:
            # The newest version of a relay is whole at any time; of an older one it may have let segments go.
            is_gone = version != self.head().record.v and self._is_let_go(missing)
        except CnrStoreError:
            return  # What is missing is the error to tell.
        if is_gone:
            raise self._not_held(version) from missing

    def _check_live(self, head: CommitRecord, version: int) -> None:
        if not is_live(head, version):
            raise self._expired(head, version)

    def _expired(self, head: CommitRecord, version: int) -> VersionExpired:
        return VersionExpired(
            f"version {version} of {self._place} has expired; the floor is {head.floor}", version=version
        )


def open_segment(store: Store, version: int, index: int = -1) -> SegmentReader:
    """Return one segment of a version's chain, for tools that look at objects."""
    return SegmentReader.open(store.storage, store.record(version).chain[index])


def _newest_or_warn(log: CommitLog) -> LogEntry:
    entry, torn = log.newest_readable()
    if torn is not None:
        warnings.warn(f"{torn}; serving version {entry.record.v}", RuntimeWarning, stacklevel=4)
    return entry


def _channel_of(head: CommitRecord, name: str) -> int:
    if name not in head.channels:
        raise ChannelNotFound(f"no channel {name!r}; there are {sorted(head.channels)}", found=name)
    return head.channels[name]
