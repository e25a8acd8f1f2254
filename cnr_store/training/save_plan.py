"""Decides, with all ranks together, what a save writes: a baseline or a delta, and which tables in full.

The decision rests on what is known of the saves before it (`ChainState`): tables to write whole, the chain's sizes,
table sizes, scales. Only the training thread changes that: when a save is planned, when its outcome is known, and after
a restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np

from cnr_store.format import document_tree
from cnr_store.format.records import CommitRecord, TableSchema
from cnr_store.runtime.ranks import together
from cnr_store.training.background import SaveJob
from cnr_store.training.document import fused_documents, stepped_documents
from cnr_store.training.kept_plan import LocalState
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.matching import RestorePlan
from cnr_store.training.options import PrecisionPolicy
from cnr_store.training.precision.calibrating import QualityTarget
from cnr_store.training.precision.rate_control import RateControl, ScaleChange
from cnr_store.training.save_interval import SaveMeasure
from cnr_store.training.shards import Holdings, RankShard
from cnr_store.training.tensors import leaf_of, tensor_of
from cnr_store.types import RowIds
from cnr_store.write.policy import CheckpointSize, Decision, Policy, decide
from cnr_store.write.transaction import Transaction
from cnr_store.write.writer import Writer
from cnr_store_gpu import Cumulative, RowTracker, Taken
from cnr_store_gpu.words import mark_words, words_of_rows


@dataclass(slots=True)
class Growing:
    """Tables that have more rows than the stored ones; ``rows``: table to its number of rows now."""

    rows: dict[str, int] = field(default_factory=dict)

    def restored(self, plan: RestorePlan, holdings: Holdings, policy: Policy, tracker: RowTracker) -> set[str]:
        """Record what was restored, and mark the new rows; returns tables that the next save must write whole."""
        resized = plan.resized
        self.rows = {table: holdings.tables[table][0] for table in resized}
        for name, holding in holdings.by_name.items():
            if holding.key.table in resized:
                num_rows = holding.shard.rows[1] - holding.shard.rows[0]
                new = np.arange(resized[holding.key.table], num_rows, dtype=np.int64)
                tracker.give_back(taken_rows(name, num_rows, new))
        return set() if policy == "consecutive" else set(self.rows)

    def applied_to(self, schemas: Mapping[str, TableSchema]) -> dict[str, TableSchema]:
        """Return stored schemas as the next save will leave them. Pure."""
        resized = {
            name: msgspec.structs.replace(schemas[name], num_rows=rows)
            for name, rows in self.rows.items()
            if name in schemas
        }
        return {**schemas, **resized}

    def stage(self, transaction: Transaction, whole: set[str]) -> set[str]:
        """Resize in a delta what is not written ``whole``; returns what a baseline must be given whole."""
        if transaction.kind == "baseline":
            return set(self.rows)
        for table in self.rows.keys() - whole:
            transaction.resize_table(table, self.rows[table])
        return set()

    def won(self) -> None:
        """Forget them: a save that recorded them is committed."""
        self.rows.clear()


@dataclass(slots=True)
class Lineage:
    """Sizes since the baseline, and rows changed since then, by shard."""

    changed: Cumulative
    sizes: list[CheckpointSize] = field(default_factory=list)

    def add(self, job: SaveJob) -> None:
        """Add a committed save."""
        size = CheckpointSize(job.transaction.kind, job.transaction.size_bytes)
        if size.kind == "baseline":
            self.sizes = [size]
            self.changed.clear()
        else:
            self.sizes.append(size)
            self.changed.add(job.taken)

    def restored(
        self, sizes: list[CheckpointSize], changed: Mapping[str, RowIds], holdings: Mapping[str, RankShard]
    ) -> None:
        """Reset after a restore; ``changed`` are row ids of whole tables, ``holdings`` this rank's shards."""
        self.sizes = sizes
        self.changed.clear()
        for name, holding in holdings.items():
            first, stop = holding.shard.rows
            rows = changed.get(holding.key.table, np.empty(0, np.int64))
            self.changed.add_rows(name, rows[(rows >= first) & (rows < stop)] - first)


@dataclass(slots=True, eq=False)
class ChainState:
    """What this training knows of the chain that it continues.

    Attributes
    ----------
    rate
        How exact tables are stored.
    quality
        The calibration that comes before the first save; None where there is none, or it is done.
    lineage
        Sizes of the checkpoints since the baseline, and the rows changed since.
    growing
        Tables that have more rows than the stored ones.
    whole_next
        Tables that the next save must write whole; the same on all ranks once a save is decided on.
    """

    rate: RateControl
    quality: QualityTarget | None
    lineage: Lineage
    growing: Growing = field(default_factory=Growing)
    whole_next: set[str] = field(default_factory=set)

    def won(self, job: SaveJob, training: LiveTraining) -> Mapping[str, ScaleChange]:
        """Record that a save is committed; returns what it did to scales."""
        if job.declares:  # what is stored anew is that on all ranks, in one save
            self.whole_next -= training.tables
        self.lineage.add(job)
        self.growing.won()
        return self.rate.won(job.transaction)


def new_chain_state(training: LiveTraining, precision: PrecisionPolicy) -> ChainState:
    """Return the state of a training that has saved nothing. Blocks; all ranks call it.

    Raises
    ------
    BadInput
        The options contradict each other about scales.
    """
    holdings, options = training.holdings, training.options
    rate = RateControl(options, holdings, precision.schedule)
    quality = QualityTarget.of(precision, options, training.declared, holdings.shards, training.ranks)
    lengths = {shard.name: shard.rows[1] - shard.rows[0] for shard in holdings.shards}
    return ChainState(rate, quality, Lineage(Cumulative(lengths)))


def sizes_since_baseline(policy: Policy, records: Iterable[CommitRecord]) -> list[CheckpointSize]:
    """Return the sizes since the baseline of the newest record, oldest first.

    Parameters
    ----------
    records
        Newest first. `intermittent` reads more than one, because a chain has only the last of its deltas.
    """
    walk = iter(records)
    newest = next(walk)
    sizes = [CheckpointSize(e.kind, e.size_bytes) for e in newest.chain]
    if policy != "intermittent" or len(sizes) < 2:
        return sizes
    baseline, last = newest.chain[0], newest.chain[-1]
    deltas = {last.seg: last.size_bytes}
    for record in walk:
        if not record.chain or record.chain[0].seg != baseline.seg:
            if record.kind in ("baseline", "compact", "delta"):
                break
            continue
        if record.kind == "baseline":
            break
        if record.kind == "delta" and len(record.chain) > 1:
            deltas.setdefault(record.chain[-1].seg, record.chain[-1].size_bytes)
    return [sizes[0], *(CheckpointSize("delta", size) for size in reversed(deltas.values()))]


def taken_rows(name: str, num_rows: int, rows: RowIds) -> Taken:
    """Return sorted rows of a shard as taken ones, to be given back."""
    words = np.zeros(words_of_rows(num_rows), np.uint32)
    mark_words(words, rows, 0, num_rows)
    return Taken(name, num_rows, rows, words)


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What one save writes.

    Attributes
    ----------
    local
        What this rank has to save.
    decision
        The same on all ranks.
    tables
        What all ranks together know of the tables: ``slots``, ``fused`` and ``stepped`` (of several ranks).
    measures
        By rank, what saves cost it; None where that is not measured.
    """

    local: LocalState
    decision: Decision
    tables: Mapping[str, Any]
    measures: Sequence[SaveMeasure | None]


def plan_save(
    training: LiveTraining, chain: ChainState, policy: Policy, writer: Writer, measure: SaveMeasure | None = None
) -> SavePlan:
    """Return the plan of the next save. Blocks; all ranks call it. Adds tables to rewrite to ``chain.whole_next``.

    ``measure`` is what saves cost this rank.
    """
    found: list[tuple[LocalState, Decision]] = []

    def share() -> dict[str, Any]:
        local = training.plan.local_state()
        mine = _decide_here(training, chain, policy, writer, local)
        found.append((local, mine))
        known = {
            "slots": local.documents, "fused": fused_documents(local.state.shards.values()),
            "stepped": {} if training.control.world == 1 else stepped_documents(local.state, local.other),
        }  # fmt: skip
        return {
            "kind": mine.kind, "base": mine.base, "whole": sorted(chain.whole_next),
            "tables": known if training.control.world == 1 else document_tree.encode(known, leaf_of),
            "measure": None if measure is None else asdict(measure),
        }  # fmt: skip

    answers = together(training.control, share)
    chain.whole_next.update(*(answer["whole"] for answer in answers))
    known: dict[str, Any] = {"slots": {}, "fused": {}, "stepped": {}}
    for answer in reversed(answers):
        tables = answer["tables"]
        given = tables if training.control.world == 1 else document_tree.decode(tables, tensor_of)
        for name, of_tables in known.items():
            of_tables.update(given[name])
    local, decision = found[0]
    if any(answer["kind"] == "baseline" for answer in answers):
        decision = Decision("baseline", "baseline", "a rank needs it")
    if decision.kind == "baseline":
        chain.whole_next |= chain.rate.waits_for_baseline()
        chain.whole_next |= chain.rate.too_fine(training.control, writer, chain.whole_next)
    measures = [None if one is None else SaveMeasure(**one) for one in (answer["measure"] for answer in answers)]
    return SavePlan(local, decision, known, measures)


def _decide_here(
    training: LiveTraining, chain: ChainState, policy: Policy, writer: Writer, local: LocalState
) -> Decision:
    """Return what this rank would save if it were alone."""
    schemas = chain.growing.applied_to(writer.snapshot.tables) if writer.is_synced else {}
    chain.whole_next |= chain.rate.waits_for_baseline()
    chain.whole_next |= training.plan.tables_anew(local, schemas, training.options)
    if not writer.is_synced:
        chain.whole_next |= training.tables  # also those of other ranks, which forget them with us
        return Decision("baseline", "baseline", "the writer does not know the head's state")
    if chain.whole_next or schemas.keys() - training.stored_tables:
        return Decision("baseline", "baseline", f"tables {sorted(chain.whole_next)} must be written whole")
    length = len(writer.head.record.chain)
    return chain.rate.decide(decide(policy, chain.lineage.sizes, chain_length=length), length)
