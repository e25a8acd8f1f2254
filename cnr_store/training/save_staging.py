"""Copies what a save writes, at one instant: the only part of a save that makes the training wait.

Rows of lattice tables can become codes before they leave their device. A table that every rank has a copy of changes by
the batches of all ranks, so the ranks exchange its marks, once per save: its owner writes the union.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from cnr_store.errors import BackgroundSaveFailed
from cnr_store.format.document_tree import EncodedTree
from cnr_store.format.layout import is_rank_tensor
from cnr_store.format.records import TableSchema
from cnr_store.runtime.caller import warn_caller
from cnr_store.runtime.ranks import together
from cnr_store.segment.codes import array_specs
from cnr_store.training.background import LiveRead, SaveJob, WholeShard, failure_message
from cnr_store.training.communication_state import NO_COMMUNICATION, capture_communication
from cnr_store.training.dense_staging import DenseStaging, StagedDense, stepped_by
from cnr_store.training.document import TRAINER, KeptDocument, rng_documents, trainer_documents
from cnr_store.training.dynamic_tables import StagedKeys, give_back_changes, stage_changes
from cnr_store.training.kept_plan import Entries, OwnedTables
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.reader import reader_name
from cnr_store.training.save_plan import ChainState, SavePlan
from cnr_store.training.schedule import TrainingPosition
from cnr_store.training.shards import LocalShard
from cnr_store.training.state import needs_new_schema
from cnr_store.training.tensors import WEIGHT, leaf_of
from cnr_store.types import Lattice, RowIds
from cnr_store.write.table_options import TableOptions
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from cnr_store_gpu import Cumulative, LatticeCodes, RowRequest, StagingBuffers, Taken
from cnr_store_gpu.bitmap import TakenRows
from cnr_store_gpu.streams import wait_for_streams
from cnr_store_gpu.words import Words, rows_of

_COMPARED = 32
"""Marked rows by which the copies of a table are compared, evenly spread: 1 kB of a message per table, once.

No digest of all rows: it would differ where only the order of a summation did.
"""
_UNLIKE = 1e-3
"""Largest difference of two copies of a row, as a share of its absolute sum: order of summation, not other values."""


@dataclass(slots=True, eq=False)
class SaveStager:
    """Makes the job of a save: takes the marks, copies the marked rows, and passes on everything that is no row.

    Attributes
    ----------
    dense
        Copies dense tensors, of rank 0.
    codes_on_device
        Rows of lattices become codes before they leave their device.
    residual_bits
        As of `PrecisionPolicy`.
    """

    training: LiveTraining
    chain: ChainState
    position: TrainingPosition
    dense: DenseStaging
    codes_on_device: bool
    saves_rng: bool
    residual_bits: int | None = None
    buffers: StagingBuffers = field(default_factory=StagingBuffers)
    _trainer: KeptDocument = field(default_factory=KeptDocument)
    _tables: OwnedTables | None = None
    _has_compared: bool = False

    def begin_reading(self, transaction: Transaction, writer: Writer, plan: SavePlan) -> LiveRead | None:
        """Return what can be read while the training continues; None if the save writes no table whole.

        Takes the marks of what is read. Blocks; all ranks call it.
        """
        training, chain = self.training, self.chain
        chain.whole_next |= chain.rate.anew_in(transaction)
        if not chain.whole_next:
            return None
        whole = self._whole_shards(plan, chain.whole_next)
        taken: dict[str, Taken] = {}

        def share() -> None:
            wait_for_streams(tensor for one in whole.values() for tensor in (one.weight, *one.slots.values()))
            taken.update(training.tracker.take())

        try:
            together(training.control, share)
        except BaseException:
            training.tracker.give_back(taken)
            raise
        read = {name for name, own in training.holdings.by_name.items() if own.key.table in chain.whole_next}
        training.tracker.give_back({name: one for name, one in taken.items() if name not in read})
        taken = {name: one for name, one in taken.items() if name in read}
        return LiveRead(transaction, whole, taken, self._drops(transaction, writer))

    def is_outdated(self, read: LiveRead, plan: SavePlan) -> bool:
        """Whether tables have other slots now than when they began to be read."""
        tables, options, owned = read.transaction.tables, self.training.options, self.training.holdings.owned
        return any(
            needs_new_schema(tables[one.key.table], owned[name].shard, plan.local.slots[name], options[one.key.table])
            for name, one in read.whole.items()
        )

    def stage(
        self, transaction: Transaction, writer: Writer, plan: SavePlan, read: LiveRead | None = None
    ) -> SaveJob:  # fmt: skip
        """Return the job of a planned save. Blocks; all ranks call it. If it raises, all rows are dirty as before.

        ``read``: what was read of its tables before.
        """
        training, chain = self.training, self.chain
        chain.whole_next |= chain.rate.anew_in(transaction)
        whole = set(chain.whole_next) | (set(transaction.needs_whole_tables) & training.tables)
        whole |= chain.growing.stage(transaction, whole)
        if read is not None:
            unread = {read.whole[name].key.table for name in read.unread}
            whole -= {one.key.table for one in read.whole.values()} - unread
        taken: Mapping[str, Taken] = {}
        fixed: dict[str, Callable[[], EncodedTree]] = {}
        keyed: list[StagedKeys] = []
        dense: list[StagedDense] = []
        staged = None

        def share() -> dict[str, str]:
            nonlocal taken
            chain.rate.stage(transaction, writer, chain.whole_next)
            fixed.update(self._put_state(transaction, writer, plan, dense))
            taken = training.tracker.take()
            if training.dynamic.tables:
                keyed.extend(stage_changes(training.dynamic, transaction))
            return words_of(taken, training.holdings.replicated)

        try:
            # Here, so that a rank that cannot take part is known to the others before they stage anything.
            marked = union_of(together(training.control, share))
            if marked:
                if not self._has_compared:
                    warn_of_unlike_copies(training, marked)
                    self._has_compared = True
                owned = {name: own.key.table for name, own in training.holdings.owned.items()}
                taken = dict(taken)
                for name in [name for name, table in owned.items() if table in marked]:
                    taken[name] = taken_words(name, taken[name].num_rows, marked[owned[name]])
            rows, requests, like = self._touched_rows(plan, taken, whole)
            if self.codes_on_device:
                coming = {name: training.holdings.owned[name].shard for name in requests}
                self.buffers.quantize = dict(rows_as_codes(coming, transaction.tables, training.options))
            try:
                staged = self.buffers.gather(requests, like=like)
            except RuntimeError as error:  # no thread, no memory of the device: the training may go on
                raise BackgroundSaveFailed(failure_message(error)) from error
            written = self._whole_shards(plan, whole)
            training.tracker.check_memory()  # another thread may have taken it away while the ranks agreed, or copied
            if written:
                wait_for_streams(tensor for one in written.values() for tensor in (one.weight, *one.slots.values()))
        except BaseException:
            training.tracker.give_back(taken)
            give_back_changes(training.dynamic, keyed)
            if staged is not None:
                staged.release()
            raise
        drops = self._drops(transaction, writer)
        return SaveJob(
            transaction, training.holdings.keys, taken, staged, rows, written, drops, fixed,
            declares=bool(chain.whole_next), read=read, keyed=keyed, dense=dense[0] if dense else None,
        )  # fmt: skip

    def free(self) -> None:
        """Give the memory of all copies back, and follow no step any more; the last save is over."""
        self.buffers.free()
        self.dense.close()

    def _drops(self, transaction: Transaction, writer: Writer) -> tuple[str, ...]:
        """Tables of the head that the training does not have."""
        schemas = writer.snapshot.tables if writer.is_synced else {}
        return tuple(sorted((schemas.keys() | set(transaction.needs_whole_tables)) - self.training.stored_tables))

    def _touched_rows(
        self, plan: SavePlan, taken: Mapping[str, Taken], whole: set[str]
    ) -> tuple[Mapping[str, RowIds], Mapping[str, RowRequest], object]:
        """The rows that are written of tables that are not written whole, what of them is to be copied, and its kind.

        The kind is for `StagingBuffers.gather`.
        """
        decision, slots = plan.decision, plan.local.slots
        is_since_head = decision.kind == "baseline" or decision.base == "head"
        if self._tables is None:
            self._tables = OwnedTables(self.training.holdings.owned)
        like = plan.local.like if not whole and self._tables.are_in_place() else None
        if like is not None and is_since_head and isinstance(taken, TakenRows) and isinstance(slots, Entries):
            requests = self._tables.requests(like, slots, taken.rows)
            if requests is not None:
                return taken.rows, requests, like
        return *self._requests_by_table(plan, taken, whole, is_since_head=is_since_head), like

    def _requests_by_table(
        self, plan: SavePlan, taken: Mapping[str, Taken], whole: set[str], *, is_since_head: bool
    ) -> tuple[dict[str, RowIds], dict[str, RowRequest]]:
        rows: dict[str, RowIds] = {}
        requests: dict[str, RowRequest] = {}
        for name, own in self.training.holdings.owned.items():
            if own.key.table not in whole:
                one, first = taken[name], own.shard.rows[0]
                local = one.row_ids if is_since_head else rows_since_baseline(one, self.chain.lineage.changed)
                rows[name] = local + first if first else local
                on_device = one.device_rows if local is one.row_ids else None
                requests[name] = RowRequest(local, {WEIGHT: own.shard.weight, **plan.local.slots[name]}, on_device)
        return rows, requests

    def _put_state(
        self, transaction: Transaction, writer: Writer, plan: SavePlan, dense: list[StagedDense]
    ) -> Mapping[str, Callable[[], EncodedTree]]:
        """Hand over what is no row of a table: rank 0 for all, but for generators, readers and communication.

        Adds the dense tensors of all to ``dense``, and returns the documents, by name, that no training step changes.
        """
        training, rank = self.training, self.training.ranks.rank
        reader = self.position.document()  # before the generators: a loader may draw for its first state
        communication = NO_COMMUNICATION
        if training.communication:
            communication = capture_communication(training.communication, rank, self.residual_bits)
        documents: dict[str, Any] = dict(communication.documents)
        if rank == 0:
            known, local = writer.snapshot.dense if writer.is_synced else (), plan.local
            stepped = stepped_by(training.optimizers, local.state.dense) if self.dense.is_lazy else set()
            live = local.state.dense | local.other.dense | communication.shared
            dense.append(self.dense.stage(live, stepped | local.other.dense.keys(), self.position.step))
            for name in set(known) - live.keys():
                if not is_rank_tensor(name):  # these end by themselves
                    transaction.drop_dense(name)
            transaction.put_scalars({"step": self.position.step})
            documents |= trainer_documents(
                local.state, training.optimizers, local.other, plan.tables, training.extras, self.chain.rate.document()
            )
        if self.saves_rng:
            documents |= rng_documents(rank)
        if reader is not None:
            documents[reader_name(rank)] = reader
        fixed = {TRAINER: partial(self._trainer.encoded, documents.pop(TRAINER))} if TRAINER in documents else {}
        transaction.put_dense(*communication.own)
        for name, document in documents.items():
            transaction.put_document(name, document, leaf_of)
        return fixed

    def _whole_shards(self, plan: SavePlan, tables: set[str]) -> dict[str, WholeShard]:
        """This rank's shards of tables, by name."""
        if not tables:
            return {}
        anew, options, slots = self.chain.whole_next, self.chain.rate.options_for, plan.local.slots
        return {
            name: WholeShard(
                own.key,
                own.shard.weight.detach(),
                slots[name],
                options(own.key.table) if own.key.table in anew else None,
            )
            for name, own in self.training.holdings.owned.items()
            if own.key.table in tables
        }


def words_of(taken: Mapping[str, Taken], tables: Iterable[str]) -> dict[str, str]:
    """Return the marks of this rank's copies of ``tables`` as text, one bit per row; empty ones are left out."""
    found = {table: taken[table].words for table in tables if table in taken and len(taken[table])}
    return {table: base64.b85encode(words.tobytes()).decode() for table, words in found.items()}


def union_of(answers: Iterable[Mapping[str, str]]) -> dict[str, Words]:
    """Return the union over all ranks of what `words_of` gave, for tables with a mark."""
    union: dict[str, Words] = {}
    for answer in answers:
        for table, text in answer.items():
            words = np.frombuffer(base64.b85decode(text), np.uint32)
            union[table] = words | union[table] if table in union else words
    return union


def warn_of_unlike_copies(training: LiveTraining, marked: Mapping[str, Words]) -> None:
    """Warn on rank 0 if ranks have different rows of tables that count as copies. Blocks; all ranks call it.

    A table that a training of its own divides among ranks, under one name, would lose the rows of all but one rank.
    """

    def sums() -> dict[str, list[list[float]]]:
        found = {}
        for shard in training.holdings.shards:
            if shard.table in marked:
                rows = rows_of(marked[shard.table])
                rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _COMPARED), dtype=np.int64)]
                values = shard.weight.index_select(0, torch.from_numpy(rows).to(shard.weight.device)).double()
                found[shard.table] = [values.sum(1).tolist(), values.abs().sum(1).tolist()]
        return found

    unlike: set[str] = set()
    first: dict[str, Any] = {}
    for answer in together(training.control, sums):
        for table, found in answer.items():
            (here, size), (there, _) = np.asarray(found), np.asarray(first.setdefault(table, found))
            if (np.abs(here - there) > _UNLIKE * size).any():
                unlike.add(table)
    if unlike and training.control.rank == 0:
        warn_caller(
            f"ranks have different rows of {sorted(unlike)[:5]} ({len(unlike)} tables): what several ranks have under "
            "one name counts as copies of a table, and one rank's rows are saved. Give the parts of a divided table "
            "other names, or make it a cnr_store.communication.SplitTable; average the gradients of copies"
        )


def taken_words(name: str, num_rows: int, words: Words) -> Taken:
    """Return words as taken rows, to be saved, or given back if the save does not win."""
    return Taken(name, num_rows, rows_of(words), words)


def rows_since_baseline(taken: Taken, changed: Cumulative) -> RowIds:
    """Return the rows that a one-shot delta writes of a table: the taken ones, and all before since the baseline."""
    both = Cumulative({taken.table: taken.num_rows})
    both.add(taken)
    both.add_words(taken.table, changed.words(taken.table))
    return both.row_ids(taken.table)


def rows_as_codes(
    shards: Mapping[str, LocalShard], schemas: Mapping[str, TableSchema], options: Mapping[str, TableOptions]
) -> dict[str, LatticeCodes]:
    """Return how the weights of touched rows are coded where they are, by name of the shard; pure.

    Parameters
    ----------
    shards
        By name: those whose rows are written, not those that are written whole.
    schemas
        How the tables are stored now, by table: the save must not change a scale.
    options
        By table. Tables whose rows may escape are left out: an escape row is kept as it is, and codes are not.
    """
    coded: dict[str, LatticeCodes] = {}
    for name, shard in shards.items():
        schema = schemas.get(shard.table)
        if schema is None or options[shard.table].nonfinite == "escape":
            continue
        spec = array_specs(schema)["codes"]
        if isinstance(spec.encoding, Lattice):
            coded[name] = LatticeCodes(float(spec.scale), tensor=WEIGHT)
    return coded
