"""Optimizer state with one number per element: its mirror, and what a restored training has of it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager, StoreOptions
from cnr_store.types import FloatBits, Lattice

ROWS, DIM = 300, 8
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
OPTIMIZERS: dict[str, Any] = {"sum": torch.optim.Adagrad, "exp_avg": torch.optim.SparseAdam}


def trained(optimizer: str, steps: int) -> tuple[nn.EmbeddingBag, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.EmbeddingBag(ROWS, DIM, sparse=True)
    made = OPTIMIZERS[optimizer](model.parameters(), lr=0.05)
    train(model, made, steps)
    return model, made


def train(model: nn.EmbeddingBag, optimizer: torch.optim.Optimizer, steps: int) -> None:
    random = torch.Generator(torch.get_default_device()).manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, ROWS, (16, 4), generator=random)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [TableOptions(bits=4), TableOptions(slot_bits="exact"), TableOptions.exact()])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_the_memory_that_is_told_at_attach_is_what_mirrors_take(
    optimizer: str, options: TableOptions, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    model, made = trained(optimizer, 3)
    with caplog.at_level(logging.INFO, "cnr_store"):
        manager = CheckpointManager(str(tmp_path), model=model, optimizer=made, options=options)
    manager.save()
    slots = 1 if optimizer == "sum" else 2
    of_weights, of_slots = (4 if options.encoding else 2), (4 if options.slot_bits else 2)
    assert manager.mirror_bytes == ROWS * DIM * (of_weights + slots * of_slots)
    assert any(f"{manager.mirror_bytes / 2**20:.1f} MiB" in record.getMessage() for record in caplog.records)
    manager.close()


@pytest.mark.parametrize("mirror", ["memory", "mmap", "none"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_restored_training_has_the_rounded_state_of_the_saved_one(optimizer: str, mirror: Any, tmp_path: Any) -> None:
    url = str(tmp_path / "store")
    model, made = trained(optimizer, 5)
    store_options = StoreOptions(mirror=mirror)
    with CheckpointManager(
        url, model=model, optimizer=made, options=TableOptions(bits=4), store_options=store_options
    ) as manager:
        manager.save()
        for steps in (2, 3):
            train(model, made, steps)
            manager.save()
    state = {
        name: slot.clone()
        for name, slot in made.state[model.weight].items()
        if isinstance(slot, torch.Tensor) and slot.ndim == 2
    }

    other, fresh = trained(optimizer, 1)
    with CheckpointManager(url, model=other, optimizer=fresh, store_options=store_options) as manager:
        assert manager.restore() is not None
        schema = Store.open(url).snapshot().tables["weight"]
        assert [part.add is not None for part in manager.store.snapshot().manifests[-1].parts] == [mirror != "none"]
        for name, live in state.items():
            found, encoding = fresh.state[other.weight][name], schema.slots[name].encoding
            assert torch.isfinite(found).all()
            assert (found[live == 0] == 0).all()
            if isinstance(encoding, Lattice):
                np.testing.assert_allclose(found.cpu(), live.cpu(), atol=encoding.scale * 0.5001, rtol=0)
            else:
                assert isinstance(encoding, FloatBits)
                np.testing.assert_allclose(found.cpu(), live.cpu(), atol=0, rtol=2.0 ** -(encoding.mantissa_bits + 1))
        train(other, fresh, 2)
        manager.save()
