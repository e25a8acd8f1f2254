"""Messages about a model of hundreds of tables: each names a few of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cnr_store import Store
from cnr_store.errors import BadInput, CnrStoreError
from cnr_store.serving import Loader
from cnr_store.training import CheckpointManager, load

MANY = 100


class Towers(nn.Module):
    """Many small tables, below a prefix."""

    def __init__(self, prefix: str = "tables") -> None:
        super().__init__()
        self.prefix = prefix
        setattr(self, prefix, nn.ModuleList(nn.EmbeddingBag(4, 2, mode="sum") for _ in range(MANY)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids) for table in getattr(self, self.prefix)]).sum()


def managed(url: Path) -> tuple[Towers, CheckpointManager]:
    model = Towers()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, CheckpointManager(url, model=model, optimizer=optimizer)


def names_in(error: CnrStoreError) -> set[str]:
    return set(re.findall(r"\w+\.\d+\.weight", str(error)))


def test_a_save_in_the_middle_of_a_step_names_a_few_tables(tmp_path: Path) -> None:
    model, manager = managed(tmp_path / "store")
    model(torch.zeros(1, 1, dtype=torch.int64))

    with pytest.raises(BadInput, match="between forward and optimizer step") as told:
        manager.save()

    manager.close()
    assert len(names_in(told.value)) == 5
    assert f"and {MANY - 5} more" in str(told.value)


@pytest.mark.parametrize(
    "refused",
    [
        lambda url: load(url, Towers("renamed")),
        lambda url: load(url, Towers("renamed"), strict=False),
        lambda url: load(url, Towers(), tables={"tables.7": "tables.7.weight"}),
        lambda url: load(url, Towers(), tables={"tables.7.weight": "tables.7"}),
        lambda url: Store.open(url).snapshot().table("tables.7"),
        lambda url: Loader(url, ["tables.7"]),
    ],
    ids=["other-tables", "nothing-fits", "no-stored-table", "no-table-of-mine", "snapshot", "loader"],
)
def test_an_error_about_a_name_lists_few_of_many_tables(tmp_path: Path, refused: Callable[[Path], object]) -> None:
    _, manager = managed(tmp_path / "store")
    manager.save()
    manager.close()

    with pytest.raises(CnrStoreError, match=f"and {MANY - 5} more") as told:
        refused(tmp_path / "store")

    assert len(names_in(told.value)) <= 10


def test_of_many_tables_an_error_lists_those_like_the_wrong_name(tmp_path: Path) -> None:
    _, manager = managed(tmp_path / "store")
    manager.save()
    manager.close()

    with pytest.raises(CnrStoreError, match=r"it has \['tables\.77\.weight', ") as told:
        Store.open(tmp_path / "store").snapshot().table("tables.77.weights")

    assert len(names_in(told.value)) >= 5
