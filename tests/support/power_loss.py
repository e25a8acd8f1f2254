"""What of a local store a power loss leaves: only what was made durable, by a model of the calls of the os module."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.faulty import SimulatedCrash
from tests.support.recording_os import path_of


class VolatileOs:
    """The os module over a disk whose cache a power loss empties.

    A file's bytes are safe once it was synced since it was written last; a name, once its folder was synced since it
    was made. ``on_name`` is called with the path of each name that a link or a rename makes, right after it; where it
    returns True, the process is killed at its next fsync.
    """

    def __init__(self, on_name: Callable[[Path], bool]) -> None:
        self._on_name = on_name
        self._is_killed = False
        self._lock = threading.RLock()
        self._unsafe_bytes: set[int] = set()
        self._unsafe_names: set[Path] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        with self._lock:
            self._unsafe_bytes.add(os.fstat(fd).st_ino)
        return os.write(fd, data)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._named("open", (path,), {"dir_fd": dir_fd})
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)  # one that is there already is no new name
        self._named("mkdir", (path,), {"dir_fd": dir_fd})

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        missing = [one for one in (Path(path), *Path(path).parents) if not one.exists()]
        os.makedirs(path, mode, exist_ok)  # noqa: PTH103 - the call that is stood in for
        with self._lock:
            self._unsafe_names.update(missing)

    def link(self, *args: Any, **options: Any) -> None:
        self._name("link", args, options)

    def rename(self, *args: Any, **options: Any) -> None:
        self._name("rename", args, options)

    def replace(self, *args: Any, **options: Any) -> None:
        self._name("replace", args, options)

    def fsync(self, fd: int) -> None:
        if self._is_killed:
            self._is_killed = False
            raise SimulatedCrash("killed at an fsync")
        path = Path(f"/proc/self/fd/{fd}").readlink()
        with self._lock:  # what is made while it works may come too late
            names = {name for name in self._unsafe_names if name.parent == path}
        os.fsync(fd)
        with self._lock:
            self._unsafe_bytes.discard(os.fstat(fd).st_ino)
            self._unsafe_names -= names

    def leave(self, root: Path, image: Path, but: Path | None = None) -> None:
        """Copy to ``image`` what a power loss leaves of ``root``; of ``but`` the name and the folders were lucky."""
        with self._lock:
            lucky = set() if but is None else {but, *but.parents}
            unsafe_names, unsafe_bytes = self._unsafe_names - lucky, set(self._unsafe_bytes)
        image.mkdir(parents=True)
        for path in sorted(root.rglob("*")):
            if not unsafe_names.isdisjoint((path, *path.parents)):
                continue
            place = image / path.relative_to(root)
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            elif path.stat().st_ino in unsafe_bytes:
                place.write_bytes(b"")
            else:
                shutil.copyfile(path, place)

    def _name(self, call: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._named(call, args, options)
        getattr(os, call)(*args, **options)
        self._is_killed |= self._on_name(path_of(call, args, options))

    def _named(self, call: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        with self._lock:
            self._unsafe_names.add(path_of(call, args, options))
