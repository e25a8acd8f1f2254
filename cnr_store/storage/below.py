"""Open a path below a folder without following symbolic links or a race between check and use.

A link below a store's root would redirect deletions, writes and reads to another folder. So each part of a path is
opened relative to the folder before it, and refused if it is a link.
"""

from __future__ import annotations

import errno
import os
import stat

# Windows has neither; there `LocalStorage` refuses, and this module must still be importable.
_FOLDER_ONLY = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)

FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | _FOLDER_ONLY
"""Flags to open a folder for access to its entries; to list or sync it use `LISTED_FOLDER`."""

LISTED_FOLDER = os.O_RDONLY | _FOLDER_ONLY


def open_below(folder: int, path: str, flags: int) -> int:
    """Return a descriptor of ``path`` (no empty or dotted parts) below an open folder; creates nothing.

    Raises
    ------
    OSError
        ``ELOOP`` if a part of the path is a symbolic link; else as `os.open`.
    """
    *parents, name = path.split("/")
    fd = os.dup(folder)
    try:
        for part in parents:
            fd, above = open_one(fd, part, FOLDER), fd
            os.close(above)
        return open_one(fd, name, flags)
    finally:
        os.close(fd)


def make_below(folder: int, path: str) -> int:
    """Return a descriptor (`FOLDER`) of the folder ``path`` below an open one, which it closes; create missing folders.

    Raises
    ------
    OSError
        As for `open_below`. ``ENOENT`` if a new folder was deleted before the one inside it was created.
    """
    fd = folder
    for part in path.split("/") if path else ():
        above = fd
        try:
            try:
                fd = open_one(above, part, FOLDER)
            except FileNotFoundError:
                try:
                    os.mkdir(part, dir_fd=above)
                except FileExistsError:
                    pass  # another thread was faster
                fd = open_one(above, part, FOLDER)
        finally:
            os.close(above)
    return fd


def open_one(folder: int, name: str, flags: int) -> int:
    """Return a descriptor of an entry of an open folder; raises as `open_below`."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except NotADirectoryError:
        # O_DIRECTORY gives this error for a link, too.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise
