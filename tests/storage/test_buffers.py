"""Objects that are written from several pieces of memory, and read into several."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cnr_store.errors import CorruptObject, MissingObject, StorageFailure
from cnr_store.storage import Storage, fill_inside, object_digest, open_storage
from cnr_store.storage import local as local_module
from cnr_store.storage.copies import ObjectCopies
from tests.support.recording_os import RecordingOs

PIECES = [b"abc", memoryview(b"defgh"), b"", memoryview(b"ij")]
KEY, DATA = "data/s/x/c.0", b"abcdefghij"


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    place = str(tmp_path / "root") if request.param == "local" else f"memory://{request.node.name}"
    return open_storage(place, fsync=False)


def filled(storage: Storage, start: int, *sizes: int) -> tuple[int | None, list[bytes]]:
    memory = [bytearray(size) for size in sizes]
    found = storage.read_into(KEY, start, [memoryview(one) for one in memory])
    return found, [bytes(one) for one in memory]


def test_pieces_become_one_object_and_one_recorded_copy(storage: Storage) -> None:
    storage.copies = ObjectCopies(lambda _: True, 100)
    storage.put(KEY, PIECES)

    assert storage.read(KEY) == DATA
    assert storage.copies.take_written()[KEY].tobytes() == DATA


def test_a_read_fills_memory_as_far_as_the_object_goes(storage: Storage) -> None:
    assert filled(storage, 0, 2) == (None, [bytes(2)])
    storage.put(KEY, PIECES)

    assert filled(storage, 0, 4, 0, 6) == (10, [b"abcd", b"", b"efghij"])
    assert filled(storage, 3, 1, 2) == (3, [b"d", b"ef"])
    assert filled(storage, 7, 2, 2, 2) == (3, [b"hi", b"j\0", bytes(2)])


def test_more_pieces_than_one_call_of_the_system_takes(storage: Storage) -> None:
    many = [bytes([at % 251]) * 3 for at in range(2500)]
    storage.put(KEY, many)

    assert filled(storage, 0, *[3] * 2500) == (7500, many)


def test_memory_is_filled_with_checked_bytes_alone(storage: Storage) -> None:
    storage.put(KEY, DATA)
    memory = bytearray(6)
    pieces = [([memoryview(memory)[:1], memoryview(memory)[1:2]], object_digest(b"cd")),
              ([memoryview(memory)[2:]], object_digest(b"efgh"))]  # fmt: skip

    fill_inside(storage, KEY, 2, pieces)
    assert memory == b"cdefgh"

    with pytest.raises(CorruptObject, match="bytes 1 to 3, has digest"):
        fill_inside(storage, KEY, 1, pieces)
    with pytest.raises(CorruptObject, match="cut short"):
        fill_inside(storage, KEY, 8, pieces)
    with pytest.raises(MissingObject):
        fill_inside(storage, "data/s/x/c.1", 0, pieces)


def test_a_local_read_into_memory_refuses_what_is_no_file(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path), fsync=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")

    assert storage.read_into("data", 0, [memoryview(bytearray(1))]) is None
    with pytest.raises(StorageFailure, match="symbolic link"):
        storage.read_into("data/link", 0, [memoryview(bytearray(1))])


@pytest.fixture
def uncached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingOs:
    """A system whose calls are noted, and in which all objects are large and are written 4,096 bytes at a time."""
    shim = RecordingOs(tmp_path)
    monkeypatch.setattr(local_module, "_UNCACHED_BYTES", 1)
    monkeypatch.setattr(local_module, "_WINDOW_BYTES", 4096)
    monkeypatch.setattr(local_module, "os", shim)
    return shim


@pytest.mark.parametrize("sizes", [[9000], [4096, 4096], [4095, 4, 0, 1, 5000], [3] * 2500], ids=str)
@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_large_object_is_the_same_beyond_the_page_cache(
    tmp_path: Path, uncached: RecordingOs, sizes: Sequence[int], refusal: int | None
) -> None:
    if refusal is not None:
        uncached.fail["pwritev"] = OSError(refusal, "this file system cannot")
    pieces = [bytes([1 + at % 251]) * size for at, size in enumerate(sizes)]

    open_storage(tmp_path).put(KEY, pieces)

    assert (tmp_path / KEY).read_bytes() == b"".join(pieces)
    names = [name for name, path in uncached.calls if path.endswith(".tmp")]
    assert names[0] == "pwritev"
    assert names[-1] == "fsync"
    assert ("write" in names) >= (refusal is not None)


def test_writes_that_are_cut_short_go_on_where_they_ended(
    tmp_path: Path, uncached: RecordingOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(fd: int, window: Sequence[memoryview], at: int, _: int) -> int:
        return os.pwrite(fd, b"".join(window)[:1000], at)

    monkeypatch.setattr(uncached, "pwritev", some, raising=False)
    pieces = [bytes([1 + at]) * 700 for at in range(20)]

    open_storage(tmp_path).put(KEY, pieces)

    assert (tmp_path / KEY).read_bytes() == b"".join(pieces)


def test_a_large_write_that_fails_leaves_nothing(tmp_path: Path, uncached: RecordingOs) -> None:
    uncached.fail["pwritev"] = OSError(errno.EIO, "broken")

    with pytest.raises(StorageFailure):
        open_storage(tmp_path).put(KEY, DATA)

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_small_objects_and_stores_without_fsync_stay_in_the_page_cache(
    tmp_path: Path, uncached: RecordingOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_storage(tmp_path, fsync=False).put(KEY, DATA)
    monkeypatch.setattr(local_module, "_UNCACHED_BYTES", len(DATA) + 1)
    open_storage(tmp_path).put(KEY, DATA)

    assert "pwritev" not in {name for name, _ in uncached.calls}
