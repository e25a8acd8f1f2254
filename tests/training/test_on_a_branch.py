"""A training that goes on on a branch: as the same training without one, and beside the run it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cnr_store import BadInput, Store
from cnr_store.errors import BranchNotFound, NotAStore
from cnr_store.write.policy import Policy
from tests.training.runs import Training, assert_same, go_on, manager_of, uninterrupted

# torch's own Adagrad says so once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

STEPS, FORK = 12, 8


class Run:
    """A training with random numbers of its own, as a process has; they are torch's while it moves."""

    def __init__(self, store: str | Store, **options: Any) -> None:
        self.training = Training()
        self.manager = manager_of(store, self.training, every_steps=2, **options)
        self.restored = self.manager.restore()
        self._rng = torch.get_rng_state()

    def train(self, start: int, stop: int) -> None:
        torch.set_rng_state(self._rng)
        go_on(self.training, self.manager, start, stop)
        self._rng = torch.get_rng_state()

    def end(self) -> dict[str, Any]:
        self.manager.close()
        torch.set_rng_state(self._rng)
        return self.training.state()


@pytest.mark.parametrize("policy", ["baseline", "consecutive", "one_shot", "intermittent"])
def test_a_training_goes_on_on_a_branch_while_its_origin_does(policy: Policy, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    origin = Run(url, policy=policy)
    origin.train(0, FORK)
    origin.manager.wait_until_finished()
    store = Store.open(url)
    store.fork("trial")

    trial = Run(url, policy=policy, branch="trial")
    assert trial.restored is not None
    assert trial.restored.step == FORK
    for number in range(FORK, STEPS):
        origin.train(number, number + 1)
        trial.train(number, number + 1)
    ends = [origin.end(), trial.end(), Run(store.on_branch("trial"), policy=policy).end()]

    expected = uninterrupted("rowwise_adagrad", STEPS)
    for end in ends:
        assert_same(end, expected)
    assert store.snapshot().step == store.on_branch("trial").snapshot().step == STEPS


def test_a_branch_is_trained_on_only_where_there_is_one(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with pytest.raises(NotAStore):
        manager_of(url, Training(), branch="trial")
    store = Store.create(url)

    with pytest.raises(BranchNotFound):
        manager_of(url, Training(), branch="trial")
    with pytest.raises(BadInput, match="branch="):
        manager_of(store, Training(), branch="trial")
