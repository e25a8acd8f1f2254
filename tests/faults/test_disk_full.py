"""A full disk gives a clear error and loses nothing acknowledged; with space again, everything works."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from cnr_store import StorageFailure, Store, Writer, verify_store
from cnr_store.log.retention import RetentionPolicy
from cnr_store.maintenance.compaction.plan import CompactionPolicy
from cnr_store.maintenance.compaction.run import compact_run
from cnr_store.maintenance.gc.run import collect_garbage
from cnr_store.storage import CreateOutcome, open_storage
from tests.faults.life_model import LifeModel, differing, read_state, unreferenced
from tests.support.inline_workers import inline
from tests.support.launcher import Launcher, Program
from tests.support.memory import QUICK

SEED = 9


class Disk(Protocol):
    """A folder on something that can be full.

    Attributes
    ----------
    says
        The error of the operating system then.
    """

    path: Path
    says: str

    def full(self, level: int) -> AbstractContextManager[None]:
        """Leave little space: more of it at a higher level."""


@dataclass
class SmallDisk:
    """A mounted tmpfs, filled up to so many pages."""

    path: Path
    says: str = "ENOSPC"

    @contextlib.contextmanager
    def full(self, level: int) -> Iterator[None]:
        filler = self.path / "filler"
        status = os.statvfs(self.path)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (status.f_bavail - level) * status.f_frsize)
        try:
            yield
        finally:
            filler.unlink()


@dataclass
class ShortFiles:
    """A folder, in a process whose file size is limited by the level; it works on every machine."""

    path: Path
    says: str = "EFBIG"
    limits = (0, 1, 16, *range(64, 1024, 64), *(1024 << power for power in range(11)))

    @contextlib.contextmanager
    def full(self, level: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = self.limits[level] if level < len(self.limits) else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["tmpfs", "short_files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "short_files":
        yield ShortFiles(tmp_path)
        return
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a tmpfs")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def open_store(disk: Disk) -> Store:
    return inline(Store.open_on(open_storage(str(disk.path / "store"), fsync=False), threads=1, retry=QUICK))


def save(writer: Writer, model: LifeModel, step: int) -> int:
    with writer.begin(step) as txn:
        model.write(txn)
    model.saved()
    assert txn.version is not None
    return txn.version


def leftovers(disk: Disk) -> list[Path]:
    return list((disk.path / "store").rglob(".tmp-*"))


DELTAS = 5
"""Saves of the prepared store after its full."""


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A store with a full and some deltas, beside the disk."""
    path, model = tmp_path / "prepared", LifeModel.fresh(SEED)
    with Store.create(str(path), fsync=False) as store, store.writer() as writer:
        save(writer, model, 0)
        for step in range(1, DELTAS + 1):
            model.train(SEED, step)
            save(writer, model, step)
    return path


def prepared_model() -> LifeModel:
    """The values of the training when the prepared store is opened."""
    model = LifeModel.fresh(SEED)
    for step in range(1, DELTAS + 1):
        model.train(SEED, step)
    model.saved()
    return model


Doing = Callable[[Store], Callable[[], object]]
"""Prepares an action on a store, and returns the action."""


def saving(store: Store) -> Callable[[], object]:
    writer, model = store.writer(), prepared_model()
    writer.restore()
    model.train(SEED, DELTAS + 1)
    return lambda: save(writer, model, DELTAS + 1)


def compacting(store: Store) -> Callable[[], object]:
    # Of a disk that is full one learns at once: a lease that a failed attempt has left is one's own.
    return lambda: compact_run(store, policy=CompactionPolicy(max_restore_ratio=1.1), force=True)


def collecting(store: Store) -> Callable[[], object]:
    policy = RetentionPolicy(keep_last=1)
    return lambda: collect_garbage(store, policy=policy, grace_s=0, orphan_age_s=0, dry_run=False, force=True)


def fill_up(disk: Disk, prepared: Path, doing: Doing, every: int) -> Counter[str]:
    """Run the action with more and more space, until it succeeds; return the result of each attempt."""
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] != "done":
        shutil.copytree(prepared, disk.path / "store")
        outcomes.append(done_on_full_disk(disk, doing, level=len(outcomes) * every))
        shutil.rmtree(disk.path / "store")
    sys.stdout.write(f"{disk.says}, {doing.__name__}: {dict(Counter(outcomes))}\n")
    return Counter(outcomes)


@pytest.mark.parametrize(("doing", "every"), [(saving, 5), (compacting, 5), (collecting, 3)])
def test_what_finds_the_disk_full_says_so_and_is_done_when_there_is_space(
    disk: Disk, prepared: Path, doing: Doing, every: int
) -> None:
    outcomes = fill_up(disk, prepared, doing, every)

    assert outcomes["done"] == 1
    assert outcomes["storage_failure"] > 0


@pytest.mark.parametrize("disk", ["tmpfs"], indirect=True)
def test_a_disk_that_has_no_room_for_the_record_alone_is_said_to_be_full(disk: Disk, prepared: Path) -> None:
    shutil.copytree(prepared, disk.path / "store")
    with open_store(disk) as store:
        do = saving(store)
        before = store.head()
        storage, real_create = store.storage, store.storage.create

        def create(key: str, data: bytes) -> CreateOutcome:
            with disk.full(0):
                return real_create(key, data)

        storage.create = create  # type: ignore[method-assign]
        with pytest.raises(StorageFailure, match=disk.says):
            do()
        storage.create = real_create  # type: ignore[method-assign]

        assert store.head().record == before.record
        assert store.internals.log.unresolved is None
        do()
        assert store.head().record.step == DELTAS + 1


TABLE = np.random.default_rng(1).normal(size=(8192, 16)).astype(np.float32)
MIRROR_PAGES = TABLE.size * 2 // resource.getpagesize()


def mirrored_saves(url: str, folder: str, levels: list[int], disk: Disk) -> list[str]:
    """Save a table whose mirror is in a folder with more and more space; return the result of each attempt."""
    outcomes = []
    for level in levels:
        with Store.open(url) as store, store.writer(mirror="mmap", mirror_folder=folder) as writer:
            try:
                with disk.full(level), writer.begin(level) as txn:
                    txn.write_table("user", TABLE)
                outcomes.append("done")
            except StorageFailure as error:
                outcomes.append(f"{error.kind} {error.found}")
    return outcomes


def test_a_mirror_file_on_a_full_disk_ends_the_save_and_not_the_process(
    launcher: Launcher, disk: Disk, tmp_path: Path
) -> None:
    """Run in a child process, because a write to a mapped page without disk space raises SIGBUS."""
    url = str(tmp_path / "other" / "store")
    Store.create(url, fsync=False).close()
    folder = disk.path / "mirrors"
    folder.mkdir()
    levels = [0, 1, MIRROR_PAGES // 2, MIRROR_PAGES + 8] if isinstance(disk, SmallDisk) else [0, 5, len(disk.limits)]
    program = f"""
from pathlib import Path
from tests.faults.test_disk_full import {type(disk).__name__}, mirrored_saves
print(mirrored_saves({url!r}, {str(folder)!r}, {levels}, {type(disk).__name__}(Path({str(disk.path)!r}))))
"""

    (done,) = launcher.run(Program(["-c", program]), folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"storage_failure {disk.says}"] * (len(levels) - 1) + ["done"])
    assert list(folder.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("doing", [saving, compacting])
def test_what_finds_the_disk_full_at_any_object_says_so(disk: Disk, prepared: Path, doing: Doing) -> None:
    outcomes = fill_up(disk, prepared, doing, every=1)

    assert outcomes["done"] == 1
    assert outcomes["storage_failure"] > 10


def done_on_full_disk(disk: Disk, doing: Doing, level: int) -> str:
    """Run the action on a disk with little space, then with enough in the same process; return the first result."""
    store, model = open_store(disk), prepared_model()
    do = doing(store)
    before = store.head()
    try:
        with disk.full(level):
            do()
        return "done"
    except StorageFailure as error:
        outcome, said = error.kind, str(error)
    assert disk.says in said, f"level {level}: {said}"
    assert leftovers(disk) == []
    with inline(Store.open(store.url, threads=1)) as fresh:
        assert fresh.head().record.chain == before.record.chain
        assert differing(read_state(fresh.snapshot()), model.expected()) == [], f"level {level}"
        assert verify_store(fresh, all_versions=True).problems == ()
    do()
    if doing is saving:
        model.train(SEED, DELTAS + 1)
    with inline(Store.open(store.url, threads=1)) as fresh:
        assert fresh.head().record.v > before.record.v
        assert differing(read_state(fresh.snapshot()), model.expected()) == [], f"level {level}"
        assert verify_store(fresh, deep=True).problems == ()
        collecting(fresh)()
        assert unreferenced(fresh) == [], f"level {level}"
        assert differing(read_state(fresh.snapshot()), model.expected()) == [], f"level {level}"
    store.close()
    return outcome
