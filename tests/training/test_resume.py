"""A restored training goes on as if nothing had happened: bit for bit in exact mode, for every optimizer and policy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cnr_store import Store, TableOptions
from cnr_store.training import CheckpointManager
from cnr_store.write.policy import Policy
from tests.training.runs import KINDS, Training, assert_same, go_on, manager_of, uninterrupted

# torch's own Adagrad says so once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

STEPS, STOP = 14, 9


def interrupted(url: str, kind: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Train, save, forget everything, restore into fresh objects, train on."""
    first = Training(kind, dtype=dtype)
    manager = manager_of(url, first, every_steps=2, **options)
    assert manager.restore() is None
    go_on(first, manager, 0, STOP)
    manager.close()
    second = Training(kind, dtype=dtype)
    for number in range(100, 103):  # whatever it was before the restore
        second.train(number)
    manager = manager_of(url, second, every_steps=2, **options)
    restored = manager.restore()
    assert restored is not None
    assert restored.step == STOP - 1
    go_on(second, manager, restored.step, STEPS)
    manager.close()
    return second.state()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_resumed_run_equals_the_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    expected = uninterrupted(kind, STEPS)

    found = interrupted(str(tmp_path / "store"), kind)

    assert_same(found, expected)


@pytest.mark.parametrize("policy", ["baseline", "consecutive", "one_shot", "intermittent"])
@pytest.mark.parametrize("mirror", ["memory", "none"])
def test_every_policy_resumes_exactly(policy: Policy, mirror: str, tmp_path: Path) -> None:
    expected = uninterrupted("rowwise_adagrad", STEPS)

    found = interrupted(str(tmp_path / "store"), "rowwise_adagrad", policy=policy, mirror=mirror)

    assert_same(found, expected)


@pytest.mark.parametrize("policy", ["one_shot", "intermittent"])
def test_cumulative_policies_remember_rows_over_a_restart(policy: Policy, tmp_path: Path) -> None:
    interrupted(str(tmp_path / "store"), "sgd", policy=policy)

    store = Store.open(str(tmp_path / "store"))
    head = store.snapshot()
    again = Training("sgd")
    manager = manager_of(store, again, policy=policy, every_steps=2)
    manager.restore()
    assert len(head.record.chain) == 2
    assert torch.equal(torch.from_numpy(head.table("user.weight").read()), again.model.user.weight.cpu())
    manager.close()


# Not SparseAdam in float16: its second moments underflow, and the weights become NaN.
@pytest.mark.parametrize(
    ("kind", "dtype"), [("sgd", torch.float16), ("sgd", torch.bfloat16), ("sparse_adam", torch.bfloat16)]
)
def test_sixteen_bit_tables_resume_exactly(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = uninterrupted(kind, STEPS, dtype=dtype)

    found = interrupted(str(tmp_path / "store"), kind, dtype=dtype)

    assert_same(found, expected)


def test_sparse_momentum_comes_back_sparse(tmp_path: Path) -> None:
    model = nn.Embedding(40, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(str(tmp_path), model=model, optimizer=optimizer, options=TableOptions.exact()) as manager:
        for ids in ([1, 2], [2, 30]):
            optimizer.zero_grad()
            model(torch.tensor(ids)).sum().backward()
            optimizer.step()
            manager.step()
        manager.save()
    expected = optimizer.state[model.weight]["momentum_buffer"].to_dense()
    other = nn.Embedding(40, 4, sparse=True)
    resumed = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    with CheckpointManager(str(tmp_path), model=other, optimizer=resumed, options=TableOptions.exact()) as manager:
        manager.restore()
        moved = manager.tracker.movement("weight")

    buffer = resumed.state[other.weight]["momentum_buffer"]
    assert buffer.is_sparse
    assert torch.equal(buffer.to_dense(), expected)
    assert moved is not None


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_quantized_resume_equals_a_second_process_at_the_same_version(policy: Policy, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    options = TableOptions(bits=4)
    interrupted(url, "rowwise_adagrad", options=options, policy=policy)
    states = []
    for _ in range(2):
        training = Training("rowwise_adagrad")
        manager = manager_of(url, training, options=options, policy=policy)
        assert manager.restore() is not None
        go_on(training, manager, 0, 5)
        states.append(training.state())
        manager.close()

    assert_same(states[0], states[1])


def test_a_restored_model_saved_again_is_the_same_state(tmp_path: Path) -> None:
    training = Training()
    manager = manager_of(tmp_path, training, options=TableOptions(bits=2), every_steps=2)
    go_on(training, manager, 0, 4)
    manager.restore()
    manager.tracker.mark_all("user.weight")
    report = manager.save()
    manager.close()

    assert report is not None
    store = Store.open(str(tmp_path))
    assert store.record(report.version).chain[-1].rows == 0


def test_every_generator_comes_back(tmp_path: Path) -> None:
    training = Training("sgd")
    manager = manager_of(tmp_path, training, every_steps=2)
    random.seed(3)
    random.gauss(0, 1)
    np.random.seed(4)  # noqa: NPY002
    training.train(0)
    manager.step()
    manager.save()
    expected = (random.random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(())))  # noqa: NPY002
    random.seed(77)
    np.random.seed(77)  # noqa: NPY002
    torch.manual_seed(77)

    manager.restore()

    assert (random.random(), random.gauss(0, 1), np.random.rand(), float(torch.rand(()))) == expected  # noqa: NPY002
    manager.close()


def test_schedulers_come_back_with_the_learning_rate(tmp_path: Path) -> None:
    def build() -> tuple[Training, torch.optim.lr_scheduler.StepLR]:
        training = Training("sgd")
        return training, torch.optim.lr_scheduler.StepLR(training.optimizers[0], 2, gamma=0.5)

    training, scheduler = build()
    manager = manager_of(tmp_path, training, extras={"scheduler": scheduler}, every_steps=2)
    for number in range(5):
        training.train(number)
        scheduler.step()
        manager.step()
    manager.save()
    manager.close()
    again, other = build()

    manager = manager_of(tmp_path, again, extras={"scheduler": other}, every_steps=2)
    manager.restore()

    assert other.last_epoch == 5
    assert again.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025, abs=0)
    manager.close()
