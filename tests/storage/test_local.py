"""Local files: the order of system calls, what a crash may leave, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from cnr_store.errors import AccessDenied, BadInput, StorageFailure, UnsafeBackend
from cnr_store.storage import CreateOutcome, Storage, open_storage, storage_from_filesystem
from cnr_store.storage import local as local_module
from cnr_store.storage.local import LocalStorage
from tests.support.recording_os import RecordingOs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def storage(root: Path) -> Storage:
    return open_storage(root)


@pytest.fixture
def shim(root: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingOs:
    recorder = RecordingOs(root)
    monkeypatch.setattr(local_module, "os", recorder)
    return recorder


def test_create_syncs_the_file_before_the_link_and_the_folders_after(storage: Storage, shim: RecordingOs) -> None:
    storage.create("commits/0.json", b"record")

    assert shim.calls == [
        ("write", "commits/.tmp"),
        ("fsync", "commits/.tmp"),
        ("link", "commits/0.json"),
        ("unlink", "commits/.tmp"),
        ("fsync", "commits"),
        ("fsync", "."),
    ]


def test_folders_are_synced_deepest_first(storage: Storage, shim: RecordingOs) -> None:
    storage.create("data/segment/array/c.0", b"chunk")

    folders = [place for call, place in shim.calls if call == "fsync"][1:]
    assert folders == ["data/segment/array", "data/segment", "data", "."]


def test_a_refused_create_syncs_the_folder_of_the_object_it_found(storage: Storage, shim: RecordingOs) -> None:
    storage.create("commits/0.json", b"record")
    shim.calls.clear()

    assert storage.create("commits/0.json", b"other") is CreateOutcome.EXISTS

    assert shim.calls[2:] == [("link", "commits/0.json"), ("unlink", "commits/.tmp"), ("fsync", "commits")]


def test_put_syncs_the_file_before_it_gets_its_name(storage: Storage, shim: RecordingOs) -> None:
    storage.put("data/x", b"chunk")

    assert shim.calls == [
        ("write", "data/.tmp"),
        ("fsync", "data/.tmp"),
        ("replace", "data/x"),
    ]


def test_folders_are_synced_once_each_and_deepest_first(storage: Storage, shim: RecordingOs) -> None:
    keys = ["data/s/r0/t/x", "data/s/r0/t/y", "data/s/r1/x", "top"]
    for key in keys:
        storage.put(key, b"x")
    shim.calls.clear()

    storage.sync_folders(iter(keys))

    assert shim.calls == [
        ("fsync", folder) for folder in ["data/s/r0/t", "data/s/r0", "data/s/r1", "data/s", "data", "."]
    ]


def test_the_root_is_synced_again_only_for_what_may_be_new_in_it(storage: Storage, shim: RecordingOs) -> None:
    def synced(*keys: str) -> list[str]:
        for key in keys:
            storage.put(key, b"x")
        shim.calls.clear()
        storage.sync_folders(keys)
        return [path for call, path in shim.calls if call == "fsync"]

    assert synced("data/s/x") == ["data/s", "data", "."]
    assert synced("data/r/x") == ["data/r", "data"]
    assert synced("data/s/y", "state/x") == ["data/s", "data", "state", "."]
    assert synced("data/s/x", "top") == ["data/s", "data", "."]
    assert synced("top") == ["."]
    storage.delete(["state/x"])
    assert synced("state/y") == ["state", "."], "a folder that was emptied, and made anew, is a new name"
    assert synced("state/z", "data/s/z") == ["data/s", "data", "state"]


def test_a_folder_that_another_process_made_anew_is_a_new_name(root: Path, shim: RecordingOs) -> None:
    """Its inode number may be that of the one before, unless somebody still has that open."""
    storage, other = open_storage(root), open_storage(root)
    storage.create("state/a", b"x")
    for _ in range(3):
        other.delete(["state/a"])
        other.put("state/a", b"x")
        shim.calls.clear()

        storage.sync_folders(["state/a"])

        assert shim.calls == [("fsync", "state"), ("fsync", ".")]


def test_folders_held_open_are_closed_with_their_storage(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        storage = open_storage(root)
        storage.put("data/x", b"x")
        storage.put("state/x", b"x")
        storage.sync_folders(["data/x", "state/x"])
        storage.delete(["state/x"])
    del storage

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_the_folders_above_a_new_root_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = RecordingOs(tmp_path)
    monkeypatch.setattr(local_module, "os", shim)

    open_storage(tmp_path / "a" / "root").create("cnr.json", b"{}")

    folders = [path for call, path in shim.calls if call == "fsync" and ".tmp" not in path]
    assert folders == ["a", ".", "a/root"]


def test_a_folder_that_cannot_be_synced_is_a_failure(storage: Storage, shim: RecordingOs) -> None:
    storage.put("data/a/x", b"x")
    shim.fail["fsync"] = OSError(errno.EIO, "broken")

    with pytest.raises(StorageFailure, match="syncing the folder"):
        storage.sync_folders(["data/a/x"])

    shim.fail["fsync"] = OSError(errno.EINVAL, "not here")  # what some network file systems say
    storage.sync_folders(["data/a/x"])


def test_without_fsync_nothing_is_synced(root: Path, shim: RecordingOs) -> None:
    storage = open_storage(root, fsync=False)

    storage.create("a/b", b"x")
    storage.put("a/c", b"x")
    storage.sync_folders(["a/b"])

    assert "fsync" not in {name for name, _ in shim.calls}


@pytest.mark.parametrize(
    ("call", "code"), [("write", errno.EIO), ("fsync", errno.EIO), ("link", errno.EIO), ("link", errno.ENOSPC)]
)
def test_a_create_that_fails_half_way_is_unknown_and_leaves_no_name(
    storage: Storage, root: Path, shim: RecordingOs, call: str, code: int
) -> None:
    shim.fail[call] = OSError(code, "broken")

    assert storage.create("commits/0.json", b"record") is CreateOutcome.UNKNOWN

    shim.fail.clear()
    assert storage.read("commits/0.json") is None
    assert list((root / "commits").iterdir()) == []
    assert storage.create("commits/0.json", b"record") is CreateOutcome.CREATED


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_create_on_a_full_disk_has_made_nothing_and_says_so(
    storage: Storage, root: Path, shim: RecordingOs, call: str, code: int
) -> None:
    shim.fail[call] = OSError(code, "full")

    with pytest.raises(StorageFailure, match=errno.errorcode[code]):
        storage.create("commits/0.json", b"record")

    shim.fail.clear()
    assert list((root / "commits").iterdir()) == []
    assert storage.create("commits/0.json", b"record") is CreateOutcome.CREATED


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_put_that_fails_leaves_the_old_content(storage: Storage, root: Path, shim: RecordingOs, call: str) -> None:
    storage.put("hint", b"old")
    shim.fail[call] = OSError(errno.EIO, "broken")

    with pytest.raises(StorageFailure) as caught:
        storage.put("hint", b"new")

    assert isinstance(caught.value.__cause__, OSError)
    assert storage.read("hint") == b"old"
    assert [path.name for path in root.iterdir()] == ["hint"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused(storage: Storage, shim: RecordingOs, code: int) -> None:
    shim.fail["link"] = OSError(code, "no links here")

    with pytest.raises(UnsafeBackend, match="hard links"):
        storage.probe()
    with pytest.raises(UnsafeBackend, match="hard links"):
        storage.create("commits/0.json", b"record")
    assert storage.read("commits/0.json") is None


def test_a_single_writer_may_do_without_hard_links(root: Path, shim: RecordingOs) -> None:
    shim.fail["link"] = OSError(errno.EPERM, "no links here")
    storage = open_storage(root, unsafe_single_writer=True)

    storage.probe()

    assert not storage.is_exclusive
    assert storage.create("a", b"first") is CreateOutcome.CREATED
    assert storage.create("a", b"second") is CreateOutcome.EXISTS
    assert storage.read("a") == b"first"


def test_a_refused_write_is_access_denied(storage: Storage, shim: RecordingOs) -> None:
    shim.fail["link"] = PermissionError(errno.EACCES, "denied")
    with pytest.raises(AccessDenied):
        storage.create("a", b"x")

    shim.fail = {"write": OSError(errno.EROFS, "read-only")}
    with pytest.raises(AccessDenied):
        storage.create("a", b"x")
    with pytest.raises(AccessDenied):
        storage.put("a", b"x")


def test_leftovers_of_a_killed_writer_are_invisible_until_swept(storage: Storage, root: Path) -> None:
    storage.put("data/a/x", b"x")
    for folder in ["data/a", "data/dead/r0"]:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / ".tmp-0123").write_bytes(b"half")

    assert [stat.key for stat in storage.list_objects("")] == ["data/a/x"]
    assert storage.list_folders("data") == ["a"]

    assert storage.sweep("data", older_than_s=3600) == 0
    assert storage.sweep("data", older_than_s=-1) == 2
    assert sorted(path.name for path in (root / "data").iterdir()) == ["a"]
    assert storage.read("data/a/x") == b"x"


def test_delete_takes_the_folders_it_empties_and_no_others(storage: Storage, root: Path) -> None:
    storage.put("data/a/r0/x", b"x")
    storage.put("data/b/x", b"x")

    storage.delete(["data/a/r0/x"])

    assert [path.name for path in (root / "data").iterdir()] == ["b"]
    storage.delete(["data/b/x"])
    assert root.is_dir()
    assert list(root.iterdir()) == []


def test_writing_and_deleting_in_one_folder_at_once_loses_nothing(storage: Storage) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        while not stop.is_set():
            try:
                storage.put("data/s/other", b"x")
                storage.delete(["data/s/other"])
            except StorageFailure as error:
                failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for index in range(100):
            storage.put(f"data/s/{index}", b"x")
            assert storage.read(f"data/s/{index}") == b"x"
            storage.delete([f"data/s/{index}"])
    finally:
        stop.set()
        thread.join()

    assert failures == []


def test_a_folder_that_goes_while_it_is_made_is_made_again(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.mkdir, []

    def mkdir(folder: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(folder, mode, dir_fd=dir_fd)
        calls.append(folder)
        if len(calls) <= 2:
            os.rmdir(folder, dir_fd=dir_fd)  # another process emptied it

    monkeypatch.setattr(os, "mkdir", mkdir)

    storage.put("data/s/x", b"x")

    assert storage.read("data/s/x") == b"x"


def test_foreign_names_are_not_listed(storage: Storage, root: Path) -> None:
    storage.put("data/x", b"x")
    (root / "data" / "my notes.txt").write_text("mine")
    (root / "lost+found").mkdir()

    assert [stat.key for stat in storage.list_objects("")] == ["data/x"]
    assert storage.list_folders("") == ["data"]


def test_an_empty_folder_in_place_of_an_object_gives_way(storage: Storage, root: Path) -> None:
    """A repair of a `zarr.json` that was a folder failed by the rename; a commit onto a folder was tried for ever."""
    for name in ("put", "create", "put-full/file", "create-full/file"):
        (root / name).mkdir(parents=True)

    storage.put("put", b"object")
    storage.create("create", b"object")

    assert storage.read("put") == storage.read("create") == b"object"
    for write in (storage.put, storage.create):
        with pytest.raises(StorageFailure, match="is a folder with other files"):
            write(f"{write.__name__}-full", b"object")
    assert len(list(root.iterdir())) == 4  # and no temporary file


def test_a_named_pipe_does_not_hang_a_reader(storage: Storage, root: Path) -> None:
    os.mkfifo(root / "pipe")
    has_waited = threading.Event()

    def let_go() -> None:
        has_waited.set()
        os.close(os.open(root / "pipe", os.O_WRONLY | os.O_NONBLOCK))

    end = threading.Timer(10, let_go)
    end.start()

    with pytest.raises(StorageFailure, match="pipe"):
        storage.read("pipe")
    end.cancel()
    assert not has_waited.is_set()
    assert list(storage.list_objects("")) == []


def test_reading_what_may_not_be_read_is_access_denied(
    storage: Storage, shim: RecordingOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a", b"x")
    shim.fail["open"] = PermissionError(errno.EACCES, "denied")

    with pytest.raises(AccessDenied) as caught:
        storage.read("a")

    assert caught.value.path == "a"


def test_a_local_storage_reads_a_copied_folder(storage: Storage, root: Path, tmp_path: Path) -> None:
    storage.create("commits/0.json", b"record")
    shutil.copytree(root, tmp_path / "copy")

    copy = open_storage(f"file://{tmp_path / 'copy'}")

    assert copy.read("commits/0.json") == b"record"
    assert copy.create("commits/0.json", b"x") is CreateOutcome.EXISTS


def test_the_local_file_system_of_fsspec_is_replaced_by_our_own(root: Path) -> None:
    assert isinstance(storage_from_filesystem(LocalFileSystem(), str(root)), LocalStorage)


def test_options_for_a_local_path_are_bad_input(root: Path) -> None:
    with pytest.raises(BadInput, match="storage_options"):
        open_storage(root, storage_options={"auto_mkdir": True})
