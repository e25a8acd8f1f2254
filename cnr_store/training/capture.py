"""What is saved of one instant: read from the live objects, copied or encoded at once, so that training may go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import torch

from cnr_store.training.document import FORMAT, PROGRESS, TRAINER, RateDocument, equal_states, rng_name
from cnr_store.training.reader import Stateful
from cnr_store.training.rng import capture_rng
from cnr_store.training.state import OtherState, StatePlan, add_stepped, optimizer_documents
from cnr_store.training.tensors import as_array, dense_dtype_name, host_copy
from cnr_store.types import RowIds
from cnr_store.write.policy import Decision
from cnr_store.write.transaction import Transaction
from cnr_store_gpu import Cumulative, Taken


def put_dense_state(transaction: Transaction, known: Iterable[str], plan: StatePlan, other: OtherState) -> None:
    """Hand copies of every tensor that is saved whole to a transaction, and end those of ``known`` that are gone."""
    tensors = {name: host_copy(tensor) for name, tensor in (plan.dense | other.dense).items()}
    transaction.put_dense(
        {name: as_array(tensor) for name, tensor in tensors.items()},
        {name: dense_dtype_name(tensor, name) for name, tensor in tensors.items()},
    )
    for name in set(known) - tensors.keys():
        transaction.drop_dense(name)


def trainer_documents(
    plan: StatePlan,
    optimizers: Sequence[torch.optim.Optimizer],
    other: OtherState,
    tables: Mapping[str, Mapping[str, Any]],
    extras: Mapping[str, Stateful],
    rate: RateDocument,
) -> dict[str, dict[str, Any]]:
    """Return, by name, the documents of all that is no tensor of its own: hyperparameters, step counters, extras; live.

    ``tables``: ``slots``, ``fused`` and ``stepped`` of the tables on all ranks.
    """
    found = optimizer_documents(plan, optimizers, other)
    add_stepped(found, tables["stepped"])
    groups = [[group["parameters"] for group in one["groups"]] for one in found]
    return {
        TRAINER: {
            "format": FORMAT,
            "optimizers": [{"class": one["class"], "groups": own} for one, own in zip(found, groups, strict=True)],
            "slots": tables["slots"],
        },
        PROGRESS: {
            "options": [[group["options"] for group in one["groups"]] for one in found],
            "state": [
                equal_states(one["state"], [*chain.from_iterable(own)]) for one, own in zip(found, groups, strict=True)
            ],
            "fused": tables["fused"],
            "extras": {name: extra.state_dict() for name, extra in extras.items()},
            "rate": msgspec.to_builtins(rate),
        },
    }


def rng_documents(rank: int) -> dict[str, Any]:
    """Return, by name, the documents of the generators of a rank's process."""
    return {rng_name(rank, generator): state for generator, state in capture_rng().items()}


def rows_to_write(taken: Taken, decision: Decision, changed: Cumulative) -> RowIds:
    """Return the rows a save writes of a table: the taken ones, and all since the baseline for a one-shot delta."""
    if decision.kind == "baseline" or decision.base == "head":
        return taken.row_ids
    both = Cumulative({taken.table: taken.num_rows})
    both.add(taken)
    both.add_words(taken.table, changed.words(taken.table))
    return both.row_ids(taken.table)
