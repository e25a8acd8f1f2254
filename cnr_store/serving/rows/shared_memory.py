"""Base tables in files that other processes map, for example under ``/dev/shm``; this is the writing process's side.

Plain files are used because the resource tracker of ``multiprocessing.shared_memory`` unlinks what an ending process
had open. ::

    <folder>/owner.lock     flock of the process that owns the folder, until it ends. Contains <n>
    <folder>/current        the generation that readers attach to; replaced atomically
    <folder>/g<n>/          the files of one owner
        board               the `Board`
        <count>-<name>      arrays, one file per block
        view-<epoch>        the arrays of a view; complete before the board has its epoch

A later owner starts a new generation, and deletes the former one when its own first view can be read. Until then
readers use the last view of the former owner, which is complete at whatever point that owner was killed.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import re
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cnr_store.errors import Conflict, CorruptObject, NewerFormat, StorageFailure
from cnr_store.format.documents import loads
from cnr_store.format.limits import MAX_SMALL_BYTES
from cnr_store.runtime.local_files import failing_at, lock_file, open_file, read_at_most, reserve, write_whole
from cnr_store.serving.rows.board import BOARD_BYTES, Board
from cnr_store.serving.rows.memory import Array, ArrayShape, Memory, offsets_of
from cnr_store.serving.rows.view_file import ArrayRef, describe_view, encode_view
from cnr_store.serving.rows.views import Publisher, View

LOCK_FILE = "owner.lock"
CURRENT_FILE = "current"
BOARD_FILE = "board"
FORMAT = 1

_GENERATION = re.compile(r"g([0-9]{1,18})")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME_LENGTH = 80
_RESERVE_STEP = 1 << 20
_SPARE_SHARE = 8
"""A new block has room for an eighth more, which takes no memory: the next overlay may be larger."""
_VIEWS_BETWEEN = 2
"""Views after a merge at which its overlay may be written again: one that is shown, and the next."""
_SPARE_VIEWS = 32
"""Views after which a block that was not written again is unlinked: its table changes rarely, or is gone."""
_MOST_GENERATIONS = 10**17
"""Numbers below have at most the digits of `_GENERATION`."""

_NO_ROOM = "there is no shared memory left: enlarge the tmpfs (in a container --shm-size), or serve less"
_ADVICE = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE), "a table takes one to four descriptors: raise the limit of open files (ulimit -n)"
    ),
}
_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""A map keeps a descriptor of its file open otherwise, and there are some per table."""


class SharedGeneration(msgspec.Struct, frozen=True):
    """``current``: the generation to attach to."""

    format: int
    generation: int


# Made while the module is imported, as in documents.py.
_DECODER = msgspec.json.Decoder(SharedGeneration)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A file: its mapped bytes, of which the first ``used`` are allocated."""

    name: str
    path: Path
    memory: Array
    address: int
    used: int


class SharedMemory(Memory):
    """A `Memory` of files in a folder that this process owns until `close`, or until it ends.

    A child that was forked has the arrays, but owns nothing: it must attach like any other process.
    """

    is_shared = True

    def __init__(self, folder: str | Path) -> None:
        """Own ``folder``, made if it is not there.

        Raises
        ------
        Conflict
            Another process owns it, or another `SharedMemory` of this one.
        StorageFailure
            The folder cannot be used.
        """
        self.folder = Path(folder)
        self._guard = threading.Lock()
        self._count = count(1)
        self._blocks: dict[int, _Block] = {}
        self._addresses: list[tuple[int, int]] = []
        self._epochs: list[int] = []
        self._merged: list[tuple[int, _Block]] = []
        """What `recycle` was given: views from this epoch on do not have the block."""
        self._spare: dict[str, tuple[int, list[_Block]]] = {}
        """Blocks that no reader can have, by name, and the epoch from which on they were spare."""
        self._attempts: list[list[int]] = []
        self._is_current = False
        self._publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()
        self._lock_fd = -1
        with _failing_at(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _own(self.folder)
            try:
                there = generations(self.folder)
                # Counted in the file that stays: a number that comes again would look like the same generation.
                self.generation = 1 + max(there | {_counted(self._lock_fd)})
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, b"%d" % self.generation, 0)
                for generation in there - _attachable(self.folder, there):
                    shutil.rmtree(self.folder / f"g{generation}")
                self.path = self.folder / f"g{self.generation}"
                self.path.mkdir()
                self.board = Board(map_file(self.path / BOARD_FILE, BOARD_BYTES).view(np.int64))
                # Written while it may fail; it becomes `current` when the first view can be seen.
                self._pointer = self.path / CURRENT_FILE
                write_whole(self._pointer, msgspec.json.encode(SharedGeneration(FORMAT, self.generation)))
            except BaseException:
                self._release_lock()
                raise
        _OWNERS.add(self)

    def publisher(self, **options: Any) -> Publisher:
        """Return the publisher of what is in this memory; ``options`` are those of `Publisher`."""
        publisher = Publisher(self, board=self.board, **options)
        self._publishers.add(publisher)
        return publisher

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are not released, room to grow included."""
        with self._guard:
            return sum(len(block.memory) for block in self._blocks.values())

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, used_rows: int | None = None
    ) -> Array:
        """See `Memory.allocate`. The memory is taken at once: a full tmpfs is an error here, no SIGBUS later."""
        offsets, size = offsets_of([(shape, dtype)])
        used = size if used_rows is None else used_rows * (size // max(1, shape[0]))
        return _array(self._block(name, size, min(used, size)), offsets[0], shape, dtype)

    def allocate_together(self, name: str, arrays: Sequence[ArrayShape]) -> tuple[Array, ...]:
        """See `Memory.allocate_together`."""
        offsets, size = offsets_of(arrays)
        block = self._spare_block(name, size)
        if block is None:
            block = self._block(name, size + size // _SPARE_SHARE, size)
        return tuple(_array(block, at, shape, dtype) for at, (shape, dtype) in zip(offsets, arrays, strict=True))

    def reserve(self, array: Array, used_rows: int) -> None:
        """See `Memory.reserve`.

        Raises
        ------
        StorageFailure
        """
        number = self.block_of(array)
        if number is None or not len(array) or used_rows == 0:
            return
        block = self._blocks[number]
        end = _address(array) - block.address + used_rows * (array.nbytes // len(array))
        _reserve(block, min(len(block.memory), -(-end // _RESERVE_STEP) * _RESERVE_STEP))

    def block_of(self, array: Array) -> int | None:
        """See `Memory.block_of`."""
        address = _address(array)
        with self._guard:
            at = bisect.bisect_right(self._addresses, (address, 1 << 62)) - 1
            if at < 0:
                return None
            number = self._addresses[at][1]
            block = self._blocks[number]
            return number if address < block.address + len(block.memory) else None

    def release(self, block: int) -> None:
        """See `Memory.release`: the file is unlinked, and its memory goes when no process maps it any longer."""
        found = self._taken_back(block)
        if found is not None:
            _unlink(found.path)

    def recycle(self, block: int) -> None:
        """See `Memory.recycle`; the newest view is the one after the merge."""
        found = self._taken_back(block)
        if found is not None:
            self._merged.append((self._epochs[-1], found))

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """See `Memory.attempt`."""
        taken: list[int] = []
        with self._guard:
            self._attempts.append(taken)
        try:
            yield
        except BaseException:
            for block in taken:
                self.release(block)
            raise
        finally:
            with self._guard:
                # By identity: two attempts that took nothing are equal lists.
                self._attempts = [one for one in self._attempts if one is not taken]

    def ref_of(self, array: Array) -> ArrayRef:
        """Return where an array of this memory is, for another process."""
        number = self.block_of(array)
        if number is None or not array.flags.c_contiguous:
            raise ValueError("only contiguous arrays of this memory can be shown to other processes")
        block = self._blocks[number]
        return ArrayRef(block.path.name, _address(array) - block.address, array.dtype.name, array.shape)

    def put_view(self, view: View) -> None:
        """See `Memory.put_view`."""
        path = self.view_path(view.epoch)
        data = encode_view(describe_view(view, self.ref_of))
        with _failing_at(path, len(data)):
            write_whole(path, data)
        if view.epoch not in self._epochs:
            self._epochs.append(view.epoch)

    def drop_views(self, before: int) -> None:
        """See `Memory.drop_views`. The first time, readers are sent here, and what earlier owners left goes."""
        if not self._is_current:
            self._supersede()
        for epoch in [one for one in self._epochs if one < before]:
            _unlink(self.view_path(epoch))
            self._epochs.remove(epoch)
        self._make_spare(before)

    def view_path(self, epoch: int) -> Path:
        """Return the file that describes a view."""
        return self.path / f"view-{epoch}"

    def close(self, *, keep: bool = False) -> None:
        """Release the folder. Idempotent. Readers keep what they map.

        Deletes the files, or with ``keep`` leaves them, as a killed owner does: then readers use the last view, and the
        memory stays allocated, until the next owner serves.
        """
        if self._lock_fd < 0:
            return
        self.board.end()
        if not keep:
            if self._is_current:
                with _failing_at(self.folder / CURRENT_FILE):
                    (self.folder / CURRENT_FILE).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
        self._release_lock()

    def _supersede(self) -> None:
        with _failing_at(self._pointer):
            self._pointer.replace(self.folder / CURRENT_FILE)
        self._is_current = True
        for generation in generations(self.folder) - {self.generation}:
            old = self.folder / f"g{generation}"
            try:
                Board(map_file(old / BOARD_FILE, BOARD_BYTES, create=False).view(np.int64)).end()
            except (OSError, CorruptObject):
                # Its owner died before it had a board, or the board is damaged: no reader can be attached, or informed.
                pass
            shutil.rmtree(old, ignore_errors=True)

    def _block(self, name: str, size: int, used: int) -> Array:
        number, name_in_path = next(self._count), _NOT_IN_NAMES.sub("_", name)[-_NAME_LENGTH:]
        path = self.path / f"{number}-{name_in_path}"
        with _failing_at(self.folder / name_in_path, used):  # without the number: the same error at each attempt
            try:
                memory = map_file(path, size, used)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return self._given(number, _Block(name, path, memory, _address(memory), used))

    def _make_spare(self, epoch: int) -> None:
        """Make those of the merged blocks spare that were merged two views ago, and unlink what was spare for long."""
        ready = [one for one in self._merged if one[0] + _VIEWS_BETWEEN <= epoch]
        self._merged = [one for one in self._merged if one[0] + _VIEWS_BETWEEN > epoch]
        with self._guard:
            names = {block.name for _, block in ready}
            gone = [name for name, (at, _) in self._spare.items() if name in names or at + _SPARE_VIEWS < epoch]
            old = [block for name in gone for block in self._spare.pop(name)[1]]
            for merged_at, block in ready:
                self.board.begin_merge(merged_at)  # readers of earlier views look again
                self._spare.setdefault(block.name, (epoch, []))[1].append(block)
        for block in old:
            _unlink(block.path)

    def _spare_block(self, name: str, size: int) -> Array | None:
        """Return a block that was recycled, if there is one for ``size`` bytes that is not far too large."""
        with self._guard:
            _, blocks = self._spare.get(name, (0, []))
            block = next((one for one in blocks if size <= len(one.memory) <= 2 * size), None)
            if block is None:
                return None
            blocks.remove(block)
        if size > block.used:
            try:
                _reserve(block, size)
            except StorageFailure:
                _unlink(block.path)
                raise
        return self._given(next(self._count), replace(block, used=max(size, block.used)))

    def _given(self, number: int, block: _Block) -> Array:
        with self._guard:
            self._blocks[number] = block
            bisect.insort(self._addresses, (block.address, number))
            for taken in self._attempts:
                taken.append(number)
        return block.memory

    def _taken_back(self, number: int) -> _Block | None:
        with self._guard:
            block = self._blocks.pop(number, None)
            if block is not None:
                self._addresses.remove((block.address, number))
            return block

    def _release_lock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        # Not under the guard: in a forked child another thread may have it for ever.
        self._blocks, self._addresses, self._merged, self._spare = {}, [], [], {}
        if fd >= 0:
            os.close(fd)


def generations(folder: Path) -> set[int]:
    """Return the generations that are in a folder; links are none.

    Raises
    ------
    OSError
    """
    with os.scandir(folder) as entries:
        found = [_GENERATION.fullmatch(one.name) for one in entries if one.is_dir(follow_symlinks=False)]
    return {int(match[1]) for match in found if match}


def current_generation(folder: Path) -> int | None:
    """Return the generation to attach to; None where no owner serves.

    Raises
    ------
    NewerFormat
    CorruptObject
        The file that names it is damaged.
    AccessDenied, StorageFailure
    """
    path = folder / CURRENT_FILE
    with failing_at(path, "read"):
        try:
            data = read_at_most(path, MAX_SMALL_BYTES)
        except FileNotFoundError:
            return None
    try:
        current = loads(data, _DECODER)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptObject(
            f"{path} names no generation to attach to ({error}); it was damaged, restart the loader of the folder",
            path=str(path),
        ) from error
    if current.format > FORMAT:
        raise NewerFormat(
            f"{path} is of format {current.format}; this library knows {FORMAT}: use one version of it in the loader "
            "and in its readers",
            path=str(path), expected=FORMAT, found=current.format,
        )  # fmt: skip
    return current.generation


def map_file(
    path: Path, size: int, used: int | None = None, *, create: bool = True, writable: bool = True
) -> npt.NDArray[np.uint8]:
    """Return a file's first ``size`` bytes, shared with all processes that map it.

    The bytes of a new file are zeros; ``used`` of them are allocated.

    Raises
    ------
    OSError
        No room, no such file, a link, or the file of another user, who could cut it under a reader.
    CorruptObject
        The file is smaller, or empty.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT | os.O_EXCL if create else 0)
    file = open_file(path, flags, 0o600)
    try:
        if create:
            os.ftruncate(file, size)
            reserve(file, size if used is None else used)
        elif hasattr(os, "geteuid") and os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "it is another user's", str(path))
        elif (found := os.fstat(file).st_size) < max(size, 1):
            raise CorruptObject(
                f"{path} has {found} bytes, expected {size}: it was cut, restart the loader of the folder",
                path=str(path), expected=size, found=found,
            )  # fmt: skip
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(file, size, access=access, **_NO_DESCRIPTOR), np.uint8)
    finally:
        os.close(file)


def _unlink(path: Path) -> None:
    # Somebody may have emptied the folder; then there is nothing to unlink.
    with _failing_at(path):
        path.unlink(missing_ok=True)


def _reserve(block: _Block, used: int) -> None:
    with _failing_at(block.path, used):
        file = open_file(block.path, os.O_RDWR)
        try:
            reserve(file, used)
        finally:
            os.close(file)


def _array(block: Array, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    return np.ndarray(shape, dtype, buffer=block.data, offset=offset)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _own(folder: Path) -> int:
    """Return the locked descriptor; its lock makes this process the owner."""
    file = open_file(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock_file(file)
    except BlockingIOError:
        os.close(file)
        raise Conflict(
            f"another loader owns {folder}: one process loads, the others attach; wait until it has ended, or use "
            "another folder",
            path=str(folder),
        ) from None
    return file


def _counted(lock_fd: int) -> int:
    """The last generation, by the lock's file; where that is damaged, a number that none before can have had."""
    found = os.pread(lock_fd, 32, 0)
    if not found:
        return 0
    return int(found) if found.isdigit() and int(found) < _MOST_GENERATIONS else time.time_ns() // 1000


def _attachable(folder: Path, there: set[int]) -> set[int]:
    """The generations that readers may be attached to, of those that are there: not what died while it loaded."""
    try:
        return {current_generation(folder) or 0}
    except CorruptObject:
        return there


def _failing_at(path: Path, size: int | None = None) -> AbstractContextManager[None]:
    """Turn an `OSError` about shared memory into an error with advice."""
    return failing_at(path, "shared" if size is None else f"shared in {size} bytes", _ADVICE)


_OWNERS: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _disown_in_child() -> None:
    # A lock belongs to the open file, which a child shares: it would keep the folder when the owner has died. And the
    # view that a child has goes stale, as the owner merges newer ones into the rows that both see.
    for memory in list(_OWNERS):
        memory._release_lock()
        for publisher in list(memory._publishers):
            publisher.leave()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_disown_in_child)
