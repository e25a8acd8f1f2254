"""What a save of a training stores beside rows, as the manager makes it.

Metadata is the record, the manifest, and the documents of the training: at most 4 kB, and 60 bytes for each touched
table. The words of torch's generator are counted apart. Objects: two of the segment, two for each array of the tables
and for the dense layer.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from cnr_store.format.layout import commit_key
from cnr_store.training import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch itself, by its Adagrad

ROWS, DIM = 12, 4
TWISTER_BYTES = 624 * 4
"""The words of torch's generator on a CPU, a Mersenne Twister: random numbers, which do not compress."""

Optimizers = list[torch.optim.Optimizer]


class ManyTables(nn.Module):
    """Tables, dropout, and a dense layer. Dropout of 0 draws nothing from torch's generator."""

    def __init__(self, tables: int, dropout: float) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"t{k}": nn.Embedding(ROWS, DIM, sparse=True) for k in range(tables)})
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(DIM, 1)

    def forward(self, rows: torch.Tensor, touched: int) -> torch.Tensor:
        found = torch.stack([self.tables[f"t{k}"](rows) for k in range(touched)])
        result: torch.Tensor = self.out(self.drop(found)).square().mean()
        return result


def optimizers(kind: str, model: ManyTables) -> Optimizers:
    tables, dense = list(model.tables.parameters()), list(model.out.parameters())
    if kind == "adagrad":
        return [torch.optim.Adagrad([*tables, *dense], lr=0.1)]
    return [torch.optim.SparseAdam(tables), torch.optim.Adam(dense)]


class Batches:
    """A reader of batches, which are their own numbers."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "next": self.next, "seed": 17}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def saved(
    manager: CheckpointManager, steps: Sequence[int], reader: Batches, model: ManyTables, made: Optimizers
) -> None:
    """Train one step for each number of touched tables, and save behind it."""
    for touched in steps:
        for one in made:
            one.zero_grad()
        model(torch.tensor([3, 4, 9]), touched).backward()
        for one in made:
            one.step()
        reader.next += 1
        manager.step()
        manager.save()


@pytest.mark.parametrize("kind", ["adagrad", "sparse_adam"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("tables", "touched"),
    [
        (26, 10), (26, 26), (300, 10), (300, 300),
        *(pytest.param(1000, touched, marks=pytest.mark.soak) for touched in (10, 1000)),
    ],
)  # fmt: skip
def test_metadata_of_a_save_grows_with_the_tables_that_it_touches(
    kind: str, dropout: float, tables: int, touched: int
) -> None:
    """Where something draws from torch's generator on the CPU, its new words are stored beside the budget.

    They are 2,496 bytes at any number of tables, and no encoding makes them fewer. Where nothing draws, the generator
    is kept, and all that a save stores is in the budget.
    """
    torch.manual_seed(1)
    model, reader = ManyTables(tables, dropout), Batches()
    made = optimizers(kind, model)
    url = f"memory://budget-{uuid.uuid4().hex}"
    with CheckpointManager(url, model=model, optimizer=made, reader=reader) as manager:
        saved(manager, [tables, touched], reader, model, made)
        storage, head = manager.store.storage, manager.store.head().record
        snapshot = manager.store.snapshot()
        names = snapshot.documents
        groups = sum(array.path.endswith(".rows") for array in snapshot.manifests[-1].arrays)

    entry = head.chain[-1]
    found = {item.key: item.size_bytes for item in storage.list_objects(f"data/{entry.seg}")}
    stored = {key.partition("/r00000-")[2][9:]: size for key, size in found.items() if key.endswith(".json.zst")}
    metadata = len(storage.read(commit_key(head.v)) or b"") + sum(stored.values())
    drawn = {"document-0.json.zst"} if dropout else set()

    assert entry.kind == "delta"
    assert names == ["progress/0", "reader/0", "rng/0/numpy", "rng/0/python", "rng/0/torch", "trainer/0"]
    assert stored.keys() == {""} | drawn, "the manifest, which has what is small and changed"
    assert len(found) == 2 + 2 + 2 * groups * {"adagrad": 3, "sparse_adam": 4}[kind] + len(drawn)
    assert groups == 1 or tables == 1000, "codes that need int32 are a group of their own"
    assert metadata - (TWISTER_BYTES if drawn else 0) <= 4000 + 60 * touched, stored
