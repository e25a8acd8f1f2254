"""A manager under torchft: a replica group dies and comes back with the state of the other, and the store has it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, verify_store
from tests.support.launcher import Launcher, Program

pytest.importorskip("torchft", reason="needs the extra frameworks")

STEPS, DIES = 40, 4

pytestmark = pytest.mark.slow


@pytest.fixture
def lighthouse(tmp_path: Path) -> Iterator[str]:
    """torchft's process that says which replica groups train together."""
    command = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
    assert command is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "2000", "--bind", address]
    with (tmp_path / "lighthouse.txt").open("w") as output:
        process = subprocess.Popen([command, *options], stdout=output, stderr=output)
        yield f"http://{address}"
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with closing(Launcher("cnr_store.training", "torchft")) as started:
        yield started


def group_of(folder: Path, lighthouse: str, group: int, call: str) -> Program:
    code = f"import pathlib, tests.integrations.torchft_program as program; program.{call}"
    arguments = f"(pathlib.Path({str(folder)!r}), {group}, {STEPS}, {DIES if call == 'train_twice' else -1})"
    return Program(["-c", code + arguments], {"TORCHFT_LIGHTHOUSE": lighthouse, "GLOO_SOCKET_IFNAME": "lo"})


def steps_of(file: Path) -> list[tuple[int, int]]:
    """Each step that a group did, and how many groups did it."""
    return [(int(step), int(groups)) for step, groups in map(str.split, file.read_text().splitlines())]


@pytest.mark.parametrize("lost", [1, 0], ids=["another", "the one that saves"])
def test_a_replica_group_that_comes_back_goes_on_with_the_others(
    tmp_path: Path, lighthouse: str, launcher: Launcher, lost: int
) -> None:
    calls = ["train_twice" if group == lost else "train" for group in (0, 1)]

    ended = launcher.run(*(group_of(tmp_path, lighthouse, *one) for one in enumerate(calls)), folder=tmp_path)

    assert [one.returncode for one in ended] == [0, 0], [one.stderr[-3000:] for one in ended]
    before = steps_of(tmp_path / "before.txt")
    after = steps_of(tmp_path / f"{lost}.txt")[len(before) :]
    assert after[0][0] > before[-1][0]  # it did not begin anew
    assert after[-1] == (STEPS, 2)
    with np.load(tmp_path / "0.npz") as first, np.load(tmp_path / "1.npz") as second:
        with Store.open(str(tmp_path / "store")) as store:
            assert verify_store(store, deep=True).problems == ()
            snapshot = store.snapshot()
            assert snapshot.step == STEPS
            assert np.array_equal(snapshot.table("table.weight").read(), first["table.weight"])
            assert np.array_equal(snapshot.read_dense("out.weight"), first["out.weight"])
            kinds = [record.kind for record in store.log() if record.kind in ("baseline", "delta")]
        for name in first:
            assert np.array_equal(first[name], second[name]), name
    assert kinds.count("baseline") == (1 if lost else 2)  # who comes back has no mirrors
