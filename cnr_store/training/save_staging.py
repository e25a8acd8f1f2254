"""Copies what a save writes, at one instant: the only part of a save that holds the training up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cnr_store.errors import BackgroundSaveFailed
from cnr_store.runtime.ranks import together
from cnr_store.training.background import WEIGHT, SaveJob, TouchedRows, WholeShard
from cnr_store.training.capture import put_dense_state, rank_document, rows_to_write, trainer_document
from cnr_store.training.chain_state import ChainState
from cnr_store.training.devices import rows_as_codes, wait_for_streams
from cnr_store.training.document import trainer_name
from cnr_store.training.failures import failure_message
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.position import TrainingPosition
from cnr_store.training.reader import reader_name
from cnr_store.training.replicated_rows import taken_words, union_of, words_of
from cnr_store.training.save_plan import SavePlan
from cnr_store.training.shard_ownership import RankShard
from cnr_store.training.shards import Slots
from cnr_store.training.tensors import leaf_of
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from cnr_store_gpu import RowRequest, StagingBuffers, Taken


@dataclass(slots=True, eq=False)
class SaveStager:
    """Makes the job of a save: takes the marks, copies the marked rows, and hands over what is no row of a table.

    Attributes
    ----------
    copies_whole
        Tables that are written whole are copied; else they are read live, and the training must wait.
    codes_on_device
        Rows of lattices become codes before they leave their device.
    """

    training: LiveTraining
    chain: ChainState
    position: TrainingPosition
    copies_whole: bool
    codes_on_device: bool
    saves_rng: bool
    buffers: StagingBuffers = field(default_factory=StagingBuffers)

    def stage(self, transaction: Transaction, writer: Writer, plan: SavePlan) -> SaveJob:
        """Return the job of a planned save. Blocks; all ranks call it. If it raises, all rows are dirty as before."""
        training, chain = self.training, self.chain
        schemas = writer.snapshot.tables if writer.is_synced else {}
        chain.whole_next |= chain.rate.anew_in(transaction)
        drops = tuple(sorted((schemas.keys() | set(transaction.needs_whole_tables)) - training.tables))
        whole = set(chain.whole_next) | (set(transaction.needs_whole_tables) & training.tables)
        whole |= chain.growing.stage(transaction, whole)
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
            written = {
                name: self._whole_shard(own, plan.slots[name])
                for name, own in training.holdings.owned.items()
                if own.table in whole
            }
            wait_for_streams(tensor for one in written.values() for tensor in (one.weight, *one.slots.values()))
        except BaseException:
            training.tracker.give_back(taken)
            if staged is not None:
                staged.release()
            raise
        return SaveJob(transaction, taken, staged, rows, written, drops, declares=bool(chain.whole_next))

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
            rows[name] = TouchedRows(own.key, local + own.shard.rows[0])
            on_device = taken[name].device_rows if local is taken[name].row_ids else None
            requests[name] = RowRequest(local, {WEIGHT: own.shard.weight, **plan.slots[name]}, on_device)
        return rows, requests

    def _put_state(self, transaction: Transaction, writer: Writer, plan: SavePlan) -> None:
        """Hand over what is no row of a table: rank 0 says it for all, but for generators and readers."""
        training, rank = self.training, self.training.ranks.rank
        reader = self.position.document()  # before the generators: a loader may draw for its first state
        if rank == 0:
            known = writer.snapshot.dense if writer.is_synced else ()
            put_dense_state(transaction, known, plan.state, training.optimizers)
            transaction.put_scalars({"step": self.position.step})
            document = trainer_document(
                plan.state, training.optimizers, plan.tables, training.extras, self.chain.rate.document(),
                with_rng=self.saves_rng,
            )  # fmt: skip
        else:
            document = rank_document(with_rng=self.saves_rng)
        transaction.put_document(trainer_name(rank), document, leaf_of)
        if reader is not None:
            transaction.put_document(reader_name(rank), reader, leaf_of)

    def _whole_shard(self, own: RankShard, slots: Slots) -> WholeShard:
        weight = own.shard.weight.detach()
        if self.copies_whole:
            weight, slots = weight.clone(), {name: slot.detach().clone() for name, slot in slots.items()}
        is_new = own.table in self.chain.whole_next
        return WholeShard(own.key, weight, slots, self.chain.rate.options_for(own.table) if is_new else None)
