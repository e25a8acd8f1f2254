"""The writing side of a store: a `Writer` is the one committer and holds the mirrors."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, eq
from typing import Any, Literal, get_args

from cnr_store.errors import BadInput, CommitStateUnknown, DoesNotApply, SaveInProgress, VersionExpired
from cnr_store.format.commit_record import LogEntry
from cnr_store.format.limits import MAX_INTEGER
from cnr_store.format.manifest import recorded_digest
from cnr_store.read.plan import compare_digest, expected_digest
from cnr_store.read.replay import named_rows
from cnr_store.read.snapshot import Snapshot
from cnr_store.read.table_reader import replay_keyed
from cnr_store.runtime.arguments import checked_choice, checked_count
from cnr_store.runtime.closing import Closing
from cnr_store.runtime.ranks import Ranks, together
from cnr_store.segment.codes import Array, TableCodes, array_specs
from cnr_store.segment.reader import SegmentReader
from cnr_store.segment.shards import KeyShare, Shard, shards_of
from cnr_store.types import MAX_CHAIN, SlotsRule
from cnr_store.write.keyed_mirrors import fitting_rows, mirrored_arrays
from cnr_store.write.mirrors import HeldMirrors, Mirrors
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer_state import CommitKind, SegmentDraft, WriterState

Base = Literal["head", "baseline"]
Outputs = (
    Mapping[str, Mapping[str, Array]] | Mapping[Shard, Mapping[str, Array]] | Mapping[str | Shard, Mapping[str, Array]]
)
"""Preallocated arrays by table, or by shard: ``values`` and the slots by name."""

logger = logging.getLogger(__name__)


_RESTORES = 3
"""How often a load is tried, if the head is compacted and its segments deleted while it is loaded."""


class Writer(Closing):
    """The only committer of a store: opening one fences every earlier writer.

    Not thread-safe: one thread at a time. Memory: the code mirrors (`mirror_bytes`), and chunks in flight.

    Where several ranks write together each has a writer for its shards; `restore`, `begin`, `settle` and what their
    transactions do at the end are called by all of them, in the same order, and succeed or raise on all of them.
    """

    def __init__(self, state: WriterState) -> None:
        self._state, self._is_closed = state, False
        if not state.head.record.chain:
            state.snapshot = state.snapshot_of(state.head)

    @property
    def head(self) -> LogEntry:
        """The newest log entry this writer knows."""
        return self._state.head

    @property
    def mirrors(self) -> Mirrors:
        """The code mirrors, by table."""
        return self._state.mirrors

    def close(self) -> None:
        """Free the mirrors. Uncommitted work is lost; a second call does nothing."""
        self._is_closed = True
        self.mirrors.clear()
        self._state.snapshot = None
        self._state.open = None

    @property
    def is_synced(self) -> bool:
        """Whether the mirrors equal the head's state, so that a delta may be written."""
        return self._state.is_synced

    @property
    def mirror_bytes(self) -> int:
        """Current size of the mirrors in bytes."""
        return self.mirrors.nbytes

    @property
    def snapshot(self) -> Snapshot:
        """The state the mirrors stand for.

        Raises
        ------
        DoesNotApply
            Before `restore`, or after the store moved on without this writer.
        """
        if self._state.snapshot is None:
            raise DoesNotApply(
                "this writer's mirrors are not the head's state; call restore() first, or commit a baseline",
                version=self.head.record.v,
            )
        return self._state.snapshot

    @property
    def is_committer(self) -> bool:
        """Whether this writer has taken over (`take_over`), or needed not to."""
        return self._state.succession is None

    @property
    def ranks(self) -> Ranks:
        """The group of ranks that write together."""
        return self._state.setup.ranks

    @property
    def keys(self) -> KeyShare:
        """What this rank owns of the keys of hashed tables: all, if it writes alone."""
        return self._state.setup.held.keys

    def shards(self, tables: Iterable[str]) -> dict[str, tuple[Shard, ...]]:
        """Return what this rank holds of dense tables: the whole ones without a placement."""
        return shards_of(self._state.setup.held.placement, tables)

    def take_over(self) -> None:
        """Become the committer, if this writer is not yet: fence the others, and continue from what was loaded.

        For a writer with a ``succession``; `begin` does it too. All ranks call it. Blocks for a few requests, once.

        Raises
        ------
        Conflict
            Another writer committed after the loaded version; the message names it.
        VersionExpired
            The version that was loaded has expired: restore another one.
        CommitStateUnknown, StorageFailure, ReadOnlyStore, UnsafeBackend, WrongClock
            Call it again.
        """
        self._state.take_over()

    def prepare(self) -> None:
        """Take over, and read which tables a head has that was not restored: then `begin` makes no request.

        All ranks call it. Blocks; raises what `take_over` does.
        """
        self.take_over()
        together(self.ranks, lambda: len(self._state.head_tables))

    def restore(
        self,
        outputs: Outputs | None = None,
        *,
        slots_rule: SlotsRule = "exact",
        held: HeldMirrors | None = None,
        opened: Mapping[str, SegmentReader] | None = None,
    ) -> Snapshot:
        """Load the head's state: fill ``outputs`` and the mirrors in one pass; returns the snapshot. Blocks.

        The head is read from the log, so this also follows a rollback. An open transaction ends. A writer that has
        not taken over loads the version of its succession.

        Parameters
        ----------
        outputs
            Table, or `Shard` of a table, to ``{"values": (rows, columns) array, slot name: array}``, preallocated,
            filled in place. For all other tables only the mirror is loaded.
        slots_rule
            What becomes of one-dimensional slots of tables that were cut into other column shards
            (`TableView.read_rectangle`). Unless it is ``exact``, the next save must be a baseline.
        held
            Mirrors of an earlier writer of the same process (`Mirrors.held`) whose last state is the head's: these
            shards are not read.
        opened
            Segments whose manifests need not be read again, by name (`Snapshot.known_readers`).

        Raises
        ------
        TableNotFound, BadShape, BadDtype, BadInput
            Before anything is written.
        Fenced
            Another writer took over.
        CommitStateUnknown
            The outcome of the last commit is unknown: call `settle`.
        VersionExpired
            In each attempt the head was compacted, and its segments deleted, before it was loaded: the grace period of
            garbage collection is shorter than a load.
        CorruptStore
            Outputs filled so far hold undefined values.
        """
        state = self._state
        self._check_usable()
        loaded: list[Snapshot] = []
        has_epoch = state.succession is None
        attempts = _RESTORES if has_epoch else 1
        for attempt in range(attempts):
            if has_epoch:
                state.catch_up()
            try:
                together(
                    state.setup.ranks,
                    lambda: loaded.append(self._load(outputs or {}, slots_rule, held or {}, opened or {})),
                )
                break
            except BaseException as error:
                loaded.clear()
                if state.snapshot is None:  # what was loaded so far, here or on other ranks, is no state
                    state.forget()
                if not isinstance(error, DoesNotApply):
                    raise
                if attempt + 1 == attempts:
                    raise VersionExpired(str(error), version=self.head.record.v) from error
        state.snapshot = loaded[0]
        state.is_restored = True
        return loaded[0]

    def _load(
        self, outputs: Outputs, slots_rule: SlotsRule, known: HeldMirrors, opened: Mapping[str, SegmentReader]
    ) -> Snapshot:
        state = self._state
        snapshot = state.snapshot_of(self.head, known=opened)
        shards = state.setup.held.shards(snapshot.tables)
        wanted: dict[Shard, dict[str, Array]] = {}
        for key, arrays in outputs.items():
            shard = key if isinstance(key, Shard) else _only(key, shards.get(key, (Shard(key),)))
            view = snapshot.table(shard.table)
            named = {"codes" if name == "values" else f"slots/{name}": array for name, array in arrays.items()}
            wanted[shard] = view.check_outputs(named, shard.rectangle_in(view.schema))
        self.mirrors.clear()
        state.snapshot = None
        state.open = None
        held = [shard for table in snapshot.tables for shard in shards[table]]
        kept = {shard for shard in held if shard in known and shard not in wanted}
        read = [shard for shard in held if shard not in kept]
        together = self._load_together(snapshot, read, wanted)
        for shard in kept:
            self.mirrors.put(shard, *known[shard])
        for shard in read:
            if shard not in together:
                self._load_shard(snapshot, shard, wanted.get(shard, {}), slots_rule)
        for shard in wanted.keys() - set(held):  # a copy that another rank saves
            view = snapshot.table(shard.table)
            view.load(wanted[shard], shard.rectangle_in(view.schema), slots_rule)
        return snapshot

    def _load_together(
        self, snapshot: Snapshot, shards: Sequence[Shard], wanted: Mapping[Shard, Mapping[str, Array]]
    ) -> Collection[Shard]:
        """Load those shards that are whole tables and can be read together; returns them."""
        allocate = None if self.mirrors.mode == "none" else self.mirrors.allocator()
        schemas = snapshot.tables
        whole = {
            shard.table: shard
            for shard in shards
            if (allocate is not None or shard in wanted) and shard.is_whole(schemas[shard.table])
        }
        outputs = {table: wanted.get(shard, {}) for table, shard in whole.items()}
        found = snapshot.load_together(outputs, allocate=allocate)
        for table, codes in found.items():
            if codes is not None:
                self._put_mirror(snapshot, whole[table], codes)
        return {whole[table] for table in found}

    def _load_shard(self, snapshot: Snapshot, shard: Shard, arrays: Mapping[str, Array], slots_rule: SlotsRule) -> None:
        view = snapshot.table(shard.table)
        if view.schema.keys == "hashed":
            if self.mirrors.mode != "none" and (names := mirrored_arrays(view.schema)):
                self._load_keys(snapshot, shard, names)
            return
        rectangle = shard.rectangle_in(view.schema)
        codes = None
        if self.mirrors.mode == "none" or not array_specs(view.schema).are_additive:
            if arrays:
                view.load(arrays, rectangle, slots_rule)
        else:
            if not arrays:
                view.check_stored("give outputs, or open the writer with mirror='none'", slots=True)
            codes = view.load(arrays, rectangle, slots_rule, allocate=self.mirrors.allocator())
        if codes is not None:
            self._put_mirror(snapshot, shard, codes)

    def _put_mirror(self, snapshot: Snapshot, shard: Shard, codes: TableCodes) -> None:
        parts = snapshot.manifests[-1].parts_of.get(shard.table, ())
        digest = recorded_digest(parts, shard.rectangle_in(codes.schema))
        # Parts that a writer without a mirror wrote name none, and parts may be cut in another way.
        self.mirrors.put(shard, codes, codes.digest(self._state.setup.workers) if digest is None else digest)

    def _load_keys(self, snapshot: Snapshot, shard: Shard, names: Sequence[str]) -> None:
        """Load the mirror of the keys that this rank owns of a hashed table, or of as many as there is room for."""
        plan, workers = snapshot.plan(shard.table), self._state.setup.workers
        owned = named_rows(snapshot.readers, plan, self.keys.holds)
        room = self.mirrors.keyed_room(shard)
        kept = owned if room is None else owned[: fitting_rows(plan.schema, room)]
        keys, codes = replay_keyed(
            snapshot.readers, plan, names, workers, kept, mirror_in=self.mirrors.allocator()
        )  # fmt: skip
        digest = codes.digest_by_key(keys, workers) if len(kept) == len(owned) else None
        if digest is not None and self.ranks.world == 1 and (wanted := expected_digest(plan, set(names))) is not None:
            compare_digest(plan, digest, wanted)
        self.mirrors.put_keyed(shard, keys, codes, digest)

    def begin(self, step: int, kind: CommitKind = "delta", *, base: Base = "head") -> Transaction:
        """Start a transaction for training step ``step``; of several ranks all do so, and it blocks for them.

        It makes requests only where this writer has not taken over, or its mirrors are no longer the head's state.

        A delta becomes a baseline on an empty store, on a chain at its cap, if another rank asks for one, and where
        a table with one-dimensional slots is cut into other column shards: look at `Transaction.kind`.
        ``base="baseline"`` makes a one-shot delta: it replaces the deltas since the baseline, so it must be given every
        row changed since then.

        Raises
        ------
        CommitStateUnknown
            The outcome of an earlier commit is unknown: call `settle`.
        DoesNotApply
            A delta without having restored the head.
        Conflict
            As `take_over`, of a writer that has not done that yet.
        SaveInProgress
            The previous transaction was neither committed nor aborted.
        CorruptStore, StorageFailure
            The chain of the last commit cannot be opened; after a CorruptStore the writer needs `restore` or a
            baseline.
        BadInput
            ``step`` is not an integer from 0 to 2^53 - 1, there is no such ``kind`` or ``base``, or the ranks pass
            different ones.
        """
        state = self._state
        state.take_over()
        requests = [
            _BeginRequest(**given)
            for given in together(state.setup.ranks, partial(self._begin_request, step, kind, base))
        ]
        if any(request.kind == "baseline" for request in requests):
            kind = "baseline"
        steps, bases = {request.step for request in requests}, {request.base for request in requests}
        if len(steps) > 1 or (kind == "delta" and len(bases) > 1):
            raise BadInput(
                f"the ranks want to save steps {sorted(steps)} on {sorted(bases)}; all must begin the same save",
                found=sorted(steps),
            )
        heads = {request.head for request in requests if request.is_synced}
        if kind == "delta" and len(heads) > 1:
            raise DoesNotApply(
                f"the ranks' mirrors are the states of versions {sorted(heads)}: some missed a commit; call restore() "
                "first, or commit a baseline",
                expected=max(heads), found=min(heads),
            )  # fmt: skip
        if kind == "baseline" and not (all(request.is_synced for request in requests) and len(heads) == 1):
            # What one rank does not know no rank may build on, or they would store different tables.
            if state.snapshot is not None:
                state.forget()
            if not state.is_new:
                state.catch_up()
        state.is_new = False
        request, one_shot = requests[0], base == "baseline"
        draft = SegmentDraft.after(self.head.record, kind, step=request.step, txn=request.txn, one_shot=one_shot)
        transaction = Transaction(state, draft)
        state.open = transaction
        return transaction

    def _begin_request(self, step: int, kind: CommitKind, base: Base) -> dict[str, Any]:
        """What this rank wants to begin, if it can."""
        state = self._state
        self._check_usable()
        step = checked_count("step", step, most=MAX_INTEGER)
        checked_choice("kind", kind, get_args(CommitKind))
        checked_choice("base", base, get_args(Base))
        if state.open is not None:
            raise SaveInProgress("a transaction of this writer is still open; commit or abort it before the next")
        state.open_snapshot()
        chain = self.head.record.chain
        keep = 1 if base == "baseline" else len(chain)
        if kind == "delta" and (not chain or keep + 1 > MAX_CHAIN or self._is_cut_anew()):
            kind = "baseline"
        if kind == "delta":
            _ = self.snapshot
        request = _BeginRequest(step, kind, base, state.snapshot is not None, self.head.record.v, uuid.uuid4().hex)
        return asdict(request)

    def _is_cut_anew(self) -> bool:
        """Whether some table has other column shards than in the store, and a slot that exists once per shard."""
        state = self._state
        if state.snapshot is None:
            return False
        tables, cuts = state.snapshot.tables, state.setup.held.cuts
        parts = state.snapshot.manifests[-1].parts
        dims = map(attrgetter("dim"), map(tables.__getitem__, map(attrgetter("table"), parts)))
        if not cuts and all(map(eq, map(attrgetter("columns"), parts), zip(repeat(0), dims))):  # nearly always
            return False
        newest = _newest_cuts(state.snapshot)
        for table, schema in tables.items():
            if schema.keys != "dense" or not schema.num_rows:  # without a row there is no slot that could be cut
                continue
            held = cuts.get(table, {(0, schema.dim)})
            if newest.get(table) == held or not any(slot.kind == "row" for slot in schema.slots.values()):
                continue
            if held != set(state.snapshot.table(table).column_cuts):
                return True
        return False

    def settle(self) -> LogEntry | None:
        """Learn the outcome of a commit that ended unknown: its entry if it won, None if it lost. Blocks.

        None as well if no commit of this writer is unknown.

        Raises
        ------
        CommitStateUnknown, CorruptStore, StorageFailure
            Still unknown.
        """
        pending = self._state.pending
        return None if pending is None else pending.settle()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise BadInput("the writer is closed; open another")
        pending = self._state.pending
        if pending is not None:
            raise CommitStateUnknown(
                "the outcome of the last commit is not known yet; call settle() first",
                version=None if pending.undecided is None else pending.undecided.record.v,
            )


def _newest_cuts(snapshot: Snapshot) -> dict[str, set[tuple[int, int]]]:
    """Return the column ranges of each table in the newest segment that has rows of it: those of its life, mostly."""
    found: dict[str, set[tuple[int, int]]] = {}
    for manifest in reversed(snapshot.manifests):
        here: dict[str, set[tuple[int, int]]] = {}
        for part in manifest.parts:
            if part.table not in found and part.rows[0] < part.rows[1]:
                here.setdefault(part.table, set()).add(part.columns)
        found |= here
        if len(found) >= len(snapshot.tables):
            break
    return found


@dataclass(frozen=True, slots=True)
class _BeginRequest:
    """What a rank asks `begin` to start."""

    step: int
    kind: CommitKind
    base: Base
    is_synced: bool
    head: int
    txn: str


def _only(table: str, shards: tuple[Shard, ...]) -> Shard:
    if len(shards) == 1:
        return shards[0]
    raise BadInput(
        f"this rank holds {[str(shard) for shard in shards]} of table {table!r}; give outputs by Shard", table=table
    )
