"""A manager of a model on an accelerator; `--device` runs the other tests of this folder there too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager
from cnr_store.training.reader import capture_rng, restore_rng
from tests.support.accelerator import DEVICE, STREAMS, keep_busy, needs_accelerator
from tests.support.memory import store_in_memory
from tests.training.runs import grouped

pytestmark = [
    pytest.mark.gpu,
    needs_accelerator,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
ROWS, DIM = 200_000, 32


class Model(nn.Module):
    """A table and a dense tensor, on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, device=DEVICE)
        self.head = nn.Linear(DIM, 1, device=DEVICE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table(ids))
        return result


def manager_of(store: Store, model: Model, optimizer: torch.optim.Optimizer, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        store, model=model, optimizer=optimizer, options=TableOptions.exact(), **grouped(**options)
    )


def train(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(number)
    # Each row once: sums of several gradients of a row come in another order each time.
    ids = torch.randperm(ROWS, generator=generator, device=DEVICE)[:1024].view(256, 4)
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("first_baseline", ["stall", "live"])
def test_a_full_save_waits_for_the_stream_that_trains(first_baseline: Any) -> None:
    model, store = Model(), store_in_memory(threads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = manager_of(store, model, optimizer, first_baseline=first_baseline)
    stream = STREAMS.Stream()
    stream.wait_stream(STREAMS.current_stream())

    with STREAMS.stream(stream):
        keep_busy(200_000_000)  # 0.1 s: a thread that reads on a stream of its own sees what was before
        with torch.no_grad():
            model.table.weight.fill_(3.0)
        manager.tracker.mark_all("table.weight")
        manager.save()

    assert np.all(store.snapshot().table("table.weight").read() == 3.0)
    manager.close()


def test_the_generators_of_a_device_are_restored() -> None:
    torch.rand(3, device=DEVICE)
    captured = capture_rng()
    drawn = torch.rand(3, device=DEVICE)

    restore_rng(captured)

    assert torch.equal(torch.rand(3, device=DEVICE), drawn)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_run_that_is_restored_goes_on_as_if_it_had_not_ended(kind: str) -> None:
    def run(store: Store, steps: range) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        manager = manager_of(store, model, optimizer, quantize_on_device=True)
        if steps.start:
            manager.restore()
        for number in steps:
            train(model, optimizer, number)
            manager.step()
            if number % 2:
                manager.save()
        manager.close()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for number, slots in optimizer.state_dict()["state"].items():
            state |= {f"{number}/{name}": slot.clone() for name, slot in slots.items()}
        return state

    without_end, store = run(store_in_memory(threads=2), range(8)), store_in_memory(threads=2)
    run(store, range(4))
    restored = run(store, range(4, 8))

    assert restored.keys() == without_end.keys()
    for name, tensor in without_end.items():
        assert torch.equal(restored[name], tensor), name
