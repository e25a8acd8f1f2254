"""Read and write local files that are no objects of a store, with checks of sizes and links.

Mirrors, exports, recordings of changes, shared memory: every `OSError` about their files becomes an error of this
library that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from cnr_store.errors import AccessDenied, StorageFailure, Unsupported

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # all but Windows
    msvcrt = None  # type: ignore[assignment]

_ADVICE = {
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "the quota is used up: free some space there, or use another folder",
    errno.EFBIG: "the file system, or a limit of this process (ulimit -f), allows no file of that size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (fs.file-max)",
    errno.ELOOP: "it is a symbolic link, which is not followed: remove it",
}
# Windows lacks these: there `open_file` looks for a link itself, and a pipe is waited for.
_NO_FOLLOW, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_HAS_FOLDERS = hasattr(os, "O_DIRECTORY")  # Windows opens no folder
_LOCKED_BYTE = 1 << 30  # no file that is locked is so long: Windows keeps others from reading what it locks
_BINARY = getattr(os, "O_BINARY", 0)  # Windows: without it the ends of lines change
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def failing_at(
    path: str | os.PathLike[str], action: str, advice: Mapping[int, str] = MappingProxyType({})
) -> Iterator[None]:
    """Turn an `OSError` of the block into an error of this library.

    Parameters
    ----------
    action
        A participle for the message, such as "read" or "written".
    advice
        Errno to what the user can do about it, where the general advice does not fit.

    Raises
    ------
    AccessDenied, StorageFailure
    """
    try:
        yield
    except OSError as error:
        hint = advice.get(error.errno or 0) or _ADVICE.get(error.errno or 0)
        kind = AccessDenied if error.errno in _DENIED else StorageFailure
        raise kind(
            f"{os.fspath(path)} cannot be {action}: {error.strerror or error}{f'; {hint}' if hint else ''}",
            path=os.fspath(path),
            found=errno.errorcode.get(error.errno or 0),
        ) from error


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of a file, as `os.open` of bytes does; a link in its place is not followed.

    Without ``O_NOFOLLOW`` a link is found after the open, so pass no ``O_TRUNC``.

    Raises
    ------
    OSError
        ``ELOOP`` if it is a link.
    """
    fd = os.open(path, flags | _NO_FOLLOW | _BINARY, mode)
    if not _NO_FOLLOW:
        try:
            if not os.path.samestat(os.lstat(path), os.fstat(fd)):
                raise OSError(errno.ELOOP, "a symbolic link", os.fspath(path))
        except BaseException:
            os.close(fd)
            raise
    return fd


def sync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable; Windows has no such call for folders.

    Raises
    ------
    OSError
    """
    if not _HAS_FOLDERS and path.is_dir():
        return
    # Windows syncs only what is open for writing.
    fd = os.open(path, os.O_RDONLY if _HAS_FOLDERS else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_at_most(path: Path, limit_bytes: int) -> bytes:
    """Return a file's bytes, at most the first ``limit_bytes`` + 1. Follows no link, waits for no pipe.

    Raises
    ------
    OSError
        The file does not exist, is a link or no regular file, or cannot be read.
    """
    fd = open_file(path, os.O_RDONLY | _NO_WAIT)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        # Python takes memory for as much as is asked for.
        return file.read(min(limit_bytes, found.st_size) + 1)


def write_whole(path: Path, data: bytes) -> None:
    """Create or overwrite a file with these bytes. Does not follow a link in its place.

    Raises
    ------
    OSError
    """
    fd = open_file(path, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(fd, "wb") as file:
        file.truncate(0)
        file.write(data)


def reserve(fd: int, size_bytes: int) -> None:
    """Allocate a file's first blocks: else a write to its memory map on a full disk kills the process.

    macOS has no such call: there the file only gets its size.

    Raises
    ------
    OSError
        The disk is full.
    """
    if size_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
    elif size_bytes > os.fstat(fd).st_size:
        os.ftruncate(fd, size_bytes)


def lock_file(fd: int) -> None:
    """Take the exclusive lock of an open file, for as long as it is open, without waiting.

    Raises
    ------
    BlockingIOError
        Another process has it.
    Unsupported
        The system has no such locks.
    """
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
        finally:
            os.lseek(fd, 0, os.SEEK_SET)
    else:
        raise Unsupported("this needs file locks of Linux, macOS or Windows; run it there", found=sys.platform)
