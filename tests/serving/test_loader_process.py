"""A loader in a child process: what it serves, and what becomes of either process when the other one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cnr_store import BadInput, Store, VersionRefused
from cnr_store.errors import Conflict, NotAStore, StorageFailure, VersionNotFound
from cnr_store.serving import AttachedTables, Loader, LoaderOptions, LoaderProcess, loader_process
from tests.serving.loaders import is_even
from tests.support.forks import forked_children
from tests.support.store_oracle import same_bits

RARELY = LoaderOptions(poll_interval_s=1e6)
ROWS, DIM = 50, 4

PARENT = """
import sys, time
from cnr_store.serving import LoaderProcess

if __name__ == "__main__":
    loader = LoaderProcess(sys.argv[1], shared=sys.argv[2])
    print(loader.version, flush=True)
    time.sleep(float(sys.argv[3]))
"""

FORKS_A_WORKER = """
import os, sys
from cnr_store import BadInput
from cnr_store.serving import AttachedTables, LoaderProcess

if __name__ == "__main__":
    with LoaderProcess(sys.argv[1], shared=sys.argv[2]) as loader:
        worker = os.fork()
        if worker == 0:
            with AttachedTables(sys.argv[2]) as tables:
                print(tables.version, flush=True)
            try:
                loader.metrics()
            except BadInput as error:
                print(error, flush=True)
            sys.exit()
        _, status = os.waitpid(worker, 0)
        print(status, loader.is_running, loader.poll().error, loader.version)
"""

DIES_AS_ITS_CHILD_LOADS = """
import os, signal, sys
from cnr_store.serving import LoaderOptions, LoaderProcess

def warm_up(candidate):
    os.kill(os.getppid(), signal.SIGKILL)
    while os.getppid() == int(os.environ["PARENT"]):
        pass

if __name__ == "__main__":
    os.environ["PARENT"] = str(os.getpid())
    LoaderProcess(sys.argv[1], shared=sys.argv[2], options=LoaderOptions(warm_up=warm_up))
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Children are forks. Those of ``PARENT`` are spawned, as a user's."""
    with forked_children(loader_process):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(str(tmp_path / "store"), fsync=False) as made:
        save(made, 2)
        yield made


def save(store: Store, step: int) -> int:
    with store.writer() as writer, writer.begin(step, "baseline") as txn:
        txn.write_table("user", np.random.default_rng(step).normal(size=(ROWS, DIM)).astype(np.float32))
    assert txn.version is not None
    return txn.version


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_serves(loader: AttachedTables, store: Store, version: int) -> None:
    batch = loader.lookup_many({"user": np.arange(ROWS)})
    assert batch.version == version
    assert same_bits(batch.rows["user"], store.snapshot(version).table("user").read())


@pytest.mark.usefixtures("forks")
def test_a_child_follows_and_obeys(store: Store, tmp_path: Path) -> None:
    shared = tmp_path / "m"
    with LoaderProcess(store.url, ["user"], RARELY, shared=shared) as loader:
        first = loader.version
        check_serves(loader, store, first)
        second = save(store, 4)
        loader.wake()
        until(lambda: loader.version == second)
        check_serves(loader, store, second)

        loader.rollback(first)
        check_serves(loader, store, first)
        loader.unpin()
        assert loader.poll().version == second
        check_serves(loader, store, second)
        loader.pin(first)
        check_serves(loader, store, first)

        assert loader.tables == {"user": store.snapshot(first).tables["user"]}

        metrics = loader.metrics()
        assert (metrics.version, metrics.lookups) == (first, 5)
        with pytest.raises(VersionNotFound):
            loader.pin(10**6)
        with pytest.raises(Conflict):
            LoaderProcess(store.url, shared=shared)
        assert loader.is_running
    assert not loader.is_running
    assert [path.name for path in shared.iterdir()] == ["owner.lock"]
    loader.wake()
    loader.close()


@pytest.mark.usefixtures("forks")
def test_what_the_child_refuses_is_told_here(store: Store, tmp_path: Path) -> None:
    options = LoaderOptions(validate=is_even, poll_interval_s=1e6)
    with LoaderProcess(store.url, options=options, shared=tmp_path / "m") as loader:
        refused = save(store, 5)

        assert isinstance(loader.poll().error, VersionRefused)

        assert (loader.version, loader.step) == (refused - 1, 2)  # the record with which the writer began
        check_serves(loader, store, loader.version)


def test_a_forked_worker_ends_without_the_loader(store: Store, tmp_path: Path) -> None:
    """A regression: multiprocessing ended the loader of the parent when a worker of a pre-forking server ended."""
    command = [sys.executable, "-c", FORKS_A_WORKER, store.url, str(tmp_path / "m")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    worker, refused, parent = ended.stdout.splitlines()
    version = store.latest_version()
    assert (worker, parent) == (str(version), f"0 True None {version}")
    assert "attach here with AttachedTables" in refused
    assert ended.stderr == ""


@pytest.mark.usefixtures("forks")
def test_a_killed_child_leaves_what_it_served(store: Store, tmp_path: Path) -> None:
    with LoaderProcess(store.url, options=RARELY, shared=tmp_path / "m") as loader:
        before = loader.version
        pid = loader._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not loader.is_running)
        after = save(store, 4)

        check_serves(loader, store, before)
        loader.wake()
        with pytest.raises(StorageFailure, match="has ended"):
            loader.poll()

        with LoaderProcess(store.url, options=RARELY, shared=tmp_path / "m") as other:
            check_serves(other, store, after)
            until(lambda: loader.version == after)  # what is attached goes over to the new owner


def test_the_child_of_a_killed_program_ends(store: Store, tmp_path: Path) -> None:
    program, shared = tmp_path / "program.py", tmp_path / "m"
    program.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(program), store.url, str(shared), "600"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) == store.latest_version()
        with pytest.raises(Conflict):
            Loader(store.url, shared=shared)
        parent.kill()

    def is_free() -> bool:
        try:
            Loader(store.url, shared=shared).close()
        except Conflict:
            return False
        return True

    until(is_free)


def test_the_child_of_a_program_that_is_killed_early_says_nothing(store: Store, tmp_path: Path) -> None:
    program, shared = tmp_path / "program.py", tmp_path / "m"
    program.write_text(DIES_AS_ITS_CHILD_LOADS)

    done = subprocess.run(
        [sys.executable, str(program), store.url, str(shared)], stderr=subprocess.PIPE, text=True, check=False
    )  # ends when the child has closed its standard error too

    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""
    Loader(store.url, shared=shared).close()


def test_a_program_without_a_main_guard_is_told_so(store: Store, tmp_path: Path) -> None:
    """Regression: that its child may start no process was said to be an argument that cannot be sent there."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom cnr_store.serving import LoaderProcess\nLoaderProcess(sys.argv[1], shared=sys.argv[2])\n"
    )

    done = subprocess.run(
        [sys.executable, str(program), store.url, str(tmp_path / "m")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "if __name__ == '__main__':` cannot start one" in done.stderr
    assert "cannot be sent" not in done.stderr


def test_a_program_that_closes_nothing_frees_the_memory(store: Store, tmp_path: Path) -> None:
    program, shared = tmp_path / "program.py", tmp_path / "m"
    program.write_text(PARENT)

    done = subprocess.run(
        [sys.executable, str(program), store.url, str(shared), "0"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == store.latest_version()
    assert [path.name for path in shared.iterdir()] == ["owner.lock"]


@pytest.mark.usefixtures("forks")
def test_what_a_loader_raises_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(NotAStore):
        LoaderProcess(str(tmp_path / "nothing"), shared=tmp_path / "m")


def test_what_needs_one_process_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="URL"):
        LoaderProcess(store, shared=tmp_path / "m")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="publish"):
        LoaderProcess(store.url, shared=tmp_path / "m", publish="apply")
    with pytest.raises(BadInput, match="modules"):
        LoaderProcess(store.url, options=LoaderOptions(validate=lambda _: True), shared=tmp_path / "m")
