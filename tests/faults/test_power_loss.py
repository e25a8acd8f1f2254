"""At the moment a record has its name, all that it makes visible survives a power loss (CNR-STO-12)."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import numpy as np
import pytest

from cnr_store import CompactionPolicy, RetentionPolicy, Store, compact, maintain, verify_store
from cnr_store.format import layout
from cnr_store.relay import Relay
from cnr_store.storage import below
from cnr_store.storage import local as local_module
from tests.support.faulty import SimulatedCrash
from tests.support.power_loss import VolatileOs
from tests.support.snapshot_bytes import bytes_of

ROWS = np.random.default_rng(3).normal(size=(200, 4)).astype(np.float32)


class Machine:
    """Runs what a test does, and cuts the power whenever a commit record has got its name."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.survivors: list[tuple[int, str, Path]] = []
        self.kill_behind: str | None = None
        self._images = images
        self._os = VolatileOs(self._cut)
        monkeypatch.setattr(local_module, "os", self._os)
        monkeypatch.setattr(below, "os", self._os)

    def _cut(self, name: Path) -> bool:
        """Of the record only the name is lucky: its bytes must have been made safe before."""
        key = name.relative_to(self._images.parent).as_posix()
        if self.kill_behind is not None and re.fullmatch(self.kill_behind, key):
            self.kill_behind = None
            return True
        match = re.fullmatch(r"(\w+)/(branches/(\w+)/)?commits/(\d+)\.json", key)
        if match is None:
            return False
        image = self._images / uuid.uuid4().hex
        try:
            self._os.leave(self._images.parent / match[1], image, but=name)
        except OSError as error:  # which the code under test would take for the disk's
            raise AssertionError(f"no image at {key}") from error
        self.survivors.append((int(match[4]), match[3] or "", image))
        return False


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "images", monkeypatch)


def check(machine: Machine, versions: int) -> None:
    """Every image opens at the record that was just named, and is sound."""
    assert len(machine.survivors) >= versions
    for version, branch, image in machine.survivors:
        if not (image / layout.IDENTITY).exists():
            assert (image / layout.RELAY).exists()  # that has not begun: there is nothing to open yet
            continue
        with Store.open(str(image), fsync=False, threads=1) as main:
            name = next(iter(main.branches()), None) if branch else None
        if branch and name is None:
            continue  # A branch begins with its log, and is seen with its pin.
        with Store.open(str(image), branch=name, fsync=False, threads=1) as left:
            assert left.latest_version() == version
            assert [problem.message for problem in verify_store(left).problems] == []
            bytes_of(left.snapshot())


def save(store: Store, *steps: int) -> None:
    with store.writer() as writer:
        if store.head().record.chain:
            writer.restore()
        for step in steps:
            with writer.begin(step=step) as txn:
                if step == 0:
                    txn.write_table("user", ROWS, slots={"momentum1": np.abs(ROWS[:, 0])})
                    txn.write_table("a/b", ROWS[:50])
                else:
                    rows = np.arange(step % 7, 200, 13, dtype=np.int64)
                    txn.write_rows("user", rows, ROWS[rows] + step, slots={"momentum1": np.abs(ROWS[rows, 0])})
                txn.put_dense({"mlp.weight": np.full((3, 5), float(step))})
                txn.put_document("reader/0", {"position": step})


def test_a_save_that_was_named_survives_a_power_loss(machine: Machine, tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "store"), threads=2) as store:
        save(store, 0, 1, 2)

    check(machine, 5)


def test_a_side_object_survives_with_its_record(machine: Machine, tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "store"), threads=1) as store:
        save(store, 0)
        for number in range(10):
            store.tag(f"{number}{'x' * 1000}", 2)

    assert (tmp_path / "store/state").is_dir()
    check(machine, 13)


def test_compactions_and_collections_survive_a_power_loss(machine: Machine, tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "store"), threads=2) as store:
        save(store, 0, 1, 2, 3)
        compact(store, policy=CompactionPolicy(max_chain=1))
        for _ in range(2):
            maintain(store, retention=RetentionPolicy(keep_last=1), grace_s=0, orphan_age_s=0, force=True)

    check(machine, 8)


def test_what_a_relay_copied_survives_with_its_record(machine: Machine, tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "store"), threads=2) as store:
        save(store, 0, 1)
        for number in range(10):
            store.tag(f"{number}{'x' * 1000}", 2)
        relay = Relay(store, str(tmp_path / "near"))
        relay.advance()
        machine.survivors.clear()
        save(store, 2, 3)

        relay.advance()

    check(machine, 3)


@pytest.mark.parametrize("name", [r"data/.*/_segment\.json\.zst", r"data/.*\.codes/c\.0\.0", r"state/.*"])
def test_what_a_killed_relay_left_is_made_safe_by_the_next(machine: Machine, tmp_path: Path, name: str) -> None:
    """The next relay finds a segment whole, of which the one before had not synced every folder."""
    with Store.create(str(tmp_path / "store"), threads=1) as store:
        save(store, 0)
        Relay(store, str(tmp_path / "near")).advance()
        save(store, 1)
        for number in range(10):
            store.tag(f"{number}{'x' * 1000}", 2)
        machine.survivors.clear()
        machine.kill_behind = f"near/{name}"
        with pytest.raises(SimulatedCrash):
            Relay(store, str(tmp_path / "near")).advance()

        Relay(store, str(tmp_path / "near")).advance()

    check(machine, 1)


@pytest.mark.parametrize("name", [r".*/_segment\.json\.zst", r".*\.receipt\.json\.zst", r".*\.codes/c\.0\.0"])
def test_what_a_killed_compaction_left_is_made_safe_by_the_next(machine: Machine, tmp_path: Path, name: str) -> None:
    with Store.create(str(tmp_path / "store"), threads=1) as store:
        save(store, 0, 1, 2)
        machine.kill_behind = f"store/data/{name}"
        with pytest.raises(SimulatedCrash):
            compact(store, policy=CompactionPolicy(max_chain=1))

        compact(store, policy=CompactionPolicy(max_chain=1), force=True)

    check(machine, 6)


def test_a_branch_survives_a_power_loss(machine: Machine, tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "store"), threads=1) as store:
        save(store, 0)
        with store.fork("trial", 2) as branch:
            save(branch, 1)

    assert [version for version, branch, _ in machine.survivors if branch] == [0, 1, 2]
    check(machine, 7)
