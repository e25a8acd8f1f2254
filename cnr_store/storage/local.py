"""Local and mounted folders, with our own exclusive create: fsspec's is exists() + open(), which is a race.

An object is written to a temporary file in its own folder, made durable, then linked (exclusive) or renamed
(overwriting) to its name, so no name ever shows half an object. `link` fails if the target exists, on every
file system that has hard links; those without are refused.
"""

# The order of single system calls is what this module is about; pathlib hides it.
# ruff: noqa: PTH100, PTH103, PTH104, PTH105, PTH106, PTH108, PTH112, PTH116, PTH118, PTH120
from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator

from cnr_store.errors import UnsafeBackend
from cnr_store.storage.base import (
    TEMPORARY_PREFIX,
    CreateOutcome,
    ObjectStat,
    Storage,
    check_key,
    check_prefix,
    is_key,
)
from cnr_store.storage.failures import is_denied, storage_failure
from cnr_store.storage.redaction import Secrets

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FOLDER_ATTEMPTS = 5
_WRITE_BYTES = 64 * 1024 * 1024


class LocalStorage(Storage):
    """Objects are files under ``root``. Nothing is created before the first write."""

    def __init__(self, root: str, *, fsync: bool = True, unsafe_single_writer: bool = False) -> None:
        super().__init__(os.path.abspath(root), is_exclusive=not unsafe_single_writer)
        self.root = self.url
        self.fsync = fsync
        self._secrets = Secrets()

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        try:
            # O_NONBLOCK: a named pipe in the place of an object must not hang a reader.
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return None
                return _read_range(fd, start, status.st_size if stop is None else min(stop, status.st_size))
            finally:
                os.close(fd)
        except _ABSENT:
            return None
        except OSError as error:
            raise self._failure(error, "reading", key) from error

    def _put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        try:
            temporary = self._write_temporary(path, data)
            try:
                os.replace(temporary, path)
            except BaseException:
                _unlink_quietly(temporary)
                raise
        except OSError as error:
            raise self._failure(error, "writing", key) from error

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        path = self._path(key)
        refusal: FileExistsError | None = None
        is_written = False
        try:
            temporary = self._write_temporary(path, data)
            is_written = True
            try:
                self._link(temporary, path, key)
            except FileExistsError as error:
                refusal = error
            finally:
                _unlink_quietly(temporary)
            # Also after a refusal: the object found may be ours (NFS repeats a request whose reply was lost),
            # and must be durable before a read-back lets the caller acknowledge it.
            self._sync(_folders_of(key))
        except OSError as error:
            # Without its bytes the object has not got its name: no need to ask again until a deadline.
            is_full = not is_written and error.errno in _NO_SPACE
            if is_full or is_denied(error):
                raise self._failure(error, "creating", key) from error
            return CreateOutcome.UNKNOWN, error
        return (CreateOutcome.CREATED, None) if refusal is None else (CreateOutcome.EXISTS, refusal)

    def _link(self, temporary: str, path: str, key: str) -> None:
        if not self.is_exclusive:
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            os.rename(temporary, path)
            return
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise UnsafeBackend(
                f"the file system of {self.url} has no hard links, so a commit there could not be exclusive; "
                "use another folder, or unsafe_single_writer=True if no other process ever writes",
                path=key,
                found=errno.errorcode.get(error.errno),
            ) from error

    def _list_objects(self, folder: str) -> Iterator[ObjectStat]:
        try:
            entries = self._entries(folder)
            for entry in entries:
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._list_objects(key)
                elif entry.is_file():
                    with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                        status = entry.stat()
                        yield ObjectStat(key, status.st_size, status.st_mtime_ns // 1_000_000)
        except OSError as error:
            raise self._failure(error, "listing", folder) from error

    def _list_folders(self, folder: str) -> list[str]:
        try:
            names = [entry.name for entry in self._entries(folder) if entry.is_dir()]
        except OSError as error:
            raise self._failure(error, "listing", folder) from error
        # As on object stores, a folder is there when an object is in it.
        return [name for name in names if any(True for _ in self._list_objects(f"{folder}/{name}".lstrip("/")))]

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            try:
                os.unlink(self._path(key))
            except _ABSENT:
                continue
            except OSError as error:
                raise self._failure(error, "deleting", key) from error
        for folder in _folders_of(*keys):
            if folder:
                with contextlib.suppress(OSError):  # not empty, or gone already
                    os.rmdir(self._path(folder))

    def sync_folders(self, keys: Iterable[str]) -> None:
        """Fsync every folder between these keys and the root, the root included, deepest first, once each."""
        checked = [check_key(key) for key in keys]
        try:
            self._sync(_folders_of(*checked))
        except OSError as error:
            raise self._failure(error, "syncing folders of", None) from error

    def sweep(self, prefix: str = "", *, older_than_s: float = 86_400.0) -> int:
        """Remove temporary files older than ``older_than_s`` and empty folders; return how many files."""
        start = check_prefix(prefix)
        oldest = time.time() - older_than_s
        removed = 0
        try:
            for folder, _, names in os.walk(self._path(start), topdown=False):
                for name in names:
                    path = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        if name.startswith(TEMPORARY_PREFIX) and os.stat(path).st_mtime < oldest:
                            os.unlink(path)
                            removed += 1
                if folder != self.root:
                    with contextlib.suppress(OSError):  # not empty
                        os.rmdir(folder)
        except OSError as error:
            raise self._failure(error, "sweeping", start) from error
        return removed

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._path(folder)) as entries:
                return sorted((entry for entry in entries if is_key(entry.name)), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _write_temporary(self, path: str, data: bytes | memoryview) -> str:
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        fd = self._open_new(temporary, folder)
        try:
            try:
                _write_all(fd, data)
                if self.fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            _unlink_quietly(temporary)
            raise
        return temporary

    def _open_new(self, temporary: str, folder: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for attempt in range(_FOLDER_ATTEMPTS):
            try:
                return os.open(temporary, flags, 0o666)
            except FileNotFoundError:
                # Missing, or removed by a delete that emptied it between the two calls.
                if attempt == _FOLDER_ATTEMPTS - 1:
                    raise
                # makedirs says "exists" of a folder that goes between its own two looks, too.
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    self._make_root()
                    os.makedirs(folder, exist_ok=True)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _make_root(self) -> None:
        missing = []
        folder = self.root
        while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
            missing.append(folder)
            folder = os.path.dirname(folder)
        os.makedirs(self.root, exist_ok=True)
        if self.fsync:
            for made in missing:
                _sync_folder(os.path.dirname(made))

    def _sync(self, folders: list[str]) -> None:
        if self.fsync:
            for folder in folders:
                _sync_folder(self._path(folder))

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key) if key else self.root

    def _failure(self, error: OSError, action: str, key: str | None) -> Exception:
        return storage_failure(error, action=action, url=self.url, key=key, secrets=self._secrets)


def _folders_of(*keys: str) -> list[str]:
    """Return every folder between these keys and the root (''), deepest first, without repeats."""
    found = {""}
    for key in keys:
        parts = key.split("/")[:-1]
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return sorted(found, key=lambda folder: (-folder.count("/") - bool(folder), folder))


def _read_range(fd: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop:
        piece = os.pread(fd, stop - start, start)
        if not piece:  # cut short while it was read: the caller's size check tells
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    view = view.cast("B") if view.contiguous else memoryview(view.tobytes())
    while len(view):
        view = view[os.write(fd, view[:_WRITE_BYTES]) :]


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync a folder and make entries durable on their own.
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def _unlink_quietly(path: str) -> None:
    # Renamed away already, or the failure that brought us here also stops this; `sweep` finds what is left.
    with contextlib.suppress(OSError):
        os.unlink(path)
