"""No sample is trained twice and none is left out, whatever the loader has fetched ahead."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cnr_store import BadInput
from cnr_store.training import CarryingReader, CheckpointManager
from cnr_store.training.reader import reader_states_for
from tests.training.runs import Training, manager_of

SAMPLES, BATCH = 48, 4


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(workers: int) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers, generator=generator)


def consume(manager: CheckpointManager, training: Training, loader: Any, *, stop: int | None) -> list[int]:
    """Train until step ``stop``; return the samples in the order in which they were trained."""
    seen: list[int] = []
    for batch in loader:
        training.train(manager.current_step)
        seen.extend(batch.tolist())
        manager.step()
        if manager.current_step == stop:
            break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_with_the_next_sample(workers: int, tmp_path: Path) -> None:
    expected = [int(number) for batch in loader_of(workers) for number in batch]
    loader, training = loader_of(workers), Training()
    manager = manager_of(tmp_path, training, reader=loader, every_steps=3)
    first = consume(manager, training, loader, stop=8)
    manager.close()

    loader, training = loader_of(workers), Training()
    manager = manager_of(tmp_path, training, reader=loader, every_steps=3)
    restored = manager.restore()
    second = consume(manager, training, loader, stop=None)
    manager.close()

    assert restored is not None
    assert restored.step == 6
    assert restored.reader_state is not None
    assert first[: 6 * BATCH] + second == expected


class Numbered:
    """A reader whose whole state is the number of the next batch."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Numbered:
        return self

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "of": (1, 2.5, b"x"), "drawn": torch.arange(3, dtype=torch.int16)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def test_batches_fetched_ahead_are_not_lost(tmp_path: Path) -> None:
    reader, training = Numbered(), Training()
    manager = manager_of(tmp_path, training, reader=reader, every_steps=4)
    queue: deque[tuple[int, dict[str, Any]]] = deque()
    trained = []
    while manager.current_step < 4:
        while len(queue) < 3:
            queue.append((next(reader), reader.state_dict()))
        number, state = queue.popleft()
        trained.append(number)
        training.train(number)
        manager.step(reader_state=state)
    manager.close()
    again = Numbered()

    manager = manager_of(tmp_path, Training(), reader=again)
    restored = manager.restore()

    assert trained == [0, 1, 2, 3]
    assert next(again) == 4
    assert restored is not None
    assert restored.reader_state["of"] == (1, 2.5, b"x")
    assert torch.equal(restored.reader_state["drawn"], torch.arange(3, dtype=torch.int16))
    manager.close()


def test_a_reader_state_without_a_reader_is_handed_back(tmp_path: Path) -> None:
    training = Training()
    manager = manager_of(tmp_path, training, every_steps=1)
    training.train(0)
    manager.step(reader_state={"offset": 17})
    manager.close()

    manager = manager_of(tmp_path, Training())
    restored = manager.restore()

    assert restored is not None
    assert restored.reader_state == {"offset": 17}
    manager.close()


def test_a_reader_state_that_is_no_plain_data_names_the_leaf(tmp_path: Path) -> None:
    training = Training()
    manager = manager_of(tmp_path, training)
    training.train(0)
    manager.step(reader_state={"lock": object()})

    with pytest.raises(BadInput, match=r"state.*lock.*object"):
        manager.save()

    manager.step(reader_state={"offset": 1})
    manager.save()
    manager.close()


def test_a_reader_state_is_that_of_its_own_step(tmp_path: Path) -> None:
    """One that was given to an earlier step was committed with a later one."""
    reader, training = Numbered(), Training()
    manager = manager_of(tmp_path, training, reader=reader)
    training.train(0)
    manager.step(reader_state={"next": 1})
    reader.next = 5
    training.train(1)

    manager.step()
    manager.save()

    assert manager.store.snapshot().read_document("reader/0")["state"]["next"] == 5
    manager.close()


def saved_reader_state(manager: CheckpointManager) -> Any:
    return manager.store.snapshot().read_document("reader/0")["state"]


def test_a_state_given_by_hand_is_saved_again_behind_a_restore(tmp_path: Path) -> None:
    training = Training()
    manager = manager_of(tmp_path, training, every_steps=1)
    manager.step(reader_state={"batch": 1})
    manager.close()

    manager = manager_of(tmp_path, Training())
    manager.restore()
    manager.save()

    assert saved_reader_state(manager) == {"batch": 1}
    manager.close()


def test_a_restored_state_is_not_saved_with_later_steps(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint without naming states may; what it saves then has none."""
    training = Training()
    manager = manager_of(tmp_path, training, every_steps=1)
    manager.step(reader_state={"batch": 1})
    manager.wait_until_finished()

    manager.restore()
    manager.step()
    manager.wait_until_finished()

    assert manager.store.snapshot().step == 2
    assert "reader/0" not in manager.store.snapshot().documents
    manager.close()


@pytest.mark.parametrize("reader", [None, "with a reader"])
def test_the_state_of_before_a_restore_is_not_saved_behind_it(reader: str | None, tmp_path: Path) -> None:
    manager = manager_of(tmp_path, Training(), reader=None if reader is None else Numbered())
    manager.step(reader_state={"next": 1})
    saved = manager.save()
    manager.step(reader_state={"next": 2})
    manager.save()
    manager.step(reader_state={"next": 3})

    assert saved is not None
    manager.restore(version=saved.version)
    manager.save()

    assert saved_reader_state(manager) == {"next": 1}
    manager.close()


def test_no_state_of_before_a_restore_of_a_checkpoint_without_one(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, Training())
    manager.step()
    manager.save()
    manager.step(reader_state={"next": 2})

    manager.restore()
    manager.save()

    assert "reader/0" not in manager.store.snapshot().documents
    manager.close()


def test_a_carrying_reader_saves_its_restored_state_before_it_reads(tmp_path: Path) -> None:
    reader = CarryingReader(loader_of(0))
    manager = manager_of(tmp_path, Training(), reader=reader)
    carried = next(iter(reader))
    manager.step(reader_state=carried.state)
    manager.save()
    saved = saved_reader_state(manager)

    manager.restore()
    next(iter(reader))  # by a thread that prefetches, say: it is not trained
    manager.save()

    assert repr(saved_reader_state(manager)) == repr(saved)
    manager.close()


def test_without_a_reader_every_step_names_its_state(tmp_path: Path) -> None:
    training = Training()
    manager = manager_of(tmp_path, training)
    manager.step()
    manager.step(reader_state={"batch": 1})

    with pytest.raises(BadInput, match="reader_state"):
        manager.step()

    assert manager.current_step == 2
    manager.step(reader_state={"batch": 2})
    manager.save()
    assert manager.store.snapshot().read_document("reader/0")["state"] == {"batch": 2}
    manager.close()


def test_as_many_ranks_as_before_read_on() -> None:
    states = [{"rank": 0}, {"rank": 1}]

    assert reader_states_for(states, 2, lambda _: pytest.fail("nothing to redistribute")) == states


def test_another_number_of_ranks_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(BadInput, match=r"of 4 ranks, the training resumes on 2; .*redistribute=") as refused:
        reader_states_for([{}] * 4, 2)

    assert (refused.value.expected, refused.value.found) == (4, 2)


def test_states_are_redistributed_as_the_caller_says() -> None:
    states = [{"shards": [rank, rank + 4]} for rank in range(4)]

    def to_two(saved: list[Any]) -> list[Any]:
        return [{"shards": saved[rank]["shards"] + saved[rank + 2]["shards"]} for rank in range(2)]

    assert reader_states_for(states, 2, to_two) == [{"shards": [0, 4, 2, 6]}, {"shards": [1, 5, 3, 7]}]


def test_a_redistribution_to_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(BadInput, match=r"made 3 reader states of 4, .* 2 ranks"):
        reader_states_for([{}] * 4, 2, lambda saved: saved[:3])


def test_a_training_on_no_ranks_is_refused() -> None:
    with pytest.raises(BadInput, match="1 rank or more"):
        reader_states_for([{}], 0)
