"""Symbolic links below the root of a local store are refused or unlinked, never followed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cnr_store import StorageFailure
from cnr_store.storage import CreateOutcome, Storage, below, open_storage

FOREIGN = {"precious": b"not the store's", ".tmp-old": b"neither", "r0/x": b"nor this"}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder outside the root, with names that a store could have written."""
    folder = tmp_path / "foreign"
    for name, data in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, (0, 0))
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A storage with ``data/s/r0/x``."""
    storage = open_storage(tmp_path / "root")
    storage.put("data/s/r0/x", b"x")
    return storage


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CALLS: dict[str, Callable[[Storage, str], object]] = {
    "read": lambda storage, key: storage.read(key),
    "read a range": lambda storage, key: storage.read(key, start=0, stop=1),
    "put": lambda storage, key: storage.put(key, b"new"),
    "create": lambda storage, key: storage.create(key, b"new"),
    "delete": lambda storage, key: storage.delete([key]),
    "sync": lambda storage, key: storage.sync_folders([key]),
    "list": lambda storage, key: list(storage.list_objects(key.rpartition("/")[0])),
    "list folders": lambda storage, key: storage.list_folders(key.rpartition("/")[0]),
    "sweep": lambda storage, key: storage.sweep(key.rpartition("/")[0], older_than_s=-1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("link", "key"), [("data", "data/precious"), ("data/s/r0", "data/s/r0/precious"), ("data", "data/r0/x")]
)
def test_nothing_behind_a_link_is_reached(
    storage: Storage, tmp_path: Path, foreign: Path, link: str, key: str, call: Callable[[Storage, str], object]
) -> None:
    place = tmp_path / "root" / link
    place.rename(tmp_path / "moved")
    place.symlink_to(foreign)

    with pytest.raises(StorageFailure, match="symbolic link") as refused:
        call(storage, key)

    assert refused.value.path == link
    assert contents(foreign) == FOREIGN
    assert (foreign / "empty").is_dir()


@pytest.mark.parametrize("target", ["precious", "absent", "r0"])
def test_a_link_in_the_place_of_an_object_is_refused_or_replaced(
    storage: Storage, tmp_path: Path, foreign: Path, target: str
) -> None:
    key = "data/s/r0/link"
    place = tmp_path / "root" / key
    place.symlink_to(foreign / target)

    for call in (CALLS["read"], CALLS["create"]):
        with pytest.raises(StorageFailure, match="symbolic link") as refused:
            call(storage, key)
        assert refused.value.path == key
    assert [stat.key for stat in storage.list_objects("data")] == [key, "data/s/r0/x"]
    assert place.is_symlink()

    storage.put(key, b"new")
    assert storage.read(key) == b"new"
    assert not place.is_symlink()
    assert contents(foreign) == FOREIGN


@pytest.mark.parametrize("target", ["precious", "absent", "r0"])
def test_deleting_a_link_takes_the_link(storage: Storage, tmp_path: Path, foreign: Path, target: str) -> None:
    (tmp_path / "root/data/s/link").symlink_to(foreign / target)

    storage.delete(stat.key for stat in storage.list_objects("data/s"))

    assert contents(tmp_path / "root") == {}
    assert not (tmp_path / "root/data").exists()
    assert contents(foreign) == FOREIGN


def test_a_sweep_leaves_links_and_what_is_behind_them(storage: Storage, tmp_path: Path, foreign: Path) -> None:
    (tmp_path / "root/data/s/link").symlink_to(foreign)
    (tmp_path / "root/data/s/.tmp-link").symlink_to(foreign / "precious")

    assert storage.sweep("data", older_than_s=-1) == 1

    assert (tmp_path / "root/data/s/link").is_symlink()
    assert contents(foreign) == FOREIGN


def test_a_link_is_listed_as_a_folder_that_nothing_is_known_of(storage: Storage, tmp_path: Path, foreign: Path) -> None:
    (tmp_path / "root/data/segment").symlink_to(foreign)

    assert storage.list_folders("data") == ["s", "segment"]
    with pytest.raises(StorageFailure, match="data/segment"):
        next(iter(storage.list_objects("data/segment")))
    assert storage.list_links("data") == ["data/segment"]
    assert storage.list_links("data/segment") == storage.list_links("data/segment/r0") == ["data/segment"]
    assert storage.list_links("data/s") == storage.list_links("commits") == []


def test_the_root_may_be_a_link(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(tmp_path / "root")
    storage = open_storage(tmp_path / "other")

    assert storage.create("data/s/r0/y", b"y") is CreateOutcome.CREATED
    assert storage.read("data/s/r0/y") == b"y"
    assert storage.list_folders("data") == ["s"]
    storage.delete(["data/s/r0/x", "data/s/r0/y"])
    assert (tmp_path / "root").is_dir()


def test_hard_links_are_objects_like_others(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "root/data/s/twin").hardlink_to(tmp_path / "root/data/s/r0/x")

    storage.put("data/s/twin", b"other")

    assert (storage.read("data/s/twin"), storage.read("data/s/r0/x")) == (b"other", b"x")


def test_a_link_that_comes_while_folders_are_made_is_refused(
    storage: Storage, tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look that finds no folder and the making of it."""
    real = os.mkdir

    def mkdir(folder: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if folder == "new":
            (tmp_path / "root/data/new").symlink_to(foreign)
        real(folder, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)

    with pytest.raises(StorageFailure, match="data/new"):
        storage.put("data/new/r0/x", b"x")

    assert contents(foreign) == FOREIGN


def test_an_open_that_fails_gives_the_reason(storage: Storage, tmp_path: Path) -> None:
    folder = os.open(tmp_path / "root", below.FOLDER)
    try:
        for path, code in (
            ("data/none", errno.ENOENT),
            ("data/s/r0/x/y", errno.ENOTDIR),
            ("n" * 300, errno.ENAMETOOLONG),
        ):
            with pytest.raises(OSError, match=os.strerror(code)) as found:
                below.open_below(folder, path, os.O_RDONLY)
            assert found.value.errno == code
    finally:
        os.close(folder)
