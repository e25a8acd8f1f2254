"""Copies what a save writes, at one instant: the only part of a save that holds the training up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cnr_store.errors import BackgroundSaveFailed
from cnr_store.runtime.ranks import together
from cnr_store.training.background import WEIGHT, LiveRead, SaveJob, TouchedRows, WholeShard
from cnr_store.training.capture import put_dense_state, rng_documents, rows_to_write, trainer_documents
from cnr_store.training.chain_state import ChainState
from cnr_store.training.devices import rows_as_codes, wait_for_streams
from cnr_store.training.failures import failure_message
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.position import TrainingPosition
from cnr_store.training.reader import reader_name
from cnr_store.training.replicated_rows import taken_words, union_of, words_of
from cnr_store.training.save_plan import SavePlan
from cnr_store.training.state import needs_new_schema
from cnr_store.training.tensors import leaf_of
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from cnr_store_gpu import RowRequest, StagingBuffers, Taken


@dataclass(slots=True, eq=False)
class SaveStager:
    """Makes the job of a save: takes the marks, copies the marked rows, and hands over what is no row of a table.

    Attributes
    ----------
    codes_on_device
        Rows of lattices become codes before they leave their device.
    """

    training: LiveTraining
    chain: ChainState
    position: TrainingPosition
    codes_on_device: bool
    saves_rng: bool
    buffers: StagingBuffers = field(default_factory=StagingBuffers)

    def begin_reading(self, transaction: Transaction, writer: Writer, plan: SavePlan) -> LiveRead | None:
        """Return what of a planned save can be read while the training goes on; None where no table is stored anew.

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
        read = {name for name, own in training.holdings.by_name.items() if own.table in chain.whole_next}
        training.tracker.give_back({name: one for name, one in taken.items() if name not in read})
        taken = {name: one for name, one in taken.items() if name in read}
        return LiveRead(transaction, whole, taken, self._drops(transaction, writer))

    def is_outdated(self, read: LiveRead, plan: SavePlan) -> bool:
        """Whether tables have other slots now than when they began to be read."""
        tables, options, owned = read.transaction.tables, self.training.options, self.training.holdings.owned
        return any(
            needs_new_schema(tables[one.key.table], owned[name].shard, plan.slots[name], options[one.key.table])
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
        taken: dict[str, Taken] = {}
        staged = None

        def share() -> dict[str, str]:
            chain.rate.stage(transaction, writer, chain.whole_next)
            self._put_state(transaction, writer, plan)
            taken.update(training.tracker.take())
            return words_of(taken, training.holdings.replicated)

        try:
            # Here, so that a rank that cannot take part is known to the others before they stage anything.
            marked = union_of(together(training.control, share))
            for name, own in training.holdings.owned.items():
                if own.table in marked:
                    taken[name] = taken_words(name, taken[name].num_rows, marked[own.table])
            rows, requests = self._touched_rows(plan, taken, whole)
            if self.codes_on_device:
                coming = {name: training.holdings.owned[name].shard for name in requests}
                self.buffers.quantize = dict(rows_as_codes(coming, transaction.tables, training.options))
            try:
                staged = self.buffers.gather(requests)
            except RuntimeError as error:  # no thread, no memory of the device: the training may go on
                raise BackgroundSaveFailed(failure_message(error)) from error
            written = self._whole_shards(plan, whole)
            wait_for_streams(tensor for one in written.values() for tensor in (one.weight, *one.slots.values()))
        except BaseException:
            training.tracker.give_back(taken)
            if staged is not None:
                staged.release()
            raise
        drops = self._drops(transaction, writer)
        return SaveJob(transaction, taken, staged, rows, written, drops, declares=bool(chain.whole_next), read=read)

    def _drops(self, transaction: Transaction, writer: Writer) -> tuple[str, ...]:
        """Tables of the head that the training does not have."""
        schemas = writer.snapshot.tables if writer.is_synced else {}
        return tuple(sorted((schemas.keys() | set(transaction.needs_whole_tables)) - self.training.tables))

    def _touched_rows(
        self, plan: SavePlan, taken: Mapping[str, Taken], whole: set[str]
    ) -> tuple[dict[str, TouchedRows], dict[str, RowRequest]]:
        """The rows that are written of tables that are not written whole, and what of them is to be copied."""
        rows: dict[str, TouchedRows] = {}
        requests: dict[str, RowRequest] = {}
        for name, own in self.training.holdings.owned.items():
            if own.table in whole:
                continue
            local = rows_to_write(taken[name], plan.decision, self.chain.lineage.changed)
            rows[name] = TouchedRows(own.key, local + own.shard.rows[0] if own.shard.rows[0] else local)
            on_device = taken[name].device_rows if local is taken[name].row_ids else None
            requests[name] = RowRequest(local, {WEIGHT: own.shard.weight, **plan.slots[name]}, on_device)
        return rows, requests

    def _put_state(self, transaction: Transaction, writer: Writer, plan: SavePlan) -> None:
        """Hand over what is no row of a table: rank 0 says it for all, but for generators and readers."""
        training, rank = self.training, self.training.ranks.rank
        reader = self.position.document()  # before the generators: a loader may draw for its first state
        documents: dict[str, Any] = {}
        if rank == 0:
            known = writer.snapshot.dense if writer.is_synced else ()
            put_dense_state(transaction, known, plan.state, plan.other)
            transaction.put_scalars({"step": self.position.step})
            documents |= trainer_documents(
                plan.state, training.optimizers, plan.other, plan.tables, training.extras, self.chain.rate.document()
            )
        if self.saves_rng:
            documents |= rng_documents(rank)
        if reader is not None:
            documents[reader_name(rank)] = reader
        for name, document in documents.items():
            transaction.put_document(name, document, leaf_of)

    def _whole_shards(self, plan: SavePlan, tables: set[str]) -> dict[str, WholeShard]:
        """This rank's shards of tables, by name."""
        anew, options = self.chain.whole_next, self.chain.rate.options_for
        return {
            name: WholeShard(
                own.key, own.shard.weight.detach(), plan.slots[name], options(own.table) if own.table in anew else None
            )
            for name, own in self.training.holdings.owned.items()
            if own.table in tables
        }
