"""Trainings on a backend that fails, waits or dies at a call of the test's choice."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from fsspec.exceptions import FSTimeoutError

from cnr_store import Store
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import CheckpointManager
from tests.support.faulty import Call, FaultyFileSystem, IsolatedMemoryFileSystem
from tests.training.runs import Training, manager_of


class Backend(FaultyFileSystem):
    """A file system whose owner says when it fails, loses replies of commits, or holds writes up."""

    def __init__(self) -> None:
        super().__init__(IsolatedMemoryFileSystem(), on_call=self._meet)
        self.fails = False
        self.loses_commits = False
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = threading.Event()
        self.managers: list[CheckpointManager] = []

    def _meet(self, call: Call) -> None:
        if call.operation in ("write", "create"):
            if not self.gate.is_set():
                self.is_held.set()
            assert self.gate.wait(60)
        if self.fails or (self.loses_commits and "commits/" in call.path and call.operation == "read"):
            raise OSError(5, f"the backend is down at call {call.index}")

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode=mode, **kwargs)
        if self.loses_commits and mode == "create" and "commits/" in path:
            raise FSTimeoutError("the reply was lost")


def create(backend: Backend) -> Store:
    retry = RetryPolicy(deadline_s=0.05)
    return Store.create_on(storage_from_filesystem(backend, "/root"), threads=2, retry=retry)


def begun(backend: Backend, **options: Any) -> tuple[Store, Training, CheckpointManager]:
    """A training with a manager that the backend's fixture closes."""
    store, training = create(backend), Training()
    manager = manager_of(store, training, **options)
    backend.managers.append(manager)
    return store, training, manager


def assert_stored(store: Store, training: Training) -> None:
    """The head holds the live values: weights, slots and dense tensors, bit for bit."""
    head = store.snapshot()
    for name in ("user.weight", "item.weight"):
        weight = dict(training.model.named_parameters())[name]
        np.testing.assert_array_equal(head.table(name).read(), weight.detach().cpu().numpy())
        slot = training.optimizers[0].state[weight]["momentum1"]
        np.testing.assert_array_equal(head.table(name).read(slot="momentum1"), slot.cpu().numpy())
    np.testing.assert_array_equal(head.read_dense("out.weight"), training.model.out.weight.detach().cpu().numpy())
