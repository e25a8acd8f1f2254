"""Scenarios of the ranks' own readers: each goes on with the next sample of its share."""

from __future__ import annotations

from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import BadInput
from tests.training.ranks.copies import Run, spoiled
from tests.training.ranks.scenarios import Place, scenario
from tests.training.runs import assert_same

SAMPLES, BATCH = 40, 2


def loader_of(rank: int, world: int) -> StatefulDataLoader[int]:
    return StatefulDataLoader(list(range(SAMPLES))[rank::world], batch_size=BATCH)


@scenario(1, 2)
def readers_end_with_their_process(place: Place) -> None:
    run, loader = Run(place), loader_of(place.rank, place.world)
    manager = run.manager(place.url("readers"), reader=loader, every_steps=3)
    seen = []
    for number, batch in zip(range(8), loader, strict=False):
        seen += batch.tolist()
        run.train(number, manager)
    manager.wait()
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
    manager = run.manager(place.url("readers"), reader=loader, redistribute=both)
    assert manager.restore() is not None
    assert given == [2]
    seen = [int(number) for batch in loader for number in batch]
    assert place.kept("readers", 1) + seen == list(range(SAMPLES))[1::2]
    manager.close()
