"""A store of which a part was moved away and linked: whatever is done with it, nothing behind the link changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cnr_store import (
    CnrStoreError,
    CompactionPolicy,
    RetentionPolicy,
    StorageFailure,
    Store,
    collect_garbage,
    maintain,
    repair_store,
    verify_store,
)
from cnr_store.relay import Relay
from tests.support.snapshot_bytes import bytes_of
from tests.tools.sample_store import build_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with build_store(path) as store:
        for number in range(10):  # more than a record holds: these stand in a side object
            store.tag(f"{number}{'x' * 1000}", 3)
        store.lease(ttl_s=3600)
        store.register_cursor("c", 4, ttl_s=3600)
        store.fork("trial", 3)
    return path


def moved_and_linked(root: Path, pattern: str) -> tuple[str, Path]:
    """Move the first thing that fits out of the root, and put a link to it in its place; returns its key, and where."""
    place = sorted(root.glob(pattern))[0]
    away = root.with_name("away") / place.name
    away.parent.mkdir()
    place.rename(away)
    place.symlink_to(away)
    for path in (away, *away.rglob("*")):
        os.utime(path, (0, 0))  # old enough for whatever is deleted by age
    return place.relative_to(root).as_posix(), away.parent


def contents(folder: Path) -> dict[str, bytes | None]:
    found = {}
    for path in sorted(folder.rglob("*")):
        found[path.relative_to(folder).as_posix()] = path.read_bytes() if path.is_file() else None
    return found


def save(store: Store) -> None:
    with store.writer() as writer:
        writer.restore()
        with writer.begin(step=50) as txn:
            txn.write_rows("half/item", np.asarray([1]), np.ones((1, 4), np.float16))


def maintained(store: Store) -> None:
    report = maintain(
        store, retention=RetentionPolicy(keep_last=1), compaction=CompactionPolicy(max_chain=1), grace_s=0,
        orphan_age_s=0, force=True,
    )  # fmt: skip
    if report.error is not None:
        raise report.error


USES: tuple[Callable[[Store], object], ...] = (
    lambda store: bytes_of(store.snapshot()),
    save,
    lambda store: store.tag("new", 4),
    lambda store: store.lease(ttl_s=60),
    lambda store: store.register_cursor("d", 4, ttl_s=60),
    lambda store: store.cursors(),
    lambda store: store.branches(),
    lambda store: repair_store(store, dry_run=False),
    maintained,
    maintained,
)


@pytest.mark.parametrize(
    "pattern",
    [
        "cnr.json", "zarr.json", "commits", "commits/*7.json", "commits/*0.json", "hint", "hint/latest.json", "state",
        "state/*.json", "branches", "branches/*", "leases", "leases/readers", "leases/readers/*", "leases/cursors",
        "leases/cursors/*", "data", "data/*", "data/*/_segment.json.zst", "data/*/r*.codes",
        "data/*/r*.codes/c.0.0",
    ],
)  # fmt: skip
def test_nothing_behind_a_link_is_used_or_changed(root: Path, pattern: str) -> None:
    link, away = moved_and_linked(root, pattern)
    before = contents(away)
    raised: list[CnrStoreError] = []
    reported: set[str] = set()
    try:
        with Store.open(str(root), fsync=False) as store:
            for use in USES:
                try:
                    use(store)
                except CnrStoreError as error:
                    raised.append(error)
            reported = {problem.path for problem in verify_store(store).problems}
    except StorageFailure as error:
        raised.append(error)

    assert contents(away) == before
    assert link in reported | {error.path for error in raised} or not (root / link).is_symlink()
    assert "not_a_store" not in {error.kind for error in raised}


@pytest.mark.parametrize("place", ["data/{}", "data", "leases/readers", "hint"])
def test_maintenance_leaves_a_foreign_folder_alone(root: Path, tmp_path: Path, place: str) -> None:
    """`cnr maintain`, and again a day later, emptied what a link under data/ pointed to."""
    foreign = tmp_path / "photos"
    for name in ("r0/c.0", "_segment.json.zst", ".tmp-1", "holiday.json"):
        (foreign / name).parent.mkdir(parents=True, exist_ok=True)
        (foreign / name).write_bytes(b"mine")
        os.utime(foreign / name, (0, 0))
    before = contents(foreign)
    link = root / place.format(f"{1:020d}-{'0' * 32}")
    if link.exists():
        link.rename(tmp_path / "before")
    link.symlink_to(foreign)
    with Store.open(str(root), fsync=False) as store:
        for _ in range(2):
            report = maintain(store, grace_s=0, orphan_age_s=0, force=True)

            assert report.outcome == "failed"
            assert report.error is not None
            assert "is a symbolic link" in report.error.message
        assert contents(foreign) == before

        link.unlink()
        if (tmp_path / "before").exists():
            (tmp_path / "before").rename(link)
        assert maintain(store, grace_s=0, orphan_age_s=0, force=True).outcome == "done"
    assert contents(foreign) == before


def test_a_link_inside_a_segment_that_is_due_goes_with_it(root: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    (foreign / "r0").mkdir(parents=True)
    (foreign / "r0" / "holiday").write_bytes(b"mine")
    segment = root / f"data/{1:020d}-{'0' * 32}"
    (segment / "r0").mkdir(parents=True)
    (segment / "r0" / "folder").symlink_to(foreign)
    (segment / "r0" / "object").symlink_to(foreign / "r0" / "holiday")
    with Store.open(str(root), fsync=False) as store:
        for _ in range(2):
            collect_garbage(store, grace_s=0, orphan_age_s=0, dry_run=False, force=True)

    assert not segment.exists()
    assert contents(foreign) == {"r0": None, "r0/holiday": b"mine"}


@pytest.mark.parametrize("pattern", ["data", "data/*", "commits", "leases", "hint", "relay.json", "state"])
def test_a_relay_writes_nothing_behind_a_link_of_its_target(root: Path, tmp_path: Path, pattern: str) -> None:
    near = tmp_path / "near"
    with Store.open(str(root), fsync=False) as store:
        Relay(store, str(near), fsync=False).advance()
        (near / "leases").mkdir(exist_ok=True)
        link, away = moved_and_linked(near, pattern)
        before = contents(away)
        save(store)

        try:
            problem = Relay(store, str(near), fsync=False, grace_s=0).advance().problem
        except StorageFailure as error:
            problem = error.message

    assert f"{link!r} is a symbolic link" in (problem or "")
    assert contents(away) == before
