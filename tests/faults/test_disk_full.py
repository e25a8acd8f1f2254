"""A full disk is said clearly, loses nothing that was acknowledged, and is over when there is space again."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from cnr_store import StorageFailure, Store, Writer, verify_store
from cnr_store.log import RetryPolicy
from cnr_store.storage import open_storage
from tests.faults.life_model import LifeModel, differing, read_state

QUICK = RetryPolicy(deadline_s=0.05, first_delay_s=0.005, max_delay_s=0.01)
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

    def full(self, level: int) -> AbstractContextManager[bool]:
        """Leave room for less than all of a save, the more the higher the level; False where there is no such level."""


@dataclass
class SmallDisk:
    """A mounted tmpfs, filled up to so many pages."""

    path: Path
    says: str = "ENOSPC"

    @contextlib.contextmanager
    def full(self, level: int) -> Iterator[bool]:
        filler = self.path / "filler"
        status = os.statvfs(self.path)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (status.f_bavail - level) * status.f_frsize)
        try:
            yield True
        finally:
            filler.unlink()


@dataclass
class ShortFiles:
    """Any folder, in a process that may write no file longer than its level says: it runs everywhere."""

    path: Path
    says: str = "EFBIG"
    limits = (0, 1, 16, 64, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 65536, 1 << 20)

    @contextlib.contextmanager
    def full(self, level: int) -> Iterator[bool]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limits[level], hard))
        try:
            yield True
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
    return Store.open_on(open_storage(str(disk.path / "store")), threads=1, retry=QUICK)


def save(writer: Writer, model: LifeModel, step: int) -> int:
    with writer.begin(step) as txn:
        model.write(txn)
    model.saved()
    assert txn.version is not None
    return txn.version


def leftovers(disk: Disk) -> list[Path]:
    return list((disk.path / "store").rglob(".tmp-*"))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A store with a full, beside the disk."""
    path = tmp_path / "prepared"
    with Store.create(str(path)) as store, store.writer() as writer:
        save(writer, LifeModel.fresh(SEED), 0)
    return path


def test_a_save_that_finds_the_disk_full_says_so_and_the_next_one_goes_on(disk: Disk, prepared: Path) -> None:
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] != "saved":
        shutil.copytree(prepared, disk.path / "store")
        outcomes.append(save_on_full_disk(disk, level=len(outcomes)))
        shutil.rmtree(disk.path / "store")
    sys.stdout.write(f"{disk.says}: {dict(Counter(outcomes))}\n")

    assert Counter(outcomes)["storage_failure"] == len(outcomes) - 1 > 10


def save_on_full_disk(disk: Disk, level: int) -> str:
    """Save on a disk with little room, then with enough of it in the same process; what became of the first."""
    store, model = open_store(disk), LifeModel.fresh(SEED)
    model.saved()
    writer = store.writer()
    writer.restore()
    before = model.copy()
    model.train(SEED, 1)
    try:
        with disk.full(level):
            save(writer, model, 1)
        return "saved"
    except StorageFailure as error:
        outcome, said = error.kind, str(error)
    assert disk.says in said, f"level {level}: {said}"
    assert leftovers(disk) == []
    with Store.open(store.url) as fresh:
        assert differing(read_state(fresh.snapshot()), before.expected()) == [], f"level {level}"
    save(writer, model, 2)
    with Store.open(store.url) as fresh:
        assert [record.step for record in fresh.log(limit=2)] == [2, 0]
        assert differing(read_state(fresh.snapshot()), model.expected()) == [], f"level {level}"
        assert verify_store(fresh, deep=True).problems == ()
    store.close()
    return outcome
