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

_ADVICE = {
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "the quota is used up: free some space there, or use another folder",
    errno.EFBIG: "the file system, or a limit of this process (ulimit -f), allows no file of that size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (fs.file-max)",
    errno.ELOOP: "it is a symbolic link, which is not followed: remove it",
}
# Without these (Windows) a link is followed, and a pipe waited for.
_NO_FOLLOW, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
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


def read_at_most(path: Path, limit_bytes: int) -> bytes:
    """Return a file's bytes, at most the first ``limit_bytes`` + 1. Follows no link, waits for no pipe.

    Raises
    ------
    OSError
        The file does not exist, is a link or no regular file, or cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | _NO_FOLLOW | _NO_WAIT | _BINARY)
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
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_FOLLOW | _BINARY, 0o666)
    with os.fdopen(fd, "wb") as file:
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
        The system has no such locks (Windows).
    """
    if fcntl is None:
        raise Unsupported("this needs file locks of Linux or macOS; run it there, or under WSL", found=sys.platform)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
