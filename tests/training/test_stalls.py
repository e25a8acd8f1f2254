"""What the training waits for in a save: its own copies, never the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cnr_store import Store
from cnr_store.errors import StorageFailure
from cnr_store.training import CheckpointManager
from tests.support.gated_storage import GatedStorage
from tests.training.faulty_runs import Backend, assert_stored, begun
from tests.training.runs import Training, go_on, manager_of


def let_the_background_end(manager: CheckpointManager) -> None:
    """Wait for all that is under way, and collect nothing of it."""
    background = manager._saver.background
    manager._saver.writer.wait()
    background.read_error()
    background.wait()


@pytest.mark.parametrize("first_baseline", ["stall", "live"])
@pytest.mark.parametrize("policy", ["consecutive", "one_shot", "baseline"])
@pytest.mark.parametrize("start", ["new", "restored", "beside"])
def test_no_step_waits_for_the_storage(start: str, policy: Any, first_baseline: Any, tmp_path: Path) -> None:
    """The first save opened the writer in its stall, the first step behind a restore took the store over in its."""
    url = str(tmp_path / "store")
    options: dict[str, Any] = {"policy": policy, "every_steps": 2}
    Store.create(url).close()
    if start != "new":
        training = Training()
        with manager_of(url, training, **options) as manager:
            go_on(training, manager, 0, 4)
    storage, training = GatedStorage(url), Training()
    # What is stored whole while the training waits is put in the stall, as "stall" says: of these saves the copies.
    is_whole = first_baseline == "stall" and start != "restored"
    with Store.open_on(storage) as store, manager_of(store, training, first_baseline=first_baseline, **options) as now:
        if start == "restored":
            now.restore()
        reached = now.current_step
        for number in range(reached, reached + 9):
            training.train(number)
            if is_whole and now.current_step == reached + 1:
                now.step()
            else:
                with storage.closed():
                    now.step()
            let_the_background_end(now)
        now.save()
        assert_stored(store, training)
        assert len(now.history) >= 4


def test_a_writer_that_could_not_be_opened_is_told_of_and_tried_again(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=3)
    backend.fails = True
    training.train(0)
    manager.step()
    let_the_background_end(manager)
    training.train(1)
    with pytest.raises(StorageFailure):
        manager.step()
    training.train(2)
    with pytest.raises(StorageFailure):
        manager.step()
    backend.fails = False
    training.train(3)

    manager.step()

    assert manager.wait_until_finished() is not None
    assert_stored(store, training)


def test_who_is_only_warned_trains_on_without_a_writer(backend: Backend) -> None:
    store, training, manager = begun(backend, every_steps=3, on_error="warn")
    backend.fails = True
    manager.step()
    let_the_background_end(manager)
    with pytest.warns(RuntimeWarning, match="has not taken its store over yet") as warned:
        manager.step()
    assert warned[0].filename == __file__
    backend.fails = False
    training.train(0)

    manager.step()

    assert manager.wait_until_finished() is not None
    assert_stored(store, training)


def test_close_tells_that_no_writer_could_be_opened(backend: Backend) -> None:
    _, _, manager = begun(backend)
    backend.fails = True
    manager.step()

    with pytest.raises(StorageFailure):
        manager.close()
