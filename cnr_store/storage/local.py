"""Local and mounted folders, with an own exclusive create: fsspec's, exists() + open(), is a race.

An object is written to a temporary file in its own folder, made durable, then linked (exclusive) or renamed
(overwriting) to its name. So no name ever refers to a partial object. `link` fails if the target exists, on every file
system with hard links; file systems without them are refused.

The root may be a symbolic link, but nothing below it: paths are opened from the root's descriptor without following
links (`open_below`), so no call, in particular no deletion, acts on a folder outside the store.
"""

# This module depends on the order of single system calls, which pathlib hides.
# ruff: noqa: PTH100, PTH103, PTH112, PTH114, PTH118, PTH120
from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice

from cnr_store.errors import BadInput, StorageFailure, UnsafeBackend, Unsupported
from cnr_store.storage.base import (
    TEMPORARY_PREFIX,
    Buffer,
    CreateOutcome,
    ObjectStat,
    Storage,
    check_key,
    check_prefix,
    is_key,
)
from cnr_store.storage.below import FOLDER, LISTED_FOLDER, make_below, open_below, open_one
from cnr_store.storage.failures import is_denied, storage_failure
from cnr_store.storage.redaction import Secrets

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FOLDER_ATTEMPTS = 5
_WRITE_BYTES = 64 * 1024 * 1024
_BUFFERS = 1024

_UNCACHED_BYTES = 16 * 1024 * 1024
"""Objects that are at least as large leave no copy in the page cache (`format_spec/decisions/0055`)."""

_WINDOW_BYTES = 8 * 1024 * 1024
"""Bytes of such an object that go to the disk at a time; a multiple of a page, so that none is written twice."""

_RWF_DONTCACHE = 0x80
_NO_DONTCACHE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def check_path(path: str | os.PathLike[str]) -> None:
    """Check the name of a file or folder of the caller. No I/O.

    Raises
    ------
    BadInput
        It holds a NUL character, or is not valid Unicode: records and documents name paths, and pyarrow takes
        no others.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise BadInput(f"{text!r} is no path: it holds a NUL character", found=text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{text!a} is not valid Unicode; rename the file or folder", found=ascii(text)) from None


class LocalStorage(Storage):
    """Objects as files below ``root``, which is created by the first write."""

    def __init__(self, root: str, *, fsync: bool = True, unsafe_single_writer: bool = False) -> None:
        if not os.supports_dir_fd:
            raise Unsupported(
                "a store in a local folder needs a system that opens files below an open folder (Linux, macOS); use an "
                "object store (s3://, gs://, abfs://, http://), or the Windows Subsystem for Linux",
                path=root, found=sys.platform,
            )  # fmt: skip
        if not root:
            raise BadInput("'' is no path: give \".\" for the present folder", found=root)
        check_path(root)
        super().__init__(os.path.abspath(root), is_exclusive=not unsafe_single_writer)
        self.root = self.url
        self.fsync = fsync
        self._secrets = Secrets()
        self._safe = _SafeNames()

    def _read(self, key: str, start: int, stop: int | None) -> bytes | None:
        with self._reading(key) as fd:
            if fd is None:
                return None
            size = os.fstat(fd).st_size
            return _read_range(fd, start, size if stop is None else min(stop, size))

    def _read_into(self, key: str, start: int, buffers: Sequence[memoryview]) -> int | None:
        with self._reading(key) as fd:
            return None if fd is None else _read_all_into(fd, start, buffers)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[int | None]:
        """Yield the descriptor of a file; None if there is none."""
        try:
            # O_NONBLOCK: a named pipe in place of an object must not block a reader.
            fd = self._open(key, os.O_RDONLY | os.O_NONBLOCK)
        except _ABSENT:
            yield None
            return
        except OSError as error:
            raise self._failure(error, "reading", key) from error
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise StorageFailure(f"{key!r} in {self.url} is a device, a pipe or a socket; remove it", path=key)
            yield None if stat.S_ISDIR(mode) else fd
        except OSError as error:
            raise self._failure(error, "reading", key) from error
        finally:
            os.close(fd)

    def _put(self, key: str, data: Sequence[Buffer]) -> None:
        try:
            with self._written(key, data) as (folder, temporary):
                try:
                    os.replace(temporary, _name_of(key), src_dir_fd=folder, dst_dir_fd=folder)
                except IsADirectoryError:
                    self._make_way(folder, key)
                    os.replace(temporary, _name_of(key), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise self._failure(error, "writing", key) from error

    def _create(self, key: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        refusal: FileExistsError | None = None
        is_written = False
        try:
            with self._written(key, [data]) as (folder, temporary):
                is_written = True
                try:
                    self._link(folder, temporary, key)
                except FileExistsError as error:
                    refusal = error
                _unlink_quietly(temporary, folder)
            # Also after a refusal: the existing object may be ours (NFS repeats a request whose reply was lost), and
            # must be durable before the caller reads it back and acknowledges it.
            self._sync_above([key])
        except OSError as error:
            # The object gets its name after its bytes, so here it does not exist and the caller need not retry.
            is_nothing = not is_written and (error.errno in _NO_SPACE or error.errno == errno.ELOOP)
            if is_nothing or is_denied(error):
                raise self._failure(error, "creating", key) from error
            return CreateOutcome.UNKNOWN, error
        return (CreateOutcome.CREATED, None) if refusal is None else (CreateOutcome.EXISTS, refusal)

    def _link(self, folder: int, temporary: str, key: str) -> None:
        name = _name_of(key)
        if not self.is_exclusive:
            with contextlib.suppress(FileNotFoundError):
                _status(name, folder)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            return
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            found = _status(name, folder).st_mode if error.errno == errno.EEXIST else 0
            if stat.S_ISLNK(found):
                raise self._failure(OSError(errno.ELOOP, os.strerror(errno.ELOOP), key), "creating", key) from error
            if stat.S_ISDIR(found):
                self._make_way(folder, key)
                self._link(folder, temporary, key)
                return
            if error.errno not in _NO_LINKS:
                raise
            raise UnsafeBackend(
                f"the file system of {self.url} has no hard links, so a commit there could not be exclusive; "
                "use another folder, or unsafe_single_writer=True if no other process ever writes",
                path=key,
                found=errno.errorcode.get(error.errno),
            ) from error

    def _make_way(self, folder: int, key: str) -> None:
        """Remove an empty folder that has an object's name: on an object store it would not be there."""
        try:
            os.rmdir(_name_of(key), dir_fd=folder)
        except OSError as error:
            raise StorageFailure(
                f"{key!r} in {self.url} is a folder with other files, in place of an object; move it away", path=key
            ) from error

    def _list_objects(self, folder: str) -> Iterator[ObjectStat]:
        for key, status in self._walk(folder):
            # A symbolic link is listed as an object: reading it is refused, deleting it deletes the link.
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                yield ObjectStat(key, status.st_size, status.st_mtime_ns // 1_000_000)

    def _walk(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield everything below a folder except folders, sorted within folders."""
        for key, status in self._entries(folder):
            if status is None:
                yield from self._walk(key)
            else:
                yield key, status

    def _list_folders(self, folder: str) -> list[str]:
        def is_there(key: str, status: os.stat_result | None) -> bool:
            if status is None:
                # As on object stores, a folder exists if it contains an object.
                return any(True for _ in self._list_objects(key))
            # A link may point to a folder: an access to its content raises.
            return stat.S_ISLNK(status.st_mode)

        return [_name_of(key) for key, status in self._entries(folder) if is_there(key, status)]

    def list_links(self, prefix: str) -> list[str]:
        """Return the keys of symbolic links at or below a folder; see `Storage.list_links`."""
        start = check_prefix(prefix)
        if (link := self._link_on_the_way_to(start)) is not None:
            return [link]
        return [key for key, status in self._walk(start) if stat.S_ISLNK(status.st_mode)]

    def _delete(self, keys: list[str]) -> None:
        for parent, group in groupby(keys, _folder_of):
            key = parent
            try:
                with self._opened(parent) as folder:
                    for key in group:
                        with contextlib.suppress(*_ABSENT):
                            os.unlink(_name_of(key), dir_fd=folder)
            except _ABSENT:
                continue
            except OSError as error:
                raise self._failure(error, "deleting", key) from error
        for emptied in _folders_of(*keys):
            self._remove_if_empty(emptied)

    def _remove_if_empty(self, emptied: str) -> None:
        if not emptied:
            return  # the root is kept
        try:
            with self._opened(_folder_of(emptied)) as folder:
                os.rmdir(_name_of(emptied), dir_fd=folder)
        except OSError:
            pass  # It is not empty, or already deleted.

    def sync_folders(self, keys: Iterable[str]) -> None:
        """Fsync every folder between these keys and the root, deepest first, once each.

        The root is synced if a name in it may be new: one of the keys, or a folder that no earlier sync met there.
        """
        given = [check_key(key) for key in keys]
        try:
            self._sync_above(given)
        except OSError as error:
            first = next(filter(self._link_on_the_way_to, given), next(iter(given), ""))
            raise self._failure(error, "syncing the folders of", first) from error

    def sweep(self, prefix: str = "", *, older_than_s: float = 86_400.0) -> int:
        """Delete temporary files older than ``older_than_s`` and empty folders; return the number of files."""
        start = check_prefix(prefix)
        oldest = time.time() - older_than_s
        removed = 0
        try:
            with self._opened(start, LISTED_FOLDER) as top:
                for _, folders, names, folder in os.fwalk(".", topdown=False, dir_fd=top):
                    for name in names:
                        with contextlib.suppress(FileNotFoundError):
                            if name.startswith(TEMPORARY_PREFIX) and _status(name, folder).st_mtime < oldest:
                                os.unlink(name, dir_fd=folder)
                                removed += 1
                    for name in folders:
                        with contextlib.suppress(OSError):  # not empty
                            os.rmdir(name, dir_fd=folder)
        except _ABSENT:
            return removed
        except OSError as error:
            raise self._failure(error, "sweeping", start) from error
        self._remove_if_empty(start)
        return removed

    def _entries(self, folder: str) -> list[tuple[str, os.stat_result | None]]:
        """Return the sorted keys in a folder, each with its status; None for a folder."""
        found: list[tuple[str, os.stat_result | None]] = []
        try:
            with self._opened(folder, LISTED_FOLDER) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    if is_key(entry.name):
                        key = f"{folder}/{entry.name}" if folder else entry.name
                        with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                            is_folder = entry.is_dir(follow_symlinks=False)
                            found.append((key, None if is_folder else entry.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._failure(error, "listing", folder) from error
        return sorted(found, key=lambda one: one[0])

    @contextlib.contextmanager
    def _written(self, key: str, data: Sequence[Buffer]) -> Iterator[tuple[int, str]]:
        """Write a temporary file, deleted after an error; yield its folder's descriptor and its name."""
        temporary = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        folder, fd = self._open_new(_folder_of(key), temporary)
        try:
            try:
                # Without fsync nobody waits for the disk, and the page cache is what makes that fast.
                if not (self.fsync and sum(map(len, data)) >= _UNCACHED_BYTES and _write_uncached(fd, data)):
                    for buffer in data:
                        _write_all(fd, buffer)
                if self.fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            yield folder, temporary
        except BaseException:
            _unlink_quietly(temporary, folder)
            raise
        finally:
            os.close(folder)

    def _open_new(self, folder: str, temporary: str) -> tuple[int, int]:
        """Return descriptors of a folder, created if missing, and of a new file in it."""
        for attempt in range(_FOLDER_ATTEMPTS):
            try:
                place = make_below(os.open(self.root, FOLDER), folder)
                try:
                    return place, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=place)
                except BaseException:
                    os.close(place)
                    raise
            except FileNotFoundError:
                # The root is missing, or a delete emptied and removed a folder between two calls.
                if attempt == _FOLDER_ATTEMPTS - 1:
                    raise
                # makedirs also raises FileExistsError if the folder is removed between its own two checks.
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    self._make_root()
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
                above = os.open(os.path.dirname(made), LISTED_FOLDER)
                try:
                    _sync_folder(above)
                finally:
                    os.close(above)

    def _sync_above(self, keys: Iterable[str]) -> None:
        """Fsync every folder between these keys and the root, deepest first; each is opened from the one above."""
        if not self.fsync:
            return
        tree: _Folders = {}
        is_new = False
        for key in keys:
            inside, parts = tree, key.split("/")
            is_new |= len(parts) == 1
            for part in parts[:-1]:
                inside = inside.setdefault(part, {})
        with self._opened("", LISTED_FOLDER) as root, contextlib.ExitStack() as held:
            found: dict[str, int] = {}
            for name in sorted(tree):
                found[name] = fd = open_one(root, name, LISTED_FOLDER)
                held.callback(os.close, fd)
                _sync_inside(fd, tree[name])
                _sync_folder(fd)
            if is_new or not tree or not all(self._safe.has(name, fd) for name, fd in found.items()):
                _sync_folder(root)
                self._safe.add(found)

    @contextlib.contextmanager
    def _opened(self, folder: str, flags: int = FOLDER) -> Iterator[int]:
        fd = self._open(folder, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int:
        """Return a descriptor of ``path``, or of the root; ``ELOOP`` if a part of the path is a link."""
        if not path:
            return os.open(self.root, flags)
        root = os.open(self.root, FOLDER)
        try:
            return open_below(root, path, flags)
        finally:
            os.close(root)

    def _link_on_the_way_to(self, path: str) -> str | None:
        parts = path.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return next((one for one in above if os.path.islink(os.path.join(self.root, one))), None)

    def _failure(self, error: OSError, action: str, key: str) -> Exception:
        if error.errno == errno.ELOOP:
            link = self._link_on_the_way_to(key) or key
            return StorageFailure(
                f"{action} {key!r} in {self.url} was refused: {link!r} is a symbolic link. The root of a store may be "
                "one, nothing below it: put what it points to in its place (a bind mount does), or remove it",
                path=link,
                found="symbolic link",
            )
        return storage_failure(error, action=action, url=self.url, key=key, secrets=self._secrets)


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _name_of(key: str) -> str:
    return key.rpartition("/")[2]


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
        if not piece:  # cut short during the read: the caller checks the size
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_all_into(fd: int, start: int, buffers: Sequence[memoryview]) -> int:
    at, waiting = start, [buffer for buffer in buffers if len(buffer)]
    while waiting and (found := os.preadv(fd, waiting[:_BUFFERS], at)):
        at += found
        while waiting and found >= len(waiting[0]):
            found -= len(waiting.pop(0))
        if found:
            waiting[0] = waiting[0][found:]
    return at - start


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    view = view.cast("B") if view.contiguous else memoryview(view.tobytes())
    while len(view):
        view = view[os.write(fd, view[:_WRITE_BYTES]) :]


def _write_uncached(fd: int, data: Sequence[Buffer]) -> bool:
    """Write bytes to an empty file and have them leave the page cache once they are on the disk.

    The disk begins with each window at once. False if system or file system cannot do so; nothing is written then.
    """
    if sys.platform != "linux":
        return False
    waiting, at = deque(memoryview(buffer) for buffer in data if len(buffer)), 0
    while waiting:
        window, room = list[memoryview](), _WINDOW_BYTES - at % _WINDOW_BYTES
        for view in islice(waiting, _BUFFERS):
            window.append(view[:room])
            room -= len(window[-1])
            if not room:
                break
        try:
            written = os.pwritev(fd, window, at, _RWF_DONTCACHE)
        except OSError as error:
            if at == 0 and error.errno in _NO_DONTCACHE:
                return False
            raise
        at += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.popleft())
        if written:
            waiting[0] = waiting[0][written:]
    return True


_Folders = dict[str, "_Folders"]
"""Names of folders, and what is to be synced in each."""


class _SafeNames:
    """Names in a root that a sync has made durable, each with the folder that had it then.

    The folders are held open, so that none that is made after one of them has gone gets its inode number.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._held)

    def has(self, name: str, fd: int) -> bool:
        """Return whether the name of an open folder is durable."""
        with self._lock:
            held = self._held.get(name)
            return held is not None and os.path.samestat(os.fstat(held), os.fstat(fd))

    def add(self, folders: Mapping[str, int]) -> None:
        """Note the names of open folders, which were there before the root was synced."""
        with self._lock:
            for name, fd in folders.items():
                old, self._held[name] = self._held.get(name), os.dup(fd)
                if old is not None:
                    os.close(old)


def _close_all(held: dict[str, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _sync_inside(fd: int, inside: _Folders) -> None:
    """Fsync what is named in an open folder, deepest first."""
    for name in sorted(inside):
        below = open_one(fd, name, LISTED_FOLDER)
        try:
            _sync_inside(below, inside[name])
            _sync_folder(below)
        finally:
            os.close(below)


def _sync_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync a folder, and make entries durable themselves.
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _status(name: str, folder: int) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _unlink_quietly(name: str, folder: int) -> None:
    # It may already be renamed, or fail for the same reason as the write; `sweep` deletes leftovers later.
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
