"""A manager under torchft: a replica group dies and comes back with the state of the other, and the store has it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cnr_store import Store, verify_store

pytest.importorskip("torchft", reason="needs the extra frameworks")

REPOSITORY = Path(__file__).resolve().parents[2]
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


def start(folder: Path, lighthouse: str, group: int, dies: int) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(str(REPOSITORY / part) for part in ("", "gpu", "tools"))
    environment = os.environ | {"PYTHONPATH": paths, "TORCHFT_LIGHTHOUSE": lighthouse, "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / f"{group}-output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.torchft_program", str(folder), *map(str, (group, STEPS, dies))],
            cwd=REPOSITORY, env=environment, stdout=output, stderr=output,
        )  # fmt: skip


def steps_of(folder: Path, group: int) -> list[tuple[int, int]]:
    """Each step that a group did, and how many groups did it."""
    lines = (folder / f"{group}.txt").read_text().splitlines()
    return [(int(step), int(groups)) for step, groups in map(str.split, lines)]


@pytest.mark.parametrize("lost", [1, 0], ids=["another", "the one that saves"])
def test_a_replica_group_that_comes_back_goes_on_with_the_others(tmp_path: Path, lighthouse: str, lost: int) -> None:
    groups = [start(tmp_path, lighthouse, group, DIES if group == lost else -1) for group in (0, 1)]
    try:
        assert groups[lost].wait(120) == -signal.SIGKILL
        before = steps_of(tmp_path, lost)
        groups[lost] = start(tmp_path, lighthouse, lost, -1)
        assert [group.wait(120) for group in groups] == [0, 0], (tmp_path / f"{lost}-output.txt").read_text()[-3000:]
    finally:
        for group in groups:
            group.kill()
            group.wait()

    after = steps_of(tmp_path, lost)[len(before) :]
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
