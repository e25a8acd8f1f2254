"""Trainings that begin from imported weights: no document says which precision their scales are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager, SaveReport
from cnr_store.transfer.importing import import_tensors
from cnr_store.transfer.safetensors_file import Tensor, TensorFile
from tests.training.test_rate_control import step_of

ROWS, DIM = 400, 8


def saved(url: str, options: TableOptions) -> SaveReport:
    """Restore the weights, or take new ones, and save."""
    torch.manual_seed(3)
    with CheckpointManager(url, model=nn.Embedding(ROWS, DIM), optimizer=[], options=options) as manager:
        manager.restore()
        report = manager.save()
    assert report is not None
    return report


def import_weights(url: str, options: TableOptions) -> None:
    torch.manual_seed(3)
    weights = TensorFile({"weight": Tensor("float32", nn.Embedding(ROWS, DIM).weight.detach().cpu().numpy())})
    with Store.create(url) as store:
        import_tensors(store, weights, tables=["weight"], options=options)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"bits": 2}, {}),
        ({"max_error": 0.3}, {"bits": 4}),
        ({"bits": 2}, {"bits": "auto", "expected_restores": 100}),
    ],
)
def test_imported_weights_get_the_scale_of_the_training(
    first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    """A regression: a training with other bits kept the scale of the import for good, and did not say so."""
    url, other = str(tmp_path / "store"), str(tmp_path / "other")
    options = TableOptions(**then)
    import_weights(url, TableOptions(**first))

    assert saved(url, options).kind == "baseline"

    saved(other, options)
    with Store.open(url) as store, Store.open(other) as asked:
        assert step_of(store.snapshot()) == pytest.approx(step_of(asked.snapshot()), rel=0.5)
    assert saved(url, options).kind == "delta"


def test_weights_that_were_imported_exactly_are_not_written_again(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    import_weights(url, TableOptions.exact())

    assert saved(url, TableOptions.exact()).kind == "delta"
    with Store.open(url) as store:
        stored = store.snapshot().table("weight").read()
    torch.manual_seed(3)
    np.testing.assert_array_equal(stored, nn.Embedding(ROWS, DIM).weight.detach().cpu().numpy())
