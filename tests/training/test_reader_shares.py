"""`share_evenly`: real loaders of one number of ranks continue on another, and no sample of the epoch is skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from cnr_store.errors import BadInput
from cnr_store.training import share_evenly

SAMPLES = 480
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def loader_of(rank: int, world: int, workers: int, batch_size: int = 4) -> StatefulDataLoader[torch.Tensor]:
    sampler = StatefulDistributedSampler(torch.arange(SAMPLES), world, rank, shuffle=True, seed=3)
    sampler.set_epoch(5)
    return StatefulDataLoader(torch.arange(SAMPLES), batch_size=batch_size, sampler=sampler, num_workers=workers)


def samples_in(batches: Iterator[torch.Tensor]) -> Counter[int]:
    return Counter(sample for batch in batches for sample in batch.tolist())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("saved", "resumed", "steps"), [(4, 2, 7), (2, 4, 6), (2, 3, 5), (3, 1, 4), (1, 4, 0)])
def test_no_sample_is_skipped_on_another_number_of_ranks(saved: int, resumed: int, steps: int, workers: int) -> None:
    trained: Counter[int] = Counter()
    states = []
    for rank in range(saved):
        loader = loader_of(rank, saved, workers)
        batches = iter(loader)
        trained += samples_in(next(batches) for _ in range(steps))
        states.append(loader.state_dict())

    for rank, state in enumerate(share_evenly(resumed)(states)):
        loader = loader_of(rank, resumed, workers)
        loader.load_state_dict(state)
        trained += samples_in(iter(loader))

    assert set(trained) == set(range(SAMPLES))
    assert trained.total() - SAMPLES < resumed
    assert max(trained.values()) <= 2


def test_saved_states_are_not_changed() -> None:
    loader = loader_of(0, 2, 0)
    next(iter(loader))
    state = loader.state_dict()
    before = repr(state)

    share_evenly(4)([state, state])

    assert repr(state) == before


class Counting(Dataset[int]):
    """A dataset with a state."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def state_after_a_batch(loader: StatefulDataLoader[Any]) -> Any:
    next(iter(loader))
    return loader.state_dict()


def test_what_cannot_be_shared_is_refused() -> None:
    moved, still = loader_of(0, 2, 0), loader_of(1, 2, 0)
    iter(still)
    sampler = StatefulDistributedSampler(Counting(), 2, 0)
    with_state = StatefulDataLoader(Counting(), batch_size=4, sampler=sampler)
    plain = StatefulDataLoader(torch.arange(40), batch_size=4)

    with pytest.raises(BadInput, match="after \\[4, 0\\] samples"):
        share_evenly(3)([state_after_a_batch(moved), still.state_dict()])
    with pytest.raises(BadInput, match="state of its own"):
        share_evenly(3)([state_after_a_batch(with_state)])
    with pytest.raises(BadInput, match="StatefulDistributedSampler"):
        share_evenly(3)([state_after_a_batch(plain)])
    with pytest.raises(BadInput, match="StatefulDistributedSampler"):
        share_evenly(3)([{"mine": 1}])
    with pytest.raises(BadInput):
        share_evenly(0)
