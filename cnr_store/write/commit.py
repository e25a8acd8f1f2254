"""One commit, by one writer or by all ranks of a training: shares, receipts, manifest, log position, outcome.

The order (spec, section 7.2): every rank writes its share, and all but rank 0 then a receipt; rank 0 reads these back,
puts the manifest over all shares and takes the log position; all ranks learn the outcome; then mirrors are updated.
A failure before the log position leaves only orphans. After an unknown outcome the writer refuses work until the
position has been read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cnr_store.errors import (
    BadInput,
    CnrStoreError,
    CommitStateUnknown,
    Conflict,
    CorruptStore,
    RankLost,
    StorageFailure,
    TransactionAborted,
)
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.documents import canonical_json, sha256
from cnr_store.format.layout import writer_name
from cnr_store.format.records import (
    MAJOR,
    ChainEntry,
    CommitRecord,
    Manifest,
    Receipt,
    SegmentDocument,
    TableSchema,
)
from cnr_store.log.rebase import check_not_given_up, draft_after, rebase_data
from cnr_store.runtime.ranks import described, rank_zero, rebuilt, together
from cnr_store.segment.reader import SegmentReader, read_receipt
from cnr_store.segment.writer import merge_receipts, write_manifest
from cnr_store.types import JsonValue
from cnr_store.write.commit_checks import check_coverage, check_receipts, next_chain
from cnr_store.write.staged_segment import StagedSegment
from cnr_store.write.writer_state import WriterState

logger = logging.getLogger(__name__)


class Commit:
    """The commit of one transaction.

    Attributes
    ----------
    version
        The committed version, once it is known.
    undecided
        The record that rank 0 sent, if it could not learn whether that stands in the log.
    size_bytes
        Bytes of the segment, of all ranks.
    manifest
        That of the segment, where this rank wrote it.
    """

    def __init__(self, state: WriterState, staged: StagedSegment) -> None:
        self.version: int | None = None
        self.undecided: LogEntry | None = None
        self.size_bytes = 0
        self._state, self._staged = state, staged
        self._has_answered = False
        self._receipt: Receipt | None = None
        self.manifest: Manifest | None = None
        self._decision: _Decided | None = None

    # ---- before and instead of it

    def leave(self) -> None:
        """Note that the other ranks know that the save is over, and wait for no answer of this one."""
        self._has_answered = True

    def refuse(self) -> None:
        """Send to the other ranks, unless they know, that this one aborts; blocks until they commit or abort too."""
        ranks = self._state.setup.ranks
        if ranks.world > 1 and not self._has_answered:
            self._has_answered = True
            with contextlib.suppress(CnrStoreError):
                together(ranks, self._give_up)

    def _give_up(self) -> None:
        raise TransactionAborted(
            f"rank {self._state.setup.ranks.rank} gave up the save of step {self._staged.draft.step}"
        )

    # ---- the commit

    def check_alone(self, user: Mapping[str, JsonValue]) -> None:
        """Raise `BadInput` if the commit of a writer without other ranks lacks something. Blocks."""
        self._follow_compactions()
        self._staged.check_complete(user)

    def _follow_compactions(self) -> None:
        """Go on from what compactions have made of the chain since the save was begun, if this one reads the chain.

        Blocks for a request; all ranks call it.
        """
        draft, state = self._staged.draft, self._state
        if state.head.record.chain and (draft.kind == "baseline" or draft.is_one_shot):
            state.follow()
            draft.move_to(state.head.record)

    def run(self, user: Mapping[str, JsonValue] | None) -> int:
        """Commit with all ranks; returns the version, or raises as `Transaction.commit`. Blocks."""
        ranks = self._state.setup.ranks
        self._has_answered = True
        handed_over = False
        try:
            if ranks.world > 1:
                self._follow_compactions()
            answers = together(ranks, partial(self._write_share, user))
            handed_over = True
            outcome = rank_zero(ranks, partial(self._decide, answers, user))
        except BaseException as error:
            self._end_without_outcome(error, handed_over=handed_over)
            raise
        return self._take(_Announced(**outcome))

    def _write_share(self, user: Mapping[str, JsonValue] | None) -> dict[str, Any]:
        """Write this rank's objects and its receipt, if it has one; returns what rank 0 needs to find it."""
        if self._state.setup.ranks.world > 1:
            self._staged.check_complete(user)
        with self._telling_if_given_up():
            self._receipt, digest = self._staged.write()
        # A single rank agrees with itself, and the schemas of a thousand tables are long.
        schemas = _digest_of(self._staged.schemas.tables) if self._state.setup.ranks.world > 1 else ""
        return {"attempt": self._receipt.attempt, "digest": digest, "tables": schemas}

    def _decide(self, answers: Sequence[Mapping[str, Any]], user: Mapping[str, JsonValue] | None) -> dict[str, Any]:
        """On rank 0: merge the receipts, write the manifest, append the record. Errors are part of what it returns."""
        state = self._state
        self._decision = decision = _Decided()
        try:
            with self._telling_if_given_up():
                entry = self._write_manifest(self._receipts(answers))
            record, segment = state.head.record, self._staged.draft
            draft = draft_after(
                record, segment.kind, state.setup.info,
                chain=next_chain(record, entry, keep=segment.keep), checkpoint=entry.l1, step=segment.step,
                user=dict(user or {}),
            )  # fmt: skip
            decision.entry = self._append(draft)
        except BaseException as error:  # noqa: BLE001 (raised by `_take`, when the other ranks know)
            decision.error = error
        return decision.outcome(self.undecided, self.size_bytes)

    @contextlib.contextmanager
    def _telling_if_given_up(self) -> Iterator[None]:
        """Raise `TransactionAborted` for what fails since a collection has deleted the objects of this save."""
        try:
            yield
        except (StorageFailure, CorruptStore):
            entry: LogEntry | None = self._state.head
            with contextlib.suppress(StorageFailure, CorruptStore):  # then the failure is the error to raise
                while entry is not None:
                    check_not_given_up(entry.record, self._staged.draft.txn)
                    entry = self._state.setup.log.poll(entry)
            raise

    def _receipts(self, answers: Sequence[Mapping[str, Any]]) -> list[Receipt]:
        """Return rank 0's own receipt, and read the others from the store: what is stored counts, not the message."""
        for rank, answer in enumerate(answers):
            if answer["tables"] != answers[0]["tables"]:
                raise BadInput(
                    f"rank {rank} stores the tables in another way than rank 0 (schemas differ); declare, refine and "
                    "drop tables on every rank alike",
                    found=rank,
                )
        assert self._receipt is not None  # written before anything is answered
        state, segment = self._state, self._staged.draft.segment
        others = state.setup.workers.run(
            partial(read_receipt, state.setup.storage, segment, writer_name(rank, answer["attempt"]), answer["digest"])
            for rank, answer in enumerate(answers)
            if rank > 0
        )
        return [self._receipt, *others]

    def _write_manifest(self, receipts: list[Receipt]) -> ChainEntry:
        """Check what all ranks wrote and put the manifest over it."""
        state, draft, base = self._state, self._staged.draft, self._staged.base_manifest
        tables = self._staged.schemas.tables
        tensors = self._staged.documents.tensors.union(*(receipt.dense for receipt in receipts))
        check_receipts(receipts, txn=draft.txn, world=state.setup.ranks.world, l0=draft.l0, base=base)
        check_coverage(receipts, tables)
        l1 = max(state.head.record.checkpoint, draft.l0) + 1
        document = SegmentDocument(
            format=MAJOR, txn=draft.txn, base=draft.base,
            kind=draft.kind, l0=draft.l0, l1=l1, step=draft.step,
            scalars=dict(self._staged.documents.scalars), **merge_receipts(receipts, base, tables, tensors),
        )  # fmt: skip
        known = {} if base is None else base.tables
        digest, size, manifest = write_manifest(
            state.setup.storage, draft.segment, document, self._staged.paths, known
        )  # fmt: skip
        self.manifest = manifest
        self.size_bytes = size + sum(entry.size for entry in manifest.objects)
        return ChainEntry(
            seg=draft.segment, sha256=digest, kind=manifest.kind, l0=draft.l0, l1=l1,
            size_bytes=self.size_bytes, rows=manifest.changed_rows,
        )  # fmt: skip

    def _append(self, draft: CommitRecord) -> LogEntry:
        """Append the record, and keep it in `undecided` if the outcome is unknown."""
        log = self._state.setup.log
        with log.exclusive():
            leftover = log.unresolved_entry
            try:
                return log.append(self._state.head, draft, partial(rebase_data, txn=self._staged.draft.txn))
            except BaseException:
                if log.unresolved_entry is not leftover:
                    self.undecided = log.unresolved_entry
                raise

    # ---- its outcome

    def _take(self, outcome: _Announced) -> int:
        """Apply what rank 0 has decided; return the version, or raise rank 0's error."""
        state, decision = self._state, self._decision
        self.size_bytes = outcome.size_bytes or self.size_bytes
        if outcome.version is None:
            error = rebuilt(0, outcome.error) if decision is None or decision.error is None else decision.error
            if outcome.is_undecided:
                state.pending = self
            elif isinstance(error, CommitStateUnknown):
                # Of a record that is not ours: the mirrors are still the state of the head that this writer knows.
                state.lost(StorageFailure(str(error)))
            else:
                state.lost(error)
            raise error
        self.version = outcome.version
        if decision is not None and decision.entry is not None:
            self._move_on(decision.entry)
            return self.version
        try:
            state.move_to(self.version)
        except BaseException as error:
            # Acknowledged all the same; this rank no longer knows what its mirrors are.
            state.open = None
            state.is_restored = False
            state.forget()
            if not isinstance(error, CnrStoreError):
                raise
            # Not raised: the other ranks go on, and at their next save all hear that this one needs a restore.
            logger.warning("version %d is committed, but cannot be read: %s", self.version, error)
            return self.version
        self._move_on(state.head)
        return self.version

    def _end_without_outcome(self, error: BaseException, *, handed_over: bool) -> None:
        """Update the writer's state after a failed exchange, by what is known of the commit."""
        state, decision = self._state, self._decision
        if decision is not None:  # rank 0 knows the outcome, although it could not send it
            if decision.entry is not None:
                self.version = decision.entry.record.v
                self._move_on(decision.entry)
            elif self.undecided is not None:
                state.pending = self
            else:
                state.lost(decision.error or error)
        elif state.setup.ranks.rank > 0 and (
            handed_over or (self._receipt is not None and isinstance(error, RankLost))
        ):
            # Rank 0 may have every receipt, and may have committed: only the log shows it.
            state.pending = self
        else:
            # Before all shares were there nothing went into the log: the mirrors are the head's state as before.
            state.lost(error if handed_over else RuntimeError("a rank failed"))

    def _move_on(self, entry: LogEntry) -> None:
        """This commit is version ``entry.record.v``: move head, mirrors and snapshot to it.

        It stays acknowledged if its state cannot be opened; see `WriterState.won`.
        """
        state = self._state
        snapshot = state.won(entry, self._written_reader())
        try:
            self._staged.tables.move_mirrors(state.mirrors)
        except BaseException:
            # Half moved, the mirrors are no state at all: a delta against them would be acknowledged and unreadable.
            state.forget()
            raise
        state.stand_on(snapshot)

    def settle(self) -> LogEntry | None:
        """Learn an outcome that was left unknown, and move on by it: the entry if it won, None if it lost. Blocks.

        Raises
        ------
        CommitStateUnknown, CorruptStore, StorageFailure
            Still unknown.
        """
        state = self._state
        resolved: list[LogEntry | None] = []

        def resolve() -> int | None:
            # By the record it sent: a tag or another append of this store may have settled it, or be unknown itself.
            resolved.append(state.setup.log.resolve(self.undecided))
            return None if resolved[0] is None else resolved[0].record.v

        try:
            version = rank_zero(state.setup.ranks, resolve)
        except RankLost:
            if state.setup.ranks.rank == 0 and not resolved:
                raise
            if resolved:  # rank 0 knows it, although it could not send it
                version = None if resolved[0] is None else resolved[0].record.v
            else:
                version = self._find_in_log()
        entry = resolved[0] if resolved else None
        if version is not None:
            self._follow(version, is_known=entry is not None)
            entry = entry or state.head
        state.pending = None
        if entry is None:
            state.lost(Conflict("another record took the log position"))
            return None
        self.version = entry.record.v
        self._move_on(entry)
        return entry

    def _follow(self, version: int, *, is_known: bool) -> None:
        """Move to the record that has won, on all ranks or on none: a rank that cannot read it asks again with all."""
        state, before = self._state, self._state.head

        def move() -> None:
            if not is_known:
                state.move_to(version)

        try:
            together(state.setup.ranks, move)
        except RankLost:
            return  # this rank has moved
        except BaseException:
            state.head = before
            raise

    def _find_in_log(self) -> int | None:
        """Look in the log for a commit whose outcome rank 0 could not send: its version, None if it cannot come."""
        state = self._state
        head = state.head
        try:
            while (entry := state.setup.log.poll(head)) is not None:
                head = entry
                if any(link.seg == self._staged.draft.segment for link in head.record.chain):
                    return head.record.v
                if head.record.epoch > state.head.record.epoch:
                    return None
        except CnrStoreError as error:
            raise CommitStateUnknown(f"the log could not be read: {error}") from error
        raise CommitStateUnknown(
            "rank 0 does not answer, and its commit is not in the log yet; restart the training from the last "
            "checkpoint"
        )

    def _written_reader(self) -> dict[str, SegmentReader]:
        """A reader of the segment, by name, where this rank wrote its manifest; no I/O."""
        if self.manifest is None:
            return {}
        segment = self._staged.draft.segment
        return {segment: SegmentReader(self._state.setup.storage, segment, self.manifest)}


@dataclass(frozen=True, slots=True)
class _Announced:
    """What rank 0 sends to the others: the version, or the error and whether the commit may be in the log anyway."""

    version: int | None
    size_bytes: int
    is_undecided: bool
    error: dict[str, Any]


@dataclass(slots=True)
class _Decided:
    """What rank 0 knows of the commit: the record that won, or the error."""

    entry: LogEntry | None = None
    error: BaseException | None = None

    def outcome(self, undecided: LogEntry | None, size_bytes: int) -> dict[str, Any]:
        return {
            "version": None if self.entry is None else self.entry.record.v,
            "size_bytes": size_bytes,
            "is_undecided": self.entry is None and undecided is not None,
            "error": {} if self.error is None else described(self.error),
        }


def _digest_of(tables: Mapping[str, TableSchema]) -> str:
    return sha256(canonical_json(dict(sorted(tables.items()))))
