"""Decides, with all ranks together, what a save writes: a baseline or a delta, and which tables in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cnr_store.format import document_tree
from cnr_store.runtime.ranks import together
from cnr_store.training.chain_state import ChainState
from cnr_store.training.kept_plan import LocalState
from cnr_store.training.live_training import LiveTraining
from cnr_store.training.shards import Slots
from cnr_store.training.state import OtherState, StatePlan, fused_documents, stepped_documents
from cnr_store.training.tensors import leaf_of, tensor_of
from cnr_store.write.policy import Decision, Policy, decide
from cnr_store.write.writer import Writer


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What one save writes.

    Attributes
    ----------
    state, slots, other
        This rank's state plan, its slots by name of the shard, and its other optimizer state.
    decision
        The same on all ranks.
    tables
        What all ranks together know of the tables: ``slots``, ``fused`` and ``stepped``.
    """

    state: StatePlan
    slots: Mapping[str, Slots]
    other: OtherState
    decision: Decision
    tables: Mapping[str, Any]


def plan_save(training: LiveTraining, chain: ChainState, policy: Policy, writer: Writer) -> SavePlan:
    """Return the plan of the next save. Blocks; all ranks call it. Adds tables to rewrite to ``chain.whole_next``."""
    found: list[tuple[LocalState, Decision]] = []

    def share() -> dict[str, Any]:
        local = training.plan.local_state()
        mine = _decide_here(training, chain, policy, writer, local)
        found.append((local, mine))
        known = {
            "slots": local.documents, "fused": fused_documents(local.state.shards.values()),
            "stepped": stepped_documents(local.state, local.other),
        }  # fmt: skip
        return {
            "kind": mine.kind, "base": mine.base, "whole": sorted(chain.whole_next),
            "tables": known if training.control.world == 1 else document_tree.encode(known, leaf_of),
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
    return SavePlan(local.state, local.slots, local.other, decision, known)


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
    if chain.whole_next or schemas.keys() - training.tables:
        return Decision("baseline", "baseline", f"tables {sorted(chain.whole_next)} must be written whole")
    length = len(writer.head.record.chain)
    return chain.rate.decide(decide(policy, chain.lineage.sizes, chain_length=length), length)
