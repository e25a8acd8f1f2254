"""The os module for `cnr_store.storage.local`, noting the calls that decide what survives a power loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RecordingOs:
    """Notes calls as (name, path below ``root``) in ``calls``, and fails those named in ``fail``."""

    NOTED = ("open", "write", "pwritev", "fsync", "link", "replace", "rename", "unlink", "mkdir")

    def __init__(self, root: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fail: dict[str, OSError] = {}
        self._root = root

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        return self._noting(name, function) if name in self.NOTED else function

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = path_of(name, args, options)
            if name != "open":
                self.calls.append((name, self.shown(path)))
            if name in self.fail:
                raise self.fail[name]
            return function(*args, **options)

        return call

    def shown(self, path: Path) -> str:
        """Return a path as a key, temporary names as ``.tmp``; what is not below the root as ``outside``."""
        shown = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else "outside"
        parts = [".tmp" if part.startswith(".tmp-") else part for part in shown.split("/")]
        return "/".join(parts)


def path_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Path:
    """Return the path that a call of the os module is about; of two, the one that it makes."""
    target = args[1] if name in ("link", "replace", "rename") else args[0]
    folder = options.get("dst_dir_fd", options.get("dir_fd"))
    if isinstance(target, int):
        return Path(f"/proc/self/fd/{target}").readlink()
    return Path(target) if folder is None else Path(f"/proc/self/fd/{folder}").readlink() / target
