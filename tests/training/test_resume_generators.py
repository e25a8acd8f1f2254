"""A restored training draws what the uninterrupted one draws: dropout, noise and shuffling, from the first batch on."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from cnr_store import TableOptions
from cnr_store.training import CarriedBatch, CarryingReader, CheckpointManager, GrantedReader

ROWS, BATCH, PER_EPOCH = 40, 8, 5
TOTALS = {0: 3 * PER_EPOCH, 2: 2 * PER_EPOCH}
"""By number of workers: the steps of a whole training. Each epoch starts the workers anew, which takes long."""

Loader = StatefulDataLoader[Any]
Trace = list[Any]


class Numbers(Dataset[Any]):
    def __init__(self, length: int = ROWS) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index % ROWS


class Augmented(Numbers):
    """Draws for each sample, from the generators of the process that fetches it, which are its state."""

    def __getitem__(self, index: int) -> Any:
        return (index + random.randrange(3) + int(torch.randint(3, ()))) % ROWS

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        return {"torch": torch.get_rng_state(), "version": version, "words": list(words), "gauss": gauss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate((state["version"], tuple(state["words"]), state["gauss"]))


def shuffled(workers: int) -> Loader:
    """The sampler's seed, and a seed at each epoch, come from torch's own generator."""
    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers)


def sampled(workers: int) -> Loader:
    """The sampler has a generator of its own; the loader draws a seed from torch's at each epoch."""
    sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
    return StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler, num_workers=workers)


def seeded(workers: int) -> Loader:
    """Sampler and loader draw from one generator, which is not torch's."""
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, generator=generator, num_workers=workers)


def distributed(workers: int, kind: type[DistributedSampler[Any]] = DistributedSampler) -> Loader:
    """This rank's half, in an order that the number of the epoch gives."""
    sampler = kind(Numbers(2 * ROWS), num_replicas=2, rank=1)
    return StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler, num_workers=workers)


def distributed_with_a_state(workers: int) -> Loader:
    return distributed(workers, StatefulDistributedSampler)


def augmented(workers: int) -> Loader:
    return StatefulDataLoader(Augmented(), batch_size=BATCH, shuffle=True, num_workers=workers)


def with_two(workers: int) -> Loader:
    """One generator for the order, one for the seeds of workers, whose dataset draws."""
    sampler = RandomSampler(Augmented(), generator=torch.Generator().manual_seed(5))
    own = torch.Generator().manual_seed(6)
    return StatefulDataLoader(Augmented(), batch_size=BATCH, sampler=sampler, generator=own, num_workers=workers)


class Kept:
    """A generator as an extra of the manager."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> Any:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.generator.set_state(state["state"])


LOADERS = [shuffled, sampled, seeded, distributed, distributed_with_a_state]


class Trainee:
    """A table, dropout, and noise from numpy's and Python's generators; made anew it is what it was."""

    def __init__(self, make: Callable[[int], Loader], workers: int, wrap: Callable[[Loader], Any]) -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        self.table = nn.Embedding(ROWS, 4)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.1)
        self.loader = make(workers)
        self.reader = wrap(self.loader)
        self.total = TOTALS[workers]
        self.trace: Trace = []
        self.start = 0

    def train(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        noise = random.random() + np.random.rand()  # noqa: NPY002
        (nn.functional.dropout(self.table(rows), 0.5) * noise).square().sum().backward()
        self.optimizer.step()
        self.trace.append((rows.tolist(), noise, self.table.weight.detach().clone().cpu().numpy().tobytes()))

    def epoch(self) -> Iterator[CarriedBatch[Any]]:
        """What is left of it, as it comes from the reader."""
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch((self.start + len(self.trace)) // PER_EPOCH)
        if isinstance(self.reader, GrantedReader):
            given: Iterable[Any] = (batch for interval in self.reader for batch in interval)
        else:
            given = self.reader
        for batch in given:
            yield batch if isinstance(batch, CarriedBatch) else CarriedBatch(batch, None)

    def manager(self, url: str) -> CheckpointManager:
        own = self.loader.generator
        is_saved = own is None or own is getattr(self.loader.sampler, "generator", None)
        return CheckpointManager(
            url, model=self.table, optimizer=self.optimizer, reader=self.reader, options=TableOptions.exact(),
            extras={} if is_saved else {"generator": Kept(own)},
        )  # fmt: skip


def as_it_is(loader: Loader) -> Loader:
    return loader


def granted(loader: Loader) -> GrantedReader[Any]:
    return GrantedReader(loader, grant=1)


def carrying(loader: Loader) -> CarryingReader[Any]:
    return CarryingReader(loader)


@functools.cache
def uninterrupted(make: Callable[[int], Loader], workers: int) -> Trace:
    """What is trained where nothing is saved and nothing ends."""
    trainee = Trainee(make, workers, as_it_is)
    while len(trainee.trace) < trainee.total:
        for carried in trainee.epoch():
            trainee.train(carried.batch)
    return trainee.trace


def run(url: str, trainee: Trainee, saves: Callable[[CheckpointManager, str], bool]) -> None:
    """Restore and train until a save at which ``saves`` says so, or to the end."""
    with trainee.manager(url) as manager:
        restored = manager.restore()
        trainee.start = 0 if restored is None else restored.step
        if saves(manager, "before"):
            return
        while manager.current_step < trainee.total:
            for carried in trainee.epoch():
                trainee.train(carried.batch)
                manager.step(reader_state=carried.state)
                if saves(manager, "batch"):
                    return
            if saves(manager, "epoch"):
                return


def at(step: int, place: str) -> Callable[[CheckpointManager, str], bool]:
    """Save there and be killed: ``before`` the first batch, behind a ``batch``, or behind the end of an ``epoch``."""

    def saves(manager: CheckpointManager, where: str) -> bool:
        if (manager.current_step, where) != (step, place):
            return False
        manager.save()
        return True

    return saves


PLACES = {
    "first": at(0, "before"),
    "early": at(3, "batch"),
    "inside": at(7, "batch"),
    "last": at(PER_EPOCH, "batch"),
    "ended": at(PER_EPOCH, "epoch"),
}
"""Before the first batch of a run, inside the first epoch or another, at the last batch of one, behind its end."""


def killed_at(place: str, make: Callable[[int], Loader], workers: int, wrap: Callable[[Loader], Any]) -> Trace:
    """What is trained by a run that saves there and ends, and by one that resumes it."""
    url = f"memory://generators-{uuid.uuid4().hex}"
    first = Trainee(make, workers, wrap)
    run(url, first, PLACES[place])
    second = Trainee(make, workers, wrap)
    run(url, second, lambda manager, where: False)
    assert second.start == len(first.trace) < second.total
    return first.trace + second.trace


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", LOADERS)
def test_a_resumed_run_draws_as_the_uninterrupted_one(make: Callable[[int], Loader], workers: int, place: str) -> None:
    assert killed_at(place, make, workers, as_it_is) == uninterrupted(make, workers)


@pytest.mark.parametrize("place", ["inside", "last", "ended"])
@pytest.mark.parametrize("make", [shuffled, seeded])
@pytest.mark.parametrize("wrap", [granted, carrying])
def test_readers_that_fetch_ahead_draw_as_the_loader_does(
    wrap: Callable[[Loader], Any], make: Callable[[int], Loader], place: str
) -> None:
    assert killed_at(place, make, 0, wrap) == uninterrupted(make, 0)


@pytest.mark.parametrize("place", ["early", "inside"])
@pytest.mark.parametrize("make", [augmented, with_two])
def test_a_dataset_that_draws_in_workers_resumes_with_their_generators(
    make: Callable[[int], Loader], place: str
) -> None:
    assert killed_at(place, make, 2, as_it_is) == uninterrupted(make, 2)


@pytest.mark.parametrize("wrap", [as_it_is, granted, carrying])
def test_a_sampler_whose_order_is_lost_is_warned_of(wrap: Callable[[Loader], Any]) -> None:
    def attach() -> None:
        sampler = torch.utils.data.RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
        reader = wrap(StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=sampler))
        manager = CheckpointManager(f"memory://generators-{uuid.uuid4().hex}", model=nn.Embedding(4, 4), reader=reader)
        manager.close()

    with pytest.warns(RuntimeWarning, match=r"torch's RandomSampler.* twice.* torchdata"):
        attach()
