"""Killed at any storage call, restored and trained on: the same, bit for bit, as a run that nobody killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cnr_store import Store
from cnr_store.log.commit_log import RetryPolicy
from cnr_store.storage import storage_from_filesystem
from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from tests.support.faulty import Fault, FaultKind, FaultyFileSystem, IsolatedMemoryFileSystem, SimulatedCrash
from tests.support.launcher import Launcher, Program, Running
from tests.training.runs import KeyedTraining, Training, assert_same, go_on, manager_of, uninterrupted

STEPS = 7
RETRY = RetryPolicy(deadline_s=0.2, first_delay_s=0.001, max_delay_s=0.01)


def open_on(fs: FaultyFileSystem) -> Store:
    return Store.open_on(storage_from_filesystem(fs, "/root"), threads=1, retry=RETRY)


def run(fs: FaultyFileSystem, policy: Any, make: type[Training]) -> Training:
    """Restore what there is and train to the end, saving every second step."""
    training = make()
    manager = manager_of(open_on(fs), training, every_steps=2, policy=policy)
    try:
        restored = manager.restore()
        go_on(training, manager, 0 if restored is None else restored.step, STEPS)
    finally:
        with suppress(SimulatedCrash):  # what the loop has raised already
            manager.close()
    return training


def killed_everywhere(policy: Any, every: int, make: type[Training] = Training) -> tuple[int, int]:
    """Kill at each ``every``-th storage call, before and after its effect; return calls and runs."""
    expected = uninterrupted("rowwise_adagrad", STEPS, make=make)
    prepared = IsolatedMemoryFileSystem()
    Store.create_on(storage_from_filesystem(FaultyFileSystem(prepared), "/root"), threads=1)
    calm = FaultyFileSystem(prepared.fork())
    assert_same(run(calm, policy, make).state(), expected)
    runs = 0
    for call in calm.calls[::every]:
        for kind in (FaultKind.CRASH, FaultKind.CRASH_AFTER):
            if not kind.applies_to(call.operation):
                continue
            inner = prepared.fork()
            crashing = FaultyFileSystem(inner, fault=Fault(kind, call.index))
            with suppress(SimulatedCrash):
                run(crashing, policy, make)
            assert crashing.is_crashed
            assert_same(run(FaultyFileSystem(inner), policy, make).state(), expected)
            runs += 1
    return len(calm.calls), runs


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_killed_at_storage_calls_and_restored_is_uninterrupted(policy: Any) -> None:
    calls, runs = killed_everywhere(policy, every=17)

    assert calls > 60
    assert runs > calls // 17


def test_killed_beside_a_dynamic_table_and_restored_is_uninterrupted() -> None:
    calls, runs = killed_everywhere("consecutive", every=29, make=KeyedTraining)

    assert runs > calls // 29


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["baseline", "consecutive"])
def test_killed_at_every_storage_call_beside_a_dynamic_table(policy: Any) -> None:
    calls, runs = killed_everywhere(policy, every=1, make=KeyedTraining)

    assert runs > calls


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["baseline", "consecutive", "one_shot", "intermittent"])
def test_killed_at_every_storage_call_and_restored_is_uninterrupted(policy: Any) -> None:
    calls, runs = killed_everywhere(policy, every=1)

    assert runs > calls


PROGRAM = """
import sys, torch
from cnr_store import TableOptions
from cnr_store.training import CheckpointManager, SavePolicy, TrackingOptions
from tests.training.runs import Training

torch.set_num_threads(int(sys.argv[3]))  # those of this process: sums of more threads round otherwise
training = Training()
manager = CheckpointManager(
    sys.argv[1], model=training.model, optimizer=training.optimizers, options=TableOptions.exact(), every_steps=1,
    tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}), save_policy=SavePolicy(save_on_sigterm=True),
)
manager.restore()
while manager.current_step < int(sys.argv[2]):
    training.train(manager.current_step)
    manager.step()
manager.close()
"""


@contextmanager
def started(launcher: Launcher, folder: Path) -> Iterator[Running]:
    """Train for ever in a process of its own, and save to ``folder/store``."""
    program = Program(["-c", PROGRAM, str(folder / "store"), "10000", str(torch.get_num_threads())])
    with launcher.running(program, folder=folder) as child:
        yield child


def wait_for_commits(url: Path, count: int, child: Running) -> None:
    deadline = time.monotonic() + 120
    while len(list((url / "commits").glob("*.json"))) < count:
        assert not child.has_ended, "the training ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def continue_from(url: Path, steps: int) -> tuple[Training, int]:
    training = Training()
    manager = manager_of(str(url), training)
    restored = manager.restore()
    assert restored is not None
    go_on(training, manager, restored.step, restored.step + steps)
    manager.close()
    return training, restored.step


@pytest.mark.parametrize(
    ("number", "code", "steps"), [(signal.SIGKILL, -signal.SIGKILL, 3), (signal.SIGTERM, 128 + signal.SIGTERM, 2)]
)
def test_a_training_that_a_signal_ended_goes_on_from_its_last_commit(
    number: signal.Signals, code: int, steps: int, launcher: Launcher, tmp_path: Path
) -> None:
    with started(launcher, tmp_path) as child:
        wait_for_commits(tmp_path / "store", 2 * steps, child)
        child.send(number)
        assert child.wait() == code

    training, step = continue_from(tmp_path / "store", steps)

    assert step >= steps
    assert_same(training.state(), uninterrupted("rowwise_adagrad", step + steps))


def test_sigterm_can_leave_the_end_to_the_loop(tmp_path: Path) -> None:
    training = Training()
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(
        str(tmp_path),
        model=training.model,
        optimizer=training.optimizers,
        tracking=TrackingOptions(assume={"RowWiseAdagrad": "touched"}),
        save_policy=SavePolicy(save_on_sigterm="flag"),
    )
    training.train(0)
    assert manager.step() is False
    os.kill(os.getpid(), signal.SIGTERM)
    training.train(1)

    assert manager.step() is True

    assert manager.last_save is not None
    assert manager.last_save.step == 2
    manager.close()
    assert signal.getsignal(signal.SIGTERM) == before
