"""Owners killed before every call that others can see the effect of, and readers killed while they read."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from cnr_store.errors import VersionNotFound
from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.shared_memory import SharedMemory
from tests.faults.shared_tables_program import Counts, first_tables, publish
from tests.faults.test_consume_torn_reads import reader_program
from tests.support.launcher import Launcher, Program

VERSIONS = 4
CI_KILLS = 6


def run_owner(launcher: Launcher, folder: Path, first: int, kill_at: int) -> tuple[int, list[str]]:
    """Let an owner serve some versions; return its exit status and its output."""
    code = f"from tests.faults.shared_tables_program import own; own({str(folder)!r}, {first}, {kill_at}, {VERSIONS})"
    (done,) = launcher.run(Program(["-c", code]), folder=folder)
    return done.returncode, done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def calls(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Number of calls of an owner that is not killed."""
    status, said = run_owner(launcher, tmp_path_factory.mktemp("alone"), 1, 0)
    assert status == 0, said
    return int(said[-1].removeprefix("calls "))


def check_kill(launcher: Launcher, folder: Path, kill_at: int) -> None:
    status, said = run_owner(launcher, folder, 1, kill_at)
    assert status == -signal.SIGKILL
    published = int(said[-1]) if said else 0
    # A reader that comes after the death sees a whole version: the last that was acknowledged, or the next.
    before = None
    try:
        before = AttachedTables(folder)
    except VersionNotFound:
        assert published in (0, VERSIONS)  # before the first, or while it cleaned up
    else:
        counts = Counts(before, kill_at)
        for _ in range(20):
            assert counts.look() in (published, published + 1)
        assert counts.mixed == 0
        assert counts.lookups.retries == 0

    memory = SharedMemory(folder)
    publisher = memory.publisher(min_view_s=0.0)
    publisher.publish(50, 50, dict(first_tables(50, memory)), {"version": np.full(4, 50)})
    publish(publisher, memory, 51, 50)

    assert {path.name for path in folder.iterdir()} == {"owner.lock", "current", memory.path.name}
    for tables in (before, AttachedTables(folder)):
        if tables is not None:
            tables._checked_at = -1e9  # the time between two looks at who owns the folder is over
            counts = Counts(tables, kill_at)
            assert [counts.look() for _ in range(5)] == [51] * 5
            assert counts.mixed == 0
            tables.close()
    publisher.close()
    memory.close()


@pytest.mark.parametrize("share", range(CI_KILLS))
def test_an_owner_killed_at_any_point_leaves_a_whole_version(
    launcher: Launcher, share: int, calls: int, tmp_path: Path
) -> None:
    # Evenly over the calls of the first publication, of the next ones, and of the end.
    check_kill(launcher, tmp_path, 1 + share * (calls - 1) // (CI_KILLS - 1))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_owner_killed_before_every_call_leaves_a_whole_version(
    launcher: Launcher, calls: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for kill_at in range(1, calls + 1):
        check_kill(launcher, tmp_path_factory.mktemp("killed"), kill_at)


def test_readers_that_are_killed_hold_nobody_up(launcher: Launcher, tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    publisher = memory.publisher(min_view_s=0.0)
    publisher.publish(1, 1, dict(first_tables(1, memory)), {"version": np.full(4, 1)})
    with launcher.running(reader_program(tmp_path, 1 << 40, 0), folder=tmp_path) as reader:
        while reader.output != "attached\n":
            assert not reader.has_ended
            time.sleep(0.01)
        for version in range(2, 60):
            if version == 30:
                reader.send(signal.SIGKILL)
            publish(publisher, memory, version, version - 1)

    publisher.merge()
    counts = Counts(publisher, 0)
    assert counts.look() == 59
    assert counts.mixed == 0
    # The blocks of three tables (rows, and index and rows of the one held by key) and the tensors; one view.
    assert len(list(memory.path.glob("view-*"))) == 1
    assert len(memory._blocks) == 5
    publisher.close()
    memory.close()
