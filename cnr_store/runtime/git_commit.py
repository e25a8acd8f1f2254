"""The commit of the git repository around a folder, read from its files: no process is started."""

from __future__ import annotations

import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?", re.ASCII)
_MOST_BYTES = 16 * 1024 * 1024
"""The size of the longest file that is read: the list of packed references."""


def git_commit(folder: Path | None = None) -> str | None:
    """Return the commit that is checked out around ``folder`` (None: the working directory), or None if there is none.

    Reads a few small files. Changes that are not committed do not show.
    """
    try:
        here = (folder or Path.cwd()).resolve()
        place = next((path / ".git" for path in (here, *here.parents) if (path / ".git").exists()), None)
        if place is None:
            return None
        if place.is_file():  # a worktree or a submodule
            place = place.parent / _text(place).removeprefix("gitdir:").strip()
        head = _text(place / "HEAD")
        if head.startswith("ref:"):
            head = _resolved(place, head.removeprefix("ref:").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return head if _COMMIT.fullmatch(head) else None


def _resolved(place: Path, reference: str) -> str:
    common = place / "commondir"
    shared = place / _text(common) if common.is_file() else place
    for folder in (place, shared):
        if (folder / reference).is_file():
            return _text(folder / reference)
    packed = shared / "packed-refs"
    lines = _text(packed).splitlines() if packed.is_file() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {reference}")), "")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode().strip()
