"""Going on from a state that was restored: the writer's epoch, taken no earlier than a training saves or steps.

A restore reads, and so may stand beside a training that goes on (an evaluation). Only who goes on writes: a fence, and
a rollback where the state is not the head's. Both only while nobody else has gone on from what was restored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cnr_store.errors import StorageFailure, VersionExpired
from cnr_store.format.commit_record import LogEntry, is_live
from cnr_store.format.records import WriterInfo
from cnr_store.log.log_reader import LogEnd
from cnr_store.log.rebase import draft_after, rebase_succession
from cnr_store.maintenance.repair import return_to
from cnr_store.store import Store


@dataclass(slots=True, eq=False)
class TakeOver:
    """How a writer comes to its epoch, once it goes on from a version: see `cnr_store.write.writer_state.Succession`.

    Parameters
    ----------
    store
        What it goes on in.
    version
        The version whose state is restored.
    newest, torn
        The newest record when that was chosen, and the sha256 of each position behind it that could not be read.
    """

    store: Store
    version: int
    newest: int
    torn: tuple[str, ...] = ()
    _head: LogEntry | None = None
    _sent: LogEntry | None = None
    _steps: list[Callable[[LogEntry, WriterInfo], LogEntry]] = field(default_factory=list)

    def take(self, info: WriterInfo) -> LogEntry:
        """Commit what is missing yet of fence and rollback; return the last of them. Blocks; safe to call again.

        Raises
        ------
        Conflict
            Somebody else has gone on behind `newest`.
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
            self._steps = [self._roll_back, self._fence]  # nothing can be put behind them before they are superseded
        elif target.record.chain != newest.record.chain:
            # In this order: a writer that meets the rollback alone would take it for its own to follow.
            self._steps = [self._fence, self._roll_back]
        else:
            self._steps = [self._fence]
        self._head = newest
        return newest

    def _learn(self) -> LogEntry:
        """What became of a step whose outcome was not known."""
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
