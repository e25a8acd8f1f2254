"""Tables in shared files: the owner of the folder, the files that readers map, and when files are deleted."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cnr_store.errors import AccessDenied, Conflict, CorruptObject, NewerFormat, StorageFailure, VersionNotFound
from cnr_store.serving.rows import attached as attached_module
from cnr_store.serving.rows import shared_memory as shared_memory_module
from cnr_store.serving.rows.attached import AttachedTables
from cnr_store.serving.rows.board import BOARD_BYTES
from cnr_store.serving.rows.shared_memory import BOARD_FILE, CURRENT_FILE, LOCK_FILE, SharedGeneration, SharedMemory
from cnr_store.serving.rows.view_file import MAGIC, ArrayRef, check_file_name, check_ref, encode_view, parse_view
from cnr_store.serving.rows.views import Publisher
from tests.support.served_rows import SCALE, held_table, overlay_of, schema_of

ROWS = np.arange(40)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    with_owner = SharedMemory(tmp_path / "shared")
    yield with_owner
    with_owner.close()


def served(memory: SharedMemory, number: int = 1) -> Publisher:
    """A publisher of version ``number``, every row of which is that number."""
    publisher = memory.publisher(min_view_s=0.0)
    held = held_table(dict.fromkeys(range(40), number), schema_of(), memory=memory)
    publisher.publish(number, number, {"t": held}, dense={"w": np.array([number])})
    return publisher


def publish(publisher: Publisher, memory: SharedMemory, number: int) -> None:
    held = publisher.newest_view()[0].tables["t"].base
    changes: dict[int, int | None] = dict.fromkeys(range(40), number)
    publisher.publish(number, number, {"t": overlay_of(changes, held, memory)}, dense={"w": np.array([number])})


def seen(tables: AttachedTables) -> int:
    """The version that a lookup reads, all of whose rows are of it."""
    batch = tables.lookup_many({"t": ROWS}, dense=["w"])
    assert (batch.rows["t"] == batch.version * SCALE).all()
    assert batch.dense["w"].tolist() == [batch.version]
    return batch.version


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_nobody_serves_in_an_empty_folder(tmp_path: Path, memory: SharedMemory) -> None:
    with pytest.raises(VersionNotFound, match=r"no loader serves in .*: start one with shared="):
        AttachedTables(tmp_path)
    with pytest.raises(VersionNotFound, match="no loader serves"):
        AttachedTables(memory.folder)  # an owner that has published nothing yet


def test_a_reader_follows_versions_and_merges(memory: SharedMemory) -> None:
    publisher = served(memory)
    with AttachedTables(memory.folder) as tables:
        assert seen(tables) == 1
        publish(publisher, memory, 2)
        assert seen(tables) == 2
        publisher.merge()
        assert seen(tables) == 2
        publish(publisher, memory, 3)
        publish(publisher, memory, 4)
        assert (seen(tables), tables.version, tables.step, tables.retries) == (4, 4, 4, 0)


def test_a_detached_reader_says_so_and_keeps_its_batches(memory: SharedMemory) -> None:
    served(memory)
    tables = AttachedTables(memory.folder)
    batch = tables.lookup_many({"t": [3]})
    tables.close()

    with pytest.raises(VersionNotFound, match="not attached any more"):
        tables.lookup_many({"t": [3]})
    assert batch.rows["t"][0, 0] == SCALE


def test_rows_cannot_be_written_by_readers(memory: SharedMemory) -> None:
    served(memory)
    with AttachedTables(memory.folder) as tables:
        held = tables.newest_view()[0].tables["t"].base
        with pytest.raises(ValueError, match="read-only"):
            held.rows[0, 0] = 3


def test_a_folder_has_one_owner(memory: SharedMemory) -> None:
    with pytest.raises(Conflict, match="another loader owns"):
        SharedMemory(memory.folder)


def test_a_forked_child_does_not_keep_the_folder_of_a_dead_owner(tmp_path: Path) -> None:
    # The owner forks a child and dies; the child lives on.
    program = (
        "import os, sys, time\n"
        "from cnr_store.serving.rows.shared_memory import SharedMemory\n"
        "memory = SharedMemory(sys.argv[1])\n"
        "there, here = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    memory.close()\n"  # does nothing: the child owns nothing
        "    os.write(here, b'1')\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "os.read(there, 1)\n"  # by then the child has given up what it was forked with
        "print(child, flush=True)\n"
        "os._exit(9)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.wait()
        os.kill(child, 0)  # lives
        assert (tmp_path / "g1" / BOARD_FILE).exists()

        memory = SharedMemory(tmp_path)

        assert owner.stdin is not None
        owner.stdin.close()
    memory.close()


def test_a_clean_end_takes_the_files_away_and_readers_keep_what_they_have(memory: SharedMemory) -> None:
    publisher = served(memory)
    tables = AttachedTables(memory.folder)

    publisher.close()
    memory.close()

    assert names(memory.folder) == {"owner.lock"}
    assert seen(tables) == 1
    with pytest.raises(VersionNotFound):
        AttachedTables(memory.folder)
    tables.close()


def test_a_reader_that_missed_the_last_view_says_so_until_the_next_one(memory: SharedMemory) -> None:
    publisher = served(memory)
    tables = AttachedTables(memory.folder)
    publish(publisher, memory, 2)
    publisher.merge()  # over the rows of the view that is mapped
    publisher.close()
    memory.close()

    for _ in range(2):
        with pytest.raises(VersionNotFound, match="has ended, and the last version was not mapped here"):
            tables.lookup_many({"t": ROWS})
    other = SharedMemory(memory.folder)
    served(other, 3)

    assert seen(tables) == 3
    other.close()


def test_an_owner_that_is_to_come_again_leaves_its_last_view(memory: SharedMemory) -> None:
    publisher = served(memory)
    tables = AttachedTables(memory.folder)
    publish(publisher, memory, 2)
    publisher.merge()
    publisher.close()
    memory.close(keep=True)

    assert seen(tables) == 2
    assert seen(AttachedTables(memory.folder)) == 2


def test_readers_go_over_to_the_next_owner(tmp_path: Path) -> None:
    first = SharedMemory(tmp_path)
    served(first, 5)
    time = [0.0]
    tables = AttachedTables(tmp_path, monotonic_s=lambda: time[0])
    first._release_lock()  # as if it had died: its files stay

    second = SharedMemory(tmp_path)
    assert seen(tables) == 5
    assert AttachedTables(tmp_path).version == 5  # the new owner is loading; the old view is there for new readers too

    publisher = served(second, 3)
    time[0] += attached_module.RECHECK_ENDED_S
    assert seen(tables) == 3
    assert names(tmp_path) == {"owner.lock", CURRENT_FILE, "g2"}
    publish(publisher, second, 4)
    assert seen(tables) == 4
    second.close()


def test_an_owner_that_died_while_it_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    first = SharedMemory(tmp_path)
    served(first, 5)
    first._release_lock()
    loading = SharedMemory(tmp_path)
    loading.allocate("rows", (1000, 8), np.float32)
    loading._release_lock()

    third = SharedMemory(tmp_path)

    assert names(tmp_path) == {"owner.lock", CURRENT_FILE, "g1", "g3"}
    assert AttachedTables(tmp_path).version == 5
    third.close()


def test_overlays_are_written_in_turn_to_memory_that_stays(memory: SharedMemory) -> None:
    publisher = served(memory)
    before = memory.nbytes, len(names(memory.path))
    overlays = set()
    with AttachedTables(memory.folder) as tables:
        for number in range(2, 30):
            publisher.merge()  # as a loader does before it reads what changed
            publish(publisher, memory, number)
            mapped = tables._attached
            assert seen(tables) == number
            overlay = publisher.newest_view()[0].tables["t"].overlay
            assert overlay is not None
            overlays.add(name := memory.ref_of(overlay.rows).file)
            if number > 4:
                assert mapped is not None
                assert tables._attached is not None
                assert tables._attached.files[name] is mapped.former[name]
    publisher.merge()

    assert len(overlays) == 2
    assert (memory.nbytes, len(names(memory.path))) == (before[0], before[1] + 2)

    for number in range(30, 70):  # no rows change
        publisher.publish(number, number, {})
    assert (memory.nbytes, len(names(memory.path))) == before


@pytest.mark.parametrize("merges", [True, False])
def test_a_slow_reader_looks_again_before_its_overlay_is_written(memory: SharedMemory, merges: bool) -> None:
    publisher = served(memory)
    publish(publisher, memory, 2)
    view, board = publisher.newest_view()
    overlay = view.tables["t"].overlay
    assert overlay is not None
    publisher.merge()
    assert board.is_whole(view.epoch)

    for number in (3, 4, 5):
        if merges:
            publish(publisher, memory, number)
            publisher.merge()
        else:
            publisher.publish(number, number, {})
    publish(publisher, memory, 6)

    assert (overlay.rows == 6 * SCALE).all()  # the memory that the view of version 2 reads
    assert not board.is_whole(view.epoch)


def test_an_overlay_that_is_larger_takes_other_memory(memory: SharedMemory) -> None:
    publisher = served(memory)
    held = publisher.newest_view()[0].tables["t"].base
    for number, rows in enumerate([1, 1, 1, 40, 40, 1, 40, 1, 1], 2):
        change: dict[int, int | None] = dict.fromkeys(range(rows), number)
        publisher.publish(number, number, {"t": overlay_of(change, held, memory)})
        with AttachedTables(memory.folder) as tables:
            assert (tables.lookup("t", ROWS[:rows]) == number * SCALE).all()
    publisher.merge()
    assert len([name for name in names(memory.path) if "overlay" in name]) <= 2


def test_a_merge_alone_is_followed_later(memory: SharedMemory) -> None:
    times = [0.0]
    publisher = served(memory)
    publish(publisher, memory, 2)
    with AttachedTables(memory.folder, monotonic_s=lambda: times[0]) as tables:
        before = tables.newest_view()[0]
        publisher.merge()
        assert tables.newest_view()[0] is before
        assert seen(tables) == 2

        times[0] = attached_module.RECHECK_S

        assert (seen(tables), tables.newest_view()[0].has_overlays) == (2, False)


def test_what_a_failed_attempt_took_is_released(memory: SharedMemory) -> None:
    before = memory.nbytes
    kept = memory.allocate("kept", (10,), np.int64)

    def fail() -> None:
        with memory.attempt():
            memory.allocate_together("lost", [((10, 3), np.float32), ((0,), np.int64)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert memory.nbytes == before + 128
    assert memory.block_of(kept) is not None
    assert len(names(memory.path)) == 3  # board, pointer, the array that was kept


def test_arrays_know_their_block(memory: SharedMemory) -> None:
    numbers, nothing, flags = memory.allocate_together("a", [((5,), np.int64), ((0, 4), np.float32), ((7,), np.uint8)])
    other = memory.allocate("b/../c", (3, 2), np.float16)

    assert memory.block_of(numbers) == memory.block_of(nothing) == memory.block_of(flags[3:])
    assert memory.block_of(other) not in (None, memory.block_of(numbers))
    assert memory.block_of(np.zeros(3)) is None
    assert memory.ref_of(other[1:]) == ArrayRef("2-b_.._c", 4, "float16", (2, 2))
    with pytest.raises(ValueError, match="only contiguous arrays"):
        memory.ref_of(other[:, :1])


def test_no_rows_are_reserved_where_none_are_used(memory: SharedMemory) -> None:
    """Deletions alone, merged into a table without a key, were an OSError: invalid argument."""
    rows = memory.allocate("rows", (16, 4), np.float32, used_rows=0)
    memory.reserve(rows, 0)
    memory.reserve(rows, 1)
    rows[0] = 1


def test_room_to_grow_takes_memory_when_it_is_reserved(memory: SharedMemory) -> None:
    rows = memory.allocate("rows", (1 << 20, 16), np.float32, used_rows=10)
    path = memory.path / memory.ref_of(rows).file
    assert path.stat().st_blocks * 512 < 1 << 20

    memory.reserve(rows, 1 << 15)
    rows[: 1 << 15] = 3

    assert 1 << 21 <= path.stat().st_blocks * 512 < 1 << 23


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs at /dev/shm")
def test_a_full_tmpfs_is_an_error_and_the_old_version_goes_on(request: pytest.FixtureRequest) -> None:
    folder = Path("/dev/shm") / f"cnr-test-{os.getpid()}"
    memory = SharedMemory(folder)
    request.addfinalizer(lambda: shutil.rmtree(folder, ignore_errors=True))
    request.addfinalizer(memory.close)
    served(memory)
    free = shutil.disk_usage(folder).total
    before = memory.nbytes, names(memory.path)

    with pytest.raises(StorageFailure, match=r"no shared memory left: enlarge the tmpfs \(in a container --shm-size\)"):
        memory.allocate("rows", (2 * free,), np.uint8)
    grown = memory.allocate("sparse", (2 * free,), np.uint8, used_rows=1)
    with pytest.raises(StorageFailure, match="no shared memory left"):
        memory.reserve(grown, 2 * free)
    block = memory.block_of(grown)
    assert block is not None
    memory.release(block)

    assert (memory.nbytes, names(memory.path)) == before
    assert seen(AttachedTables(folder)) == 1


def test_each_attempt_without_room_has_the_same_error(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression: the error had the number of the file, so the log of a loader had a line for each of its polls."""
    monkeypatch.setattr(shared_memory_module, "reserve", full)

    messages = set()
    for _ in range(3):
        with pytest.raises(StorageFailure) as caught:
            memory.allocate("user.rows", (64,), np.uint8)
        messages.add(caught.value.message)

    assert len(messages) == 1
    assert "user.rows cannot be shared in 64 bytes" in messages.pop()


def test_a_reader_of_another_user_is_told_why(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    served(memory)

    def denied(*_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(attached_module, "read_at_most", denied)
    with pytest.raises(AccessDenied, match="run both as one user"):
        AttachedTables(memory.folder)


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_a_view_that_cannot_be_told_of_is_not_seen(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = served(memory)

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory_module, "write_whole", full)
        with pytest.raises(StorageFailure, match="no shared memory left"):
            publish(publisher, memory, 2)
        assert seen(AttachedTables(memory.folder)) == 1
        assert publisher.newest_view()[0].version == 1
    publisher.reveal()  # it is still staged

    assert seen(AttachedTables(memory.folder)) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageFailure, match="file/shared"):
        SharedMemory(tmp_path / "file" / "shared")


# ---- what readers check -----------------------------------------------------------------------------------------


def test_a_generation_of_a_newer_library_is_refused(memory: SharedMemory) -> None:
    served(memory)
    (memory.folder / CURRENT_FILE).write_bytes(msgspec.json.encode(SharedGeneration(2, memory.generation)))

    with pytest.raises(NewerFormat, match="format 2; this library knows 1"):
        AttachedTables(memory.folder)


@pytest.mark.parametrize("damage", ["cut", "flipped", "magic", "json"])
def test_a_damaged_description_is_refused(memory: SharedMemory, damage: str) -> None:
    publisher = served(memory)
    path = memory.view_path(publisher.newest_view()[0].epoch)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-1]
    elif damage == "flipped":
        data[-5] ^= 1
    elif damage == "magic":
        data[0] ^= 1
    else:
        data = bytearray(encode_view(msgspec.json.decode(b'{"epoch": 1}')))
    path.write_bytes(bytes(data))

    with pytest.raises(CorruptObject, match="view-1"):
        AttachedTables(memory.folder)


def test_a_description_is_read_as_it_was_written(memory: SharedMemory) -> None:
    publisher = served(memory)
    data = memory.view_path(publisher.newest_view()[0].epoch).read_bytes()

    assert data[:8] == MAGIC
    assert encode_view(parse_view(data, "here")) == data


@pytest.mark.parametrize(
    "ref",
    [
        ArrayRef("1-a", 0, "float32", (33,)),
        ArrayRef("1-a", 64, "float32", (17,)),
        ArrayRef("1-a", -4, "float32", (1,)),
        ArrayRef("1-a", 2, "float32", (1,)),
        ArrayRef("1-a", 0, "object", (1,)),
        ArrayRef("1-a", 0, "float32", (-1, -1)),
        ArrayRef("1-a", 0, "float32", (1 << 62, 1 << 62)),
    ],
)
def test_an_array_that_its_file_cannot_hold_is_refused(ref: ArrayRef) -> None:
    with pytest.raises(CorruptObject, match="no room for"):
        check_ref(ref, 128, "file")


@pytest.mark.parametrize("name", ["../1-a", "1-a/../../b", "/etc/passwd", "", "a"])
def test_names_of_array_files_lead_nowhere_else(name: str) -> None:
    with pytest.raises(CorruptObject, match="no name of an array's file"):
        check_file_name(name)


def test_a_file_that_was_cut_is_refused_and_not_mapped(memory: SharedMemory) -> None:
    publisher = served(memory)
    rows = publisher.newest_view()[0].tables["t"].base.rows
    path = memory.path / memory.ref_of(rows).file
    copy = path.read_bytes()
    path.unlink()  # the owner's own mapping must stay whole
    path.write_bytes(copy[:100])

    with pytest.raises(CorruptObject, match="has 100 bytes, no room for"):
        AttachedTables(memory.folder)


def test_a_file_of_another_user_is_not_mapped(tmp_path: Path) -> None:
    """Whoever owns it can cut it under a lookup, which kills the process, and change what was checked."""
    path = Path("/etc/passwd")
    if os.geteuid() == 0:
        path = tmp_path / "rows"
        path.write_bytes(bytes(64))
        os.chown(path, 12345, 12345)

    with pytest.raises(PermissionError, match="another user"):
        shared_memory_module.map_file(path, 64, create=False, writable=False)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":1}', b"\xff" * 40, b"[" * 1000, b"0" * 100_000])
def test_a_damaged_pointer_is_named_and_the_next_owner_mends_it(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "shared"
    first = SharedMemory(folder)
    served(first, 1)
    reader = AttachedTables(folder, monotonic_s=itertools.count().__next__)
    first.close(keep=True)
    (folder / CURRENT_FILE).write_bytes(damage)
    assert seen(reader) == 1

    with pytest.raises(CorruptObject, match="restart the loader") as found:
        AttachedTables(folder)

    assert found.value.path == str(folder / CURRENT_FILE)
    second = SharedMemory(folder)
    served(second, 2)
    assert seen(AttachedTables(folder)) == 2
    assert seen(reader) == 2
    second.close()


@pytest.mark.parametrize("damage", [b"x", b"-1", b"\0" * 32, b"9" * 32, b"1e5"])
def test_a_damaged_lock_file_counts_on_behind_every_generation(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "shared"
    first = SharedMemory(folder)
    served(first, 1)
    first.close(keep=True)
    (folder / LOCK_FILE).write_bytes(damage)

    second = SharedMemory(folder)

    assert second.generation > first.generation
    second.close()
    third = SharedMemory(folder)
    assert third.generation == second.generation + 1
    third.close()


@pytest.mark.parametrize("size", [0, 8, BOARD_BYTES - 1])
def test_a_board_that_was_cut_is_named(memory: SharedMemory, size: int) -> None:
    served(memory)
    board = memory.path / BOARD_FILE
    (memory.folder / "copy").write_bytes(board.read_bytes()[:size])
    (memory.folder / "copy").replace(board)

    with pytest.raises(CorruptObject, match="restart the loader") as found:
        AttachedTables(memory.folder)

    assert (found.value.path, found.value.found) == (str(board), size)


@pytest.mark.parametrize("name", [CURRENT_FILE, "g1", "g1/board", "g1/view-1"])
def test_a_link_in_shared_memory_is_not_followed_by_readers(memory: SharedMemory, tmp_path: Path, name: str) -> None:
    served(memory)
    place = memory.folder / name
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")

    with pytest.raises(StorageFailure, match="symbolic link"):
        AttachedTables(memory.folder)


@pytest.mark.parametrize("name", [LOCK_FILE, "g7", "g1/board"])
def test_an_owner_writes_and_deletes_nothing_behind_a_link(tmp_path: Path, name: str) -> None:
    folder, foreign = tmp_path / "shared", tmp_path / "foreign"
    (folder / "g1").mkdir(parents=True)
    (foreign / "board").mkdir(parents=True)
    (foreign / "mine").write_bytes(b"\0" * BOARD_BYTES)
    (folder / name).symlink_to(foreign / "mine" if name != "g7" else foreign)

    if name == LOCK_FILE:
        with pytest.raises(StorageFailure, match="symbolic link"):
            SharedMemory(folder)
    else:
        memory = SharedMemory(folder)
        served(memory)
        memory.close()

    assert (foreign / "mine").read_bytes() == b"\0" * BOARD_BYTES
    assert (foreign / "board").is_dir()
