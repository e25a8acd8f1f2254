"""Open a path below a folder without following symbolic links or a race between check and use.

A link below a store's root would redirect deletions, writes and reads to another folder. Linux refuses links in one
system call (``openat2``, since 5.6, without a Python function); elsewhere the path is opened part by part.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from functools import cache
from typing import Any

# Windows has neither; there `LocalStorage` refuses, and this module must still be importable.
_FOLDER_ONLY = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)

FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | _FOLDER_ONLY
"""Flags to open a folder for access to its entries; to list or sync it use `LISTED_FOLDER`."""

LISTED_FOLDER = os.O_RDONLY | _FOLDER_ONLY

_OPENAT2 = 437
"""The system call's number, which is the same on every architecture."""

_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x04, 0x08


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_below(folder: int, path: str, flags: int) -> int:
    """Return a descriptor of ``path`` (no empty or dotted parts) below an open folder; creates nothing.

    Raises
    ------
    OSError
        ``ELOOP`` if a part of the path is a symbolic link; else as `os.open`.
    """
    openat2 = _openat2()
    if openat2 is None:
        return _walk(folder, path, flags)
    while (fd := openat2(_OPENAT2, folder, path.encode(), _how(flags), ctypes.sizeof(_OpenHow))) < 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)
    return int(fd)


def make_below(folder: int, path: str) -> int:
    """Return a descriptor (`FOLDER`) of the folder ``path`` below an open folder; create missing folders.

    Raises
    ------
    OSError
        As for `open_below`. ``ENOENT`` if a new folder was deleted before the one inside it was created.
    """
    fd = os.dup(folder)
    for part in path.split("/"):
        above = fd
        try:
            try:
                os.mkdir(part, dir_fd=above)
            except FileExistsError:
                pass
            fd = open_below(above, part, FOLDER)
        finally:
            os.close(above)
    return fd


def _walk(folder: int, path: str, flags: int) -> int:
    *parents, name = path.split("/")
    fd = os.dup(folder)
    try:
        for part in parents:
            fd, above = _open_one(fd, part, FOLDER), fd
            os.close(above)
        return _open_one(fd, name, flags)
    finally:
        os.close(fd)


def _open_one(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except NotADirectoryError:
        # O_DIRECTORY gives this error for a link, too.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


@cache
def _how(flags: int) -> Any:
    return ctypes.byref(_OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH))


@cache
def _openat2() -> Any:
    """Return the system call, or None if the kernel or this process's sandbox does not support it."""
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    root = os.open("/", FOLDER)
    try:
        fd = call(_OPENAT2, root, b".", _how(FOLDER), ctypes.sizeof(_OpenHow))
    finally:
        os.close(root)
    if fd < 0:
        return None
    os.close(fd)
    return call
