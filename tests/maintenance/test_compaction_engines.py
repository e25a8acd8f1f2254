"""Threads, processes and a Ray cluster write the same bytes, and fail with the same errors."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cnr_store import BadInput, StorageFailure, Store
from cnr_store.errors import CorruptObject, MissingDependency
from cnr_store.format.layout import segment_key
from cnr_store.format.records import SegmentDocument
from cnr_store.integrations.ray import RayPool
from cnr_store.maintenance.compaction import compact_run, engines, tasks
from cnr_store.storage import open_storage, storage_from_filesystem
from tests.support.compacted import Training, content_of, manifest_in, strangers_in
from tests.support.documents import document_of
from tests.support.faulty import IsolatedMemoryFileSystem
from tests.support.forks import forked_children

pytestmark = pytest.mark.usefixtures("training")

ALL = (0, 4)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='the package ray is not installed; pip install "cnr-store[ray]"'
)
OTHERS = ["processes", pytest.param(RayPool(), marks=needs_ray, id="ray")]


@pytest.fixture(autouse=True)
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every table a task of its own."""
    monkeypatch.setattr(tasks, "PIECE_BYTES", 1)


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with forked_children(engines):
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine that other programs cannot reach."""
    if importlib.util.find_spec("ray") is None:
        yield
        return
    import ray

    before = signal.getsignal(signal.SIGTERM)  # Ray puts its own in place, for good
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )  # fmt: skip
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"), fsync=False, threads=2)


def without_names(manifest: SegmentDocument) -> dict[str, Any]:
    """A manifest as plain data, without the fields that are unique to a transaction."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(manifest))
    return {key: value for key, value in document.items() if key not in ("txn", "base")}


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("run", [ALL, (1, 4)], ids=["baseline", "delta"])
def test_the_same_bytes_as_threads(store: Store, tmp_path: Path, cluster: None, engine: Any, run: Any) -> None:
    shutil.copytree(store.url, tmp_path / "other")
    other = Store.open(str(tmp_path / "other"), fsync=False)

    told: list[tuple[str, int, int]] = []
    reports = [
        compact_run(store, run=run, workers=1),
        compact_run(other, run=run, engine=engine, workers=2, progress=lambda *what: told.append(what)),
    ]

    assert [report.outcome for report in reports] == ["committed"] * 2
    assert [report.tasks for report in reports] == [3, 3]
    names = [one.head().record.chain[run[0]].seg for one in (store, other)]
    assert content_of(store, names[0]) == content_of(other, names[1])
    first, second = (document_of(manifest_in(one, name)) for one, name in zip((store, other), names, strict=True))
    assert without_names(first) == without_names(second)
    assert strangers_in(other, names[1]) == set()
    total = reports[1].bytes_in
    assert {(stage, of) for stage, _, of in told} == {("compact", total)}
    done = [size for _, size, _ in told]
    assert (done[0], done[-1], len(done)) == (0, total, 4)
    assert done == sorted(set(done))


@pytest.mark.parametrize("engine", ["threads", *OTHERS])
def test_damage_of_an_input_is_the_error_that_a_reader_gets(store: Store, cluster: None, engine: Any) -> None:
    head = store.head()
    segment = head.record.chain[1].seg
    path = next(entry.path for entry in manifest_in(store, segment).objects if ".codes/c." in entry.path)
    store.storage.put(segment_key(segment, path), b"x" * 40)

    with pytest.raises(CorruptObject) as caught:
        compact_run(store, run=ALL, engine=engine, workers=2)

    assert segment_key(segment, path) in str(caught.value)
    assert store.head().digest == head.digest


@pytest.mark.parametrize("engine", OTHERS)
def test_no_task_begins_behind_the_deadline(store: Store, cluster: None, engine: Any) -> None:
    assert compact_run(store, run=ALL, engine=engine, workers=1, budget_s=0).outcome == "unfinished"

    report = compact_run(store, run=ALL, engine="threads")

    assert (report.outcome, report.reused_tasks) == ("committed", 0)


def test_processes_that_cannot_be_started_are_an_error_that_says_why(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regression: without a writable /dev/shm it was an OSError without a word of what it was for."""
    before = store.head()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(engines, "ProcessPoolExecutor", refuse)
    with pytest.raises(StorageFailure, match=r"Read-only file system.* /dev/shm .*; compact with threads"):
        compact_run(store, run=ALL, engine="processes", workers=2)

    assert store.head().digest == before.digest


def test_what_one_engine_has_begun_another_goes_on_with(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "multiprocessing", multiprocessing)  # the process is spawned, as a user's
    calls = itertools.count(-2)  # 0 behind the second of the tasks
    with pytest.raises(ZeroDivisionError):
        compact_run(store, run=ALL, progress=lambda *_: 1 // next(calls) and None)

    report = compact_run(store, run=ALL, engine="processes", workers=1)

    assert (report.outcome, report.reused_tasks) == ("committed", 2)


@pytest.mark.parametrize("engine", ["processes", pytest.param(RayPool(), id="ray")])
def test_storage_that_no_other_process_reaches_is_refused(engine: Any) -> None:
    inner = IsolatedMemoryFileSystem()
    given = Store.create_on(storage_from_filesystem(inner, "/root"))
    memory = Store.create_on(open_storage(f"memory://compaction-{type(engine).__name__}"))
    for store in (given, memory):
        training = Training(store)
        with store.writer() as writer:
            training.full(writer)
            training.delta(writer)
        with pytest.raises(BadInput, match="only this process can open"):
            compact_run(store, run=(0, 2), engine=engine)


def test_an_engine_or_a_number_of_workers_that_is_none_is_refused(store: Store) -> None:
    with pytest.raises(BadInput, match="threads, processes, or a pool"):
        compact_run(store, engine="fibres")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="threads, processes, or a pool"):
        compact_run(store, engine=7)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="workers must be a whole number of 1 or more"):
        compact_run(store, workers=0)
    with pytest.raises(BadInput, match="bytes_per_s must be a finite number above 0"):
        compact_run(store, bytes_per_s=0)


def test_without_ray_the_error_says_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    with pytest.raises(MissingDependency, match=r"cnr-store\[ray\]"):
        compact_run(store, run=ALL, engine=RayPool())


@pytest.mark.parametrize("engine", OTHERS)
def test_a_worker_that_dies_is_an_error_and_what_is_done_is_kept(
    store: Store, cluster: None, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    monkeypatch.setattr(engines, "run_elsewhere", _die)
    with pytest.raises(engines.CnrStoreError, match="of the compaction"):
        compact_run(store, run=ALL, engine=engine, workers=1)
    monkeypatch.undo()

    assert compact_run(store, run=ALL).outcome == "committed"


def _die(*_: Any) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
