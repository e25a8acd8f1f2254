"""The store and the writer of a training: how the store is opened, and when the writer takes it over.

A restore alone only reads, so an evaluation may restore while another process trains. The first step or save after it
has the background commit a fence, and a rollback if the restored state is not the head's. Both fail if another writer
has saved since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from cnr_store.errors import NotAStore, StorageFailure, VersionExpired
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.records import WriterInfo
from cnr_store.log.log_reader import LogEnd
from cnr_store.log.rebase import draft_after, rebase_succession
from cnr_store.maintenance.repair import return_to
from cnr_store.runtime.ranks import Ranks, rank_zero
from cnr_store.segment.shards import Placement
from cnr_store.store import Store
from cnr_store.training.options import StoreOptions
from cnr_store.training.peers import PeerMemory
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer


@dataclass(slots=True, eq=False)
class TakeOver:
    """How a writer gets its epoch when it continues a version: see `cnr_store.write.writer_state.Succession`.

    Parameters
    ----------
    store
        The store to continue.
    version
        The version whose state is restored.
    newest, torn
        The newest record when `version` was chosen, and the sha256 of each later position that could not be read.
    """

    store: Store
    version: int
    newest: int
    torn: tuple[str, ...] = ()
    _head: LogEntry | None = None
    _sent: LogEntry | None = None
    _steps: list[Callable[[LogEntry, WriterInfo], LogEntry]] = field(default_factory=list)

    def take(self, info: WriterInfo) -> LogEntry:
        """Commit the fence and rollback that are still missing; return the last record. Blocks; safe to call again.

        Raises
        ------
        Conflict
            Another writer has continued from that state after `newest`.
        VersionExpired
            The version that was restored is not live any more.
        Fenced, CommitStateUnknown, CorruptStore, ReadOnlyStore, UnsafeBackend, WrongClock, StorageFailure
        """
        if not self.torn:
            self.store.internals.writable_head()
        head = self._learn() if self._head is not None else self._plan()
        while self._steps:
            head = self._head = self._append(head, info)
            self._steps.pop(0)
        return head

    def _plan(self) -> LogEntry:
        newest, target = self._read(self.newest), self._read(self.version)
        if self.torn:
            self._steps = [self._roll_back, self._fence]  # torn positions must be superseded before a fence
        elif target.record.chain != newest.record.chain:
            # Fence first: an old writer that saw only the rollback would continue from it.
            self._steps = [self._fence, self._roll_back]
        else:
            self._steps = [self._fence]
        self._head = newest
        return newest

    def _learn(self) -> LogEntry:
        """Look up whether the last append was committed; return the newest record."""
        assert self._head is not None
        entry = None if self._sent is None else self.store.internals.log.resolve(self._sent)
        self._sent = None
        if entry is not None:
            self._head = entry
            self._steps.pop(0)
        return self._head

    def _append(self, head: LogEntry, info: WriterInfo) -> LogEntry:
        log = self.store.internals.log
        with log.exclusive():
            leftover = log.unresolved_entry
            try:
                return self._steps[0](head, info)
            except BaseException:
                if log.unresolved_entry is not leftover:
                    self._sent = log.unresolved_entry
                raise

    def _fence(self, head: LogEntry, info: WriterInfo) -> LogEntry:
        draft = draft_after(head.record, "fence", info, epoch=head.record.epoch + 1)
        return self.store.internals.log.append(head, draft, rebase_succession)

    def _roll_back(self, head: LogEntry, info: WriterInfo) -> LogEntry:
        target = self._read(self.version).record
        if not is_live(head.record, target.v):
            raise VersionExpired(
                f"version {target.v}, which was restored, has expired; the floor is {head.record.floor}: restore "
                "another one",
                version=target.v, expected=head.record.floor,
            )  # fmt: skip
        tail = LogEnd(head.record.v + len(self.torn), head, self.torn)
        return return_to(self.store, tail, target, info=info)

    def _read(self, version: int) -> LogEntry:
        entry = self.store.internals.log.read(version)
        if entry is None:
            raise StorageFailure(f"commit record {version} was read and cannot be seen any more", version=version)
        return entry


@dataclass(slots=True, eq=False)
class TrainingWriter:
    """Holds at most one writer. All ranks call every method but `close` together.

    Attributes
    ----------
    current
        None before the first save, during a restore, and after a commit that conflicted with another one.
    opening
        What `prepare` began, until `ready` returns or raises what it became. Nothing else may use the writer before it
        is done.
    """

    store: Store
    options: StoreOptions
    ranks: Ranks
    placement: Placement | None
    peers: PeerMemory | None = None
    current: Writer | None = field(default=None, init=False)
    opening: Future[Writer] | None = field(default=None, init=False)

    @contextmanager
    def continuing(self, take_over: TakeOver) -> Iterator[Writer]:
        """Close the current writer and open one for the block that puts a version in place: `current` from then on.

        It writes nothing there. After an error in the block it is closed. Blocks.
        """
        self.close()
        writer = self._open(take_over)
        try:
            yield writer
        except BaseException:
            writer.close()
            raise
        self.current = writer

    def _open(self, take_over: TakeOver | None) -> Writer:
        options = self.options
        return self.store.writer(
            mirror=options.mirror, mirror_folder=options.mirror_folder, bytes_per_s=options.bytes_per_s,
            ranks=self.ranks, shards=self.placement, key_rule=options.key_rule,
            keyed_mirror_bytes=options.keyed_mirror_bytes, succession=take_over,
        )  # fmt: skip

    def prepare(self, call: Callable[[Callable[[], Writer]], Future[Writer]]) -> None:
        """Begin to open a writer, if there is none, and to take the store over by ``call``, unless that has begun."""
        if self.opening is None:
            self.opening = call(self._take_over)

    def wait(self) -> None:
        """Wait for what `prepare` began, whatever it becomes."""
        if self.opening is not None:
            wait([self.opening])

    def ready(self, call: Callable[[Callable[[], Writer]], Future[Writer]]) -> Writer:
        """Return the current writer, once it has taken the store over: `prepare` it, and wait.

        The first requests of a save are those of its background: beginning it needs none. After an error call it again.
        """
        self.prepare(call)
        self.wait()  # Ctrl-C does not end it
        opening, self.opening = self.opening, None
        assert opening is not None  # it has begun
        self.current = opening.result()
        return self.current

    def _take_over(self) -> Writer:
        writer = self._open(None) if self.current is None else self.current
        try:
            writer.prepare()
        except BaseException:
            if writer is not self.current:
                writer.close()
            raise
        return writer

    def close(self) -> None:
        """Close the writer, if there is one, and forget what `prepare` began."""
        self.opening = None
        if self.current is not None:
            self.current.close()
            self.current = None

    @property
    def after_save(self) -> Callable[[Transaction], None] | None:
        """What is to be done behind each save, by the thread that saves; None for nothing."""
        return None if self.peers is None else self._pass_on

    def _pass_on(self, transaction: Transaction) -> None:
        """Give peers what a save has put, if it is committed. Blocks."""
        if self.peers is not None and self.current is not None:
            self.peers.saved(None if transaction.version is None else self.current.head.record.chain)

    @property
    def mirror_bytes(self) -> int:
        """Bytes that the code mirrors take now."""
        return 0 if self.current is None else self.current.mirror_bytes


def open_or_create(url: str | os.PathLike[str], options: StoreOptions, ranks: Ranks) -> Store:
    """Return the store at a URL, created if there is none; or its branch, which must be there.

    Blocks; all ranks call it, and rank 0 opens it first.
    """
    opened: list[Store] = []

    def open_here() -> None:
        try:
            store = Store.open(
                url, branch=options.branch, storage_options=options.storage_options, threads=options.threads
            )
        except NotAStore:
            if options.branch is not None:
                raise
            store = Store.create(url, storage_options=options.storage_options, threads=options.threads)
        else:
            store.internals.finish_creation()
        opened.append(store)

    rank_zero(ranks, open_here)  # it may have to create it, which only one can
    if not opened:
        open_here()
    return opened[0]
