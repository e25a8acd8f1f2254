"""Scenarios of the ranks' own readers: each goes on with the next sample of its share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import BadInput
from cnr_store.training import CarriedBatch, CarryingReader, CheckpointManager, GrantedReader
from tests.training.ranks.copies import Copies, Run, spoiled
from tests.training.ranks.scenarios import Place, scenario
from tests.training.runs import assert_same

T = TypeVar("T")
SAMPLES, BATCH = 40, 2


def loader_of(rank: int, world: int, batch_size: int = BATCH) -> StatefulDataLoader[int]:
    return StatefulDataLoader(list(range(SAMPLES))[rank::world], batch_size=batch_size)


def ahead(batches: Iterable[T], depth: int) -> Iterator[T]:
    """Fetch so many batches ahead of the training."""
    queue: deque[T] = deque()
    for batch in batches:
        queue.append(batch)
        if len(queue) > depth:
            yield queue.popleft()
    yield from queue


def train_ahead(reader: Any, depth: int, run: Run, manager: CheckpointManager) -> list[int]:
    """Train on what is left of the epoch; the samples in the order in which they were trained."""
    seen: list[int] = []
    epochs = [reader] if isinstance(reader, CarryingReader) else reader
    for epoch in epochs:
        for given in ahead(epoch, depth):
            carried = given if isinstance(given, CarriedBatch) else CarriedBatch(given, None)
            run.train(manager.current_step)
            seen += carried.batch.tolist()
            manager.step(reader_state=carried.state)
    return seen


@scenario(1, 2)
def readers_that_fetch_ahead_differently_save_at_the_same_step(place: Place) -> None:
    kinds: dict[str, Callable[[StatefulDataLoader[int]], Any]] = {
        "granted": lambda loader: GrantedReader(loader, grant=7),
        "carried": lambda loader: CarryingReader(loader, every=4),
    }
    share = list(range(SAMPLES))[place.rank :: place.world]
    for name, make in kinds.items():
        run, reader = Run(place), make(loader_of(place.rank, place.world, 1))
        manager = run.manager(place.url(name), reader=reader, every_steps=5)
        assert train_ahead(reader, 1 + 2 * place.rank, run, manager) == share
        manager.wait_until_finished()
        steps = [report.step for report in manager.history]
        assert len(steps) >= 2, steps
        assert place.gather(steps) == [steps, steps]
        again, reader = spoiled(Run(place)), make(loader_of(place.rank, place.world, 1))
        manager.close()
        manager = again.manager(place.url(name), reader=reader)
        restored = manager.restore(step=steps[-2])
        assert restored is not None
        assert train_ahead(reader, 0, again, manager) == share[restored.step :]
        assert_same(again.state(), run.state())
        manager.close()


@scenario(1, 2)
def readers_end_with_their_process(place: Place) -> None:
    run, loader = Run(place), loader_of(place.rank, place.world)
    manager = run.manager(place.url("readers"), reader=loader, every_steps=3)
    seen = []
    for number, batch in zip(range(8), loader, strict=False):
        seen += batch.tolist()
        run.train(number, manager)
    manager.wait_until_finished()
    place.keep("readers", seen[: 6 * BATCH])


@scenario(2, 2)
def readers_go_on_with_the_next_sample(place: Place) -> None:
    run, loader = Run(place), loader_of(place.rank, place.world)
    manager = run.manager(place.url("readers"), reader=loader)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == 6
    seen = [int(number) for batch in loader for number in batch]
    assert place.kept("readers") + seen == list(range(SAMPLES))[place.rank :: place.world]
    manager.close()


class Dropped(Copies):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(ids), 0.5)


DRAWS = {"inside": (7, 0), "last": (10, 2)}
"""Steps until the end of the process, inside an epoch of five and at the last batch of one; worker processes."""


class Drawing:
    """A training with dropout on shuffled batches, for which each rank draws otherwise."""

    def __init__(self, place: Place, name: str, workers: int) -> None:
        torch.manual_seed(7)
        self.run = Run(place, Dropped())
        torch.manual_seed(7 + place.rank)
        mine = list(range(SAMPLES))[place.rank :: place.world]
        self.loader = StatefulDataLoader(mine, batch_size=4, shuffle=True, num_workers=workers)
        self.manager = self.run.manager(place.url(f"draws-{name}"), reader=self.loader)

    def until(self, step: int) -> list[Any]:
        """Train; what the batches were and the state that the generator had behind each."""
        drawn: list[Any] = []
        while self.manager.current_step < step:
            for batch in self.loader:
                self.run.train(self.manager.current_step, self.manager)
                drawn.append((batch.tolist(), torch.get_rng_state().tolist()))
                if self.manager.current_step == step:
                    break
        return drawn


@scenario(1, 2)
def what_ranks_draw_ends_with_their_process(place: Place) -> None:
    for name, (steps, workers) in DRAWS.items():
        ended = Drawing(place, name, workers)
        drawn = ended.until(steps)
        ended.manager.save()
        whole = Drawing(place, f"{name}-whole", workers)
        place.keep(f"draws-{name}", (drawn, whole.until(12), whole.run.state()))


@scenario(2, 2)
def each_rank_draws_as_if_it_had_not_ended(place: Place) -> None:
    for name, (steps, workers) in DRAWS.items():
        resumed = Drawing(place, name, workers)
        spoiled(resumed.run)
        torch.manual_seed(90)
        restored = resumed.manager.restore()
        assert restored is not None
        assert restored.step == steps
        drawn, whole, state = place.kept(f"draws-{name}")
        assert drawn + resumed.until(12) == whole
        assert_same(resumed.run.state(), state)
        resumed.manager.close()


@scenario(2, 1)
def another_number_of_readers_is_the_callers_matter(place: Place) -> None:
    def both(states: list[Any]) -> list[Any]:
        given.append(len(states))
        return [states[1]]

    given: list[int] = []
    run, loader = spoiled(Run(place)), loader_of(1, 2)
    before = run.state()
    manager = run.manager(place.url("readers"), reader=loader)
    with pytest.raises(BadInput, match="redistribute"):
        manager.restore()
    assert_same(run.state(), before)
    assert manager.store.snapshot().step == 6
    manager.close()
    manager = run.manager(place.url("readers"), reader=loader)
    assert manager.restore(redistribute=both) is not None
    assert given == [2]
    seen = [int(number) for batch in loader for number in batch]
    assert place.kept("readers", 1) + seen == list(range(SAMPLES))[1::2]
    manager.close()
