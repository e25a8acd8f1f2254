"""Rows that wait while training: they stay dirty, whatever becomes of the saves, and go out when they must."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.exceptions import FSTimeoutError

from cnr_store import BackgroundSaveFailed, BadInput, Store, TableOptions, Threshold
from cnr_store.training import CheckpointManager
from tests.training.runs import Training, grouped
from tests.training.test_saving import Backend, create

SCALE = 2.0**-8
TABLES = ("user.weight", "item.weight")
THRESHOLD = Threshold(keep=0.3, refresh_every=3, max_error=0.25, max_wait=3)


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.gate.set()


def manager_of(store: Store, training: Training, threshold: Threshold = THRESHOLD, **options: Any) -> CheckpointManager:
    chosen = {
        "options": TableOptions(scale=SCALE, threshold=threshold), "assume": {"RowWiseAdagrad": "touched"}, **options
    }  # fmt: skip
    return CheckpointManager(store, model=training.model, optimizer=training.optimizers, **grouped(**chosen))


def errors(store: Store, training: Training) -> Any:
    """How far each row of the tables is from what the head holds."""
    head, live = store.snapshot(), dict(training.model.named_parameters())
    off = [np.abs(head.table(name).read() - live[name].detach().cpu().numpy()).max(axis=1) for name in TABLES]
    return np.concatenate(off)


def assert_all_is_stored(store: Store, training: Training) -> None:
    """Weights within the half step of rounding, slots within that of their mantissa."""
    assert errors(store, training).max() <= SCALE / 2 + 1e-7
    head, live = store.snapshot(), dict(training.model.named_parameters())
    for name in TABLES:
        slot = training.optimizers[0].state[live[name]]["momentum1"].cpu().numpy()
        np.testing.assert_allclose(head.table(name).read(slot="momentum1"), slot, rtol=2.0**-8)


def test_rows_wait_within_the_bounds_and_a_save_by_name_leaves_none(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1)
    for number in range(12):
        training.train(number)
        manager.step()
        manager.wait_until_finished()
        assert errors(store, training).max() <= 0.25 + 1e-7
        waiting = sum(entry.count for entry in store.snapshot().waiting.values())
        assert manager.history[-1].waiting == waiting
        assert all(entry.oldest <= THRESHOLD.max_wait for entry in store.snapshot().waiting.values())
    assert sum(report.waiting for report in manager.history) > 0

    report = manager.save()

    assert report is not None
    assert report.waiting == 0
    assert store.snapshot().waiting == {}
    assert_all_is_stored(store, training)
    manager.close()


def test_what_waits_is_dirty_again_and_only_that(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.save()
    training.train(0)

    report = manager.save(flush=False)

    assert report is not None
    assert report.waiting
    marked = manager.tracker.take()
    assert sum(len(rows) for rows in marked.values()) == report.waiting
    off = errors(store, training) > SCALE / 2 + 1e-7
    ids = np.concatenate(
        [marked["user.weight"].row_ids, marked["item.weight"].row_ids + training.model.user.num_embeddings]
    )
    assert set(np.flatnonzero(off)) <= set(ids)
    manager.close()


@pytest.mark.parametrize("how", ["refused", "unknown and won", "unknown and lost"])
def test_no_row_is_lost_with_a_save_that_failed_while_some_waited(how: str, backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training)
    manager.save()
    for number in range(2):
        training.train(number)
        manager.save(flush=False)
    assert manager.history[-1].waiting
    training.train(2)
    if how == "refused":
        backend.fails = True
    elif how == "unknown and won":
        backend.loses_commits = True
    else:
        calm, backend._on_call = backend._on_call, _lose_commits
    with pytest.raises(BackgroundSaveFailed):
        manager.save(flush=False)
    backend.fails = backend.loses_commits = False
    if how == "unknown and lost":
        backend._on_call = calm

    report = manager.save()

    assert report is not None
    assert report.kind == "delta"
    assert_all_is_stored(store, training)
    manager.close()


def _lose_commits(call: Any) -> None:
    if "commits/" in call.path and call.operation in ("create", "read"):
        raise FSTimeoutError("injected")


def test_the_save_before_the_end_writes_everything(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1, save_on_sigterm="flag")
    for number in range(4):
        training.train(number)
        manager.step()
    manager.wait_until_finished()
    assert manager.history[-1].waiting
    training.train(4)
    manager.should_stop = True

    assert manager.step()

    assert_all_is_stored(store, training)
    manager.close()


def test_a_restored_training_has_nothing_that_waits(backend: Backend) -> None:
    store, training = create(backend), Training()
    manager = manager_of(store, training, every_steps=1)
    for number in range(4):
        training.train(number)
        manager.step()
    manager.wait_until_finished()
    manager.close()

    resumed = Training()
    again = manager_of(store, resumed, every_steps=1)
    again.restore()

    assert errors(store, resumed).max() == 0
    assert all(len(rows) == 0 for rows in again.tracker.take().values())
    for number in range(4, 9):
        resumed.train(number)
        again.step()
        again.wait_until_finished()
        assert errors(store, resumed).max() <= 0.25 + 1e-7
    assert sum(report.waiting for report in again.history)
    again.close()


@pytest.mark.parametrize("policy", ["full", "one_shot", "intermittent"])
def test_policies_without_deltas_to_the_last_checkpoint_are_refused(policy: Any, backend: Backend) -> None:
    with pytest.raises(BadInput, match="consecutive"):
        manager_of(create(backend), Training(), policy=policy)


def test_tables_without_a_mirror_are_refused_before_the_first_step(backend: Backend) -> None:
    with pytest.raises(BadInput, match="threshold"):
        manager_of(create(backend), Training(), mirror="none")


def test_16_bit_tables_are_exact_and_refused(backend: Backend) -> None:
    with pytest.raises(BadInput, match="threshold"):
        manager_of(create(backend), Training("sgd", dtype=torch.bfloat16))
